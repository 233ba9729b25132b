"""A small daemon without sockets: store, scheduler, pump and simulated engine, and a rank that speaks to it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Sequence
from typing import TypeVar

from offloadd.core.clock import ManualClock
from offloadd.core.errors import Code
from offloadd.core.records import Mode, Op, Reply, Request, ShardSpec, TileKey
from offloadd.pump import Pump
from offloadd.scheduler import Scheduler
from offloadd.scheduler.plan import AccessPlan
from offloadd.store import Catalog, Store, SwapTarget
from tests.sim_engine import SimEngine

Result = TypeVar("Result")

PAGE = 4096
NO_TILE = TileKey(0, 0)


def to_the_end(work: Generator[None, None, Result]) -> Result:
    """Without giving anybody a turn."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: Result = done.value
            return result


class Rank:
    """An endpoint and its client, without a ring."""

    def __init__(self, world: World, session: int) -> None:
        self.session = session
        self.world = world
        self.outgoing: deque[Request] = deque()
        self.replies: dict[int, Reply] = {}
        self.sent: dict[int, Request] = {}
        self.blocked = (0, 0)
        """As a real client: how long the last fetch held the rank up, and why; told with the next request."""
        self._ids = itertools.count(1)

    def drain(self, limit: int) -> list[Request]:
        return [self.outgoing.popleft() for _ in range(min(limit, len(self.outgoing)))]

    def post(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            assert reply.session == self.session
            assert reply.id in self.sent, "a reply to nothing"
            assert reply.id not in self.replies, "answered twice"
            self.replies[reply.id] = reply

    def send(self, op: Op, tile: TileKey = NO_TILE, mode: Mode = Mode.READ, lease: int = 0) -> int:
        number = next(self._ids)
        blocked_ns, cause = self.blocked
        self.blocked = (0, 0)
        request = Request(self.session, number, op, mode, tile, lease, self.world.clock.now_ns(), blocked_ns, cause)
        self.sent[number] = request
        self.outgoing.append(request)
        return number

    def wait(self, number: int) -> Reply:
        self.world.run(lambda: number in self.replies)
        return self.replies[number]

    def fetch(self, tile: TileKey, mode: Mode = Mode.READ) -> Reply:
        reply = self.wait(self.send(Op.FETCH, tile, mode))
        self.blocked = (reply.waited_ns, reply.cause)
        return reply

    def end(self, lease: int, store: bool) -> Reply:
        return self.wait(self.send(Op.STORE if store else Op.RELEASE, lease=lease))

    def flush(self) -> Reply:
        return self.wait(self.send(Op.FLUSH))

    def memory(self, reply: Reply) -> memoryview:
        region = self.world.engine.regions[self.world.store.terms(self.session).region]
        return region[reply.offset : reply.offset + reply.length]

    def put(self, tile: TileKey, content: bytes) -> None:
        reply = self.fetch(tile, Mode.OVERWRITE)
        assert reply.code is Code.OK, reply
        assert reply.length == len(content)
        self.memory(reply)[:] = content
        assert self.end(reply.lease, True).code is Code.OK

    def get(self, tile: TileKey) -> bytes:
        reply = self.fetch(tile)
        assert reply.code is Code.OK, reply
        content = bytes(self.memory(reply))
        assert self.end(reply.lease, False).code is Code.OK
        return content


class World:
    """Everything between the rings and the device."""

    def __init__(self, checksums: bool = True, windows: dict[int, int] | None = None, **engine: object) -> None:
        self.clock = ManualClock(1_000_000_000)
        self.engine = SimEngine(self.clock, **engine)  # type: ignore[arg-type]
        self.catalog = Catalog(":memory:")
        self.store = Store(self.catalog)
        self.scheduler = Scheduler(windows or {})
        self.pump = Pump(self.store, self.scheduler, self.engine, self.clock, checksums)

    def open(
        self,
        session: int = 1,
        region_bytes: int = 16 * PAGE,
        tile_bytes: int = PAGE,
        swap_bytes: int = 1 << 40,
        files: Sequence[SwapTarget] | None = None,
        weight: float = 1.0,
    ) -> Rank:
        files = files if files is not None else [SwapTarget(10 * session, 0, 1.0), SwapTarget(10 * session + 1, 1, 1.0)]
        self.store.open_session(
            session, f"job{session}", 0, session, region_bytes, tile_bytes, swap_bytes, files, weight
        )
        self.engine.register_region(session, memoryview(bytearray(region_bytes)))
        rank = Rank(self, session)
        self.pump.attach(rank)
        return rank

    def register(self, session: int, *lengths: int, on_disk: bool = True, prefix: str = "s") -> list[list[TileKey]]:
        specs = [ShardSpec(f"{prefix}{i}", "float32", n, "master", on_disk) for i, n in enumerate(lengths)]
        registration = to_the_end(self.store.prepare_registration(session, specs))
        for file, length in registration.grow.items():
            self.engine.grow(file, length)
        self.store.record_registration(registration).result(10)
        self.store.commit_registration(registration)
        return [[tile.key for tile in shard.tiles] for shard in registration.prepared]

    def follow(self, session: int, plan: Sequence[TileKey]) -> None:
        self.pump.follow(session, AccessPlan(plan))

    def leave(self, session: int) -> None:
        """End a session whose transfers have ended."""
        quiet: list[int] = []
        self.pump.detach(session, quiet.append)
        assert quiet == [session]
        to_the_end(self.store.close_session(session))

    def run(self, until: object = None, limit: int = 10_000) -> None:
        """Step and move the clock until `until()` holds; without it, until nothing is left to do. Waits bounded."""
        for _ in range(limit):
            while self.pump.step():
                pass
            if callable(until) and until():
                return
            due = [t for t in (self.engine.next_due_ns(), self.pump.next_deadline_ns()) if t is not None]
            if due:
                self.clock.advance(max(0, min(due) - self.clock.now_ns()))
                continue
            if self.catalog.poll() or until is not None:
                self.catalog.submit(lambda database: None).result(10)
                self.pump.step()
                if callable(until) and until():
                    return
                if self.engine.next_due_ns() is None and self.pump.next_deadline_ns() is None and until is not None:
                    raise AssertionError("nothing more will happen")
                continue
            return
        raise AssertionError("it never came to rest")

    def close(self) -> None:
        self.catalog.close()
        self.engine.close()
