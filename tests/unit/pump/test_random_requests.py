"""Random requests against a model: exactly one reply each, the right bytes, budgets kept."""

from __future__ import annotations

import errno
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from offloadd.core.errors import Code
from offloadd.core.records import Direction, Mode, Op, Reply, Request, TileKey, Transfer
from offloadd.store.allocator import SlotAllocator
from tests.pump_world import PAGE, Rank, World

TILE = 3 * PAGE
LEASES = 4
REGION = (2 * LEASES + 1) * TILE


class Actor:
    """One rank that does anything it may, and checks all it gets."""

    def __init__(self, world: World, session: int, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.rank: Rank = world.open(session, region_bytes=REGION, tile_bytes=TILE, weight=rng.choice([1.0, 3.0]))
        lengths = [rng.choice([0, 1, 5, PAGE, TILE, 4 * TILE + 17, 2 * TILE - 1]) for _ in range(6)]
        self.tiles = [key for shard in world.register(session, *lengths) for key in shard]
        self.content: dict[TileKey, bytes | None] = dict.fromkeys(self.tiles)
        self.leases: dict[int, tuple[TileKey, Mode, Reply]] = {}
        self.asked: dict[int, Request] = {}
        self.faults = False
        if rng.random() < 0.7:
            world.follow(session, rng.sample(self.tiles, len(self.tiles)))

    def act(self) -> None:
        roll = self.rng.random()
        fetching = sum(1 for request in self.asked.values() if request.op is Op.FETCH)
        if roll < 0.5 and fetching + len(self.leases) < LEASES:
            self._send(Op.FETCH, self.rng.choice(self.tiles), self.rng.choice(list(Mode)))
        elif roll < 0.9 and self.leases:
            self._end(self.rng.choice(list(self.leases)))
        elif roll < 0.93:
            self._send(Op.FLUSH, TileKey(0, 0), Mode.READ)
        elif roll < 0.95:
            self._send(Op.NOP, TileKey(0, 0), Mode.READ)

    def collect(self) -> None:
        for number in [n for n in self.asked if n in self.rank.replies]:
            request, reply = self.asked.pop(number), self.rank.replies[number]
            if request.op is Op.FETCH:
                self._fetched(request, reply)
            elif request.op is Op.FLUSH:
                allowed = {Code.OK, Code.LEASE_CONFLICT} | ({Code.IO_ERROR} if self.faults else set())
                assert reply.code in allowed
            else:
                assert reply.code is Code.OK

    def _fetched(self, request: Request, reply: Reply) -> None:
        if reply.code is Code.OK:
            memory = self.rank.memory(reply)
            if request.mode is not Mode.OVERWRITE:
                assert bytes(memory) == self.content[request.tile]
            self.leases[reply.lease] = (request.tile, request.mode, reply)
        elif reply.code is Code.NOT_STORED:
            assert self.content[request.tile] is None
        elif reply.code is Code.IO_ERROR:
            assert self.faults
            assert reply.errno == errno.EIO
        else:
            assert reply.code is Code.LEASE_CONFLICT

    def _end(self, lease: int) -> None:
        tile, mode, reply = self.leases.pop(lease)
        store = mode is not Mode.READ and self.rng.random() < 0.8
        if store:
            self.content[tile] = self.rng.randbytes(reply.length)
            self.rank.memory(reply)[:] = self.content[tile]
        elif mode is Mode.OVERWRITE:
            self.content[tile] = None
        self._send(Op.STORE if store else Op.RELEASE, TileKey(0, 0), Mode.READ, lease)

    def _send(self, op: Op, tile: TileKey, mode: Mode, lease: int = 0) -> None:
        number = self.rank.send(op, tile, mode, lease)
        self.asked[number] = self.rank.sent[number]

    def check_memory(self) -> None:
        arena = self.world.store.holdings(self.rank.session).arena
        end = 0
        for offset, tile in sorted(arena.owners.items()):
            assert offset >= end
            end = offset + tile.padded
            assert end <= REGION
        assert isinstance(arena.slots, SlotAllocator)
        assert sum(t.padded for t in arena.owners.values()) + arena.slots.free.free_bytes == REGION
        seen = arena.snapshot(0, 0)
        candidates = [t for t in arena.owners.values() if t.evictable]
        assert seen.dirty == sum(t.padded for t in candidates if t.dirty)
        assert seen.clean == sum(t.padded for t in candidates if not t.dirty)
        assert seen.free + seen.clean + seen.dirty + seen.pinned == REGION


def play(seed: int, faults: bool, steps: int = 300) -> None:
    rng = random.Random(seed)
    world = World(
        checksums=rng.random() < 0.8,
        windows={0: rng.choice([TILE, 8 * TILE]), 1: 2 * TILE},
        slots=rng.choice([2, 64]),
        latency_ns=(1, rng.choice([1, 1_000_000])),
        seed=seed,
    )
    actors = [Actor(world, session, rng) for session in range(1, rng.choice([1, 2, 3]) + 1)]
    if faults:

        def fault(transfer: Transfer) -> int:
            return -errno.EIO if transfer.direction is not Direction.CHECKSUM and rng.random() < 0.1 else 0

        world.engine.fault = fault
        for actor in actors:
            actor.faults = True
    for _ in range(steps):
        for actor in actors:
            actor.act()
        world.pump.step()
        world.clock.advance(rng.choice([0, 100_000, 10_000_000]))
        for actor in actors:
            actor.collect()
            actor.check_memory()
        for path, (inflight, limit) in world.scheduler.windows.state().items():
            assert inflight <= max(limit, TILE), path
    for actor in actors:
        world.run(lambda actor=actor: all(n in actor.rank.replies for n in actor.asked))
        actor.collect()
        assert not actor.asked
        assert len(actor.rank.replies) == len(actor.rank.sent)
    world.close()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32))
def test_every_request_is_answered_once_with_the_right_bytes(seed: int) -> None:
    play(seed, faults=False)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 32))
def test_device_errors_are_reported_and_never_become_wrong_bytes(seed: int) -> None:
    play(seed, faults=True)
