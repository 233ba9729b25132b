"""A rank's session: register shards, fetch and store tiles, from any of the rank's threads.

Whoever waits first reaps for all (leader and followers), so that no thread of its own is needed and a wake-up goes
straight to the waiting thread. Every wait has a deadline; a dead daemon is an error, not a hang.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from offloadd.client.channel import Buffer, Channel, RingChannel, StreamChannel
from offloadd.client.control import ControlClient
from offloadd.client.endpoint import check_timeout, parse
from offloadd.client.failure import explain
from offloadd.client.lease import Lease, LeaseBook, Slot
from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import Mode, Op, ShardSpec
from offloadd.wire.layout import RING_ENTRIES, Completion, pack_submission
from offloadd.wire.pb import control_pb2

__all__ = ["ClientSession", "Pending", "RegisteredShard", "Slot", "connect"]

_SILENT_SECONDS = 0.1
_POLL_SECONDS = 1.0
"""A follower looks again this often even if nobody woke it."""


@dataclass(frozen=True, slots=True)
class RegisteredShard:
    """A shard that the daemon keeps. `tiles` are (start, length) in bytes."""

    number: int
    spec: ShardSpec
    tiles: tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class Pending:
    """A request under way."""

    session: ClientSession
    op: Op
    mode: Mode
    title: str
    lease: Lease | None = None
    completion: Completion | None = None
    abandoned: bool = False

    def wait(self, timeout_s: float | None = None) -> Slot:
        """The slot of a FETCH. OffloadError names job, rank, shard and what to do."""
        if timeout_s is not None:
            check_timeout(timeout_s, f"timeout_s of {self.title}")
        completion = self.session.await_completion(self, timeout_s)
        return self.session.lend(self, completion)


class ClientSession:
    """Made by `connect`. Thread-safe. Unusable in a forked child."""

    def __init__(self, control: ControlClient, opened: control_pb2.OpenSessionResponse, rank: int, timeout_s: float):
        self.control = control
        self.job = opened.job
        self.rank = rank
        self.timeout_s = timeout_s
        self.host_bytes = 0
        self.tile_bytes = 0
        self._ref = control_pb2.SessionRef(session=opened.session, secret=opened.secret)
        self._generation = 0
        self._channel: Channel | None = None
        self._condition = threading.Condition()
        self._reaping = False
        self._silent = False
        self._pending: dict[int, Pending] = {}
        self._next_id = 1
        self._book = LeaseBook()
        self._deferred: list[OffloadError] = []
        self._blocked: deque[tuple[int, int]] = deque(maxlen=RING_ENTRIES)
        self._foreground = threading.get_ident()
        self._background_cause = 0
        self._pid = os.getpid()
        self.fetches = self.stores = 0
        self.wait_seconds = 0.0
        os.register_at_fork(after_in_child=_Forked(self))

    @property
    def title(self) -> str:
        return f"job {self.job} rank {self.rank}"

    # ---- control -------------------------------------------------------------------------------------------------
    def reserve(
        self,
        host_bytes: int = 0,
        swap_bytes: int = 0,
        tile_bytes: int = 0,
        pinned_tiles: int = 4,
        fingerprint: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Ask for memory and swap space, together with all ranks of the job on this node, once, before step 1.
        host_bytes 0: an equal share; swap_bytes 0: what the shards need; tile_bytes 0: the daemon chooses.
        `pinned_tiles`: most tiles held at once."""
        wait = self.timeout_s if timeout_s is None else check_timeout(timeout_s, "timeout_s of reserve")
        request = control_pb2.ReserveRequest(
            session=self._ref,
            host_bytes=host_bytes,
            swap_bytes=swap_bytes,
            timeout_s=wait,
            tile_bytes=tile_bytes,
            pinned_tiles=pinned_tiles,
            fingerprint=fingerprint,
        )
        # Twice the wait: the daemon's own deadline must come first, since its error names the missing ranks.
        granted = self.control.call(self.control.stub.Reserve, request, 2 * wait + 30)
        self.host_bytes, self.tile_bytes = granted.host_bytes, granted.tile_bytes
        self._generation = granted.generation
        if self.control.passes_descriptors:
            liveness, descriptors = self.control.attach(self._ref.secret)
            region = (granted.arena_offset, granted.host_bytes)
            self._channel = RingChannel(self.control.peer, liveness, descriptors, region, granted.generation)
            self.control.hand_over()
        else:
            self._channel = StreamChannel(self.control.peer, self.control.channel, self._ref, self.control.token)

    def register(self, specs: Sequence[ShardSpec]) -> list[RegisteredShard]:
        """Make room for shards, all or none."""
        shards = [
            control_pb2.Shard(
                name=s.name,
                dtype=s.dtype,
                length=s.length,
                kind=s.kind,
                in_memory_only=not s.on_disk,
                tile_bytes=s.tile_bytes,
            )
            for s in specs
        ]
        request = control_pb2.RegisterShardsRequest(session=self._ref, shards=shards)
        answer = self.control.call(self.control.stub.RegisterShards, request, self.timeout_s + 120)
        return [
            RegisteredShard(answer.first_shard + i, spec, _tiles(spec.length, spec.tile_bytes or self.tile_bytes))
            for i, spec in enumerate(specs)
        ]

    def plan(self, accesses: Sequence[tuple[int, int, Mode]], steps: int = 1) -> None:
        """Say in which order (shard number, tile index, mode) will be fetched, cyclically, from now on: a hint.
        `steps`: training steps that one cycle covers; it scales the per-step metrics."""
        request = control_pb2.SubmitPlanRequest(
            session=self._ref,
            shards=[a[0] for a in accesses],
            tiles=[a[1] for a in accesses],
            modes=[int(a[2]) for a in accesses],
            steps=steps,
        )
        self.control.call(self.control.stub.SubmitPlan, request)

    def statistics(self) -> dict[str, float]:
        """The daemon's counters of this session, and the client's own."""
        request = control_pb2.SessionStatisticsRequest(session=self._ref)
        counters = dict(self.control.call(self.control.stub.SessionStatistics, request).counters)
        return counters | {
            "fetches": float(self.fetches),
            "stores": float(self.stores),
            "fetch_wait_seconds": self.wait_seconds,
        }

    # ---- data ----------------------------------------------------------------------------------------------------
    def fetch(self, shard: RegisteredShard, tile: int, mode: Mode) -> Pending:
        """Start fetching a tile; `wait` on the result gives the slot."""
        start, length = shard.tiles[tile]
        title = shard.spec.name if len(shard.tiles) == 1 else f"{shard.spec.name}[{start}:{start + length}]"
        self.fetches += 1
        return self._start(Op.FETCH, mode, shard.number, tile, 0, title)

    def drop(self, shard: RegisteredShard, tile: int) -> None:
        """Forget a tile's bytes."""
        self.await_completion(self._start(Op.DROP, Mode.READ, shard.number, tile, 0, shard.spec.name))

    def nop(self) -> None:
        """A round trip through the ring."""
        self.await_completion(self._start(Op.NOP, Mode.READ, 0, 0, 0, "nop"))

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when everything stored is on disk and synced; raise the first failure of a store."""
        if timeout_s is not None:
            check_timeout(timeout_s, "timeout_s of flush")
        self.await_completion(self._start(Op.FLUSH, Mode.READ, 0, 0, 0, "flush"), timeout_s)
        self.raise_deferred()

    def close(self) -> None:
        """Leave: everything the session held returns. Idempotent. Other threads' waits end with an error."""
        if self._pid != os.getpid():
            self._channel = None
            return
        with self._condition:
            channel, self._channel = self._channel, None
            # A thread that waits in the channel, outside the lock, uses its descriptors: it closes them when it is
            # out. Closed under it their numbers could be someone else's by then.
            in_use = self._reaping
            self._condition.notify_all()
        if self._ref.secret:
            # If the daemon is gone, so is everything that could be given back.
            with contextlib.suppress(OffloadError):
                patience = min(5.0, self.timeout_s)
                request = control_pb2.CloseSessionRequest(session=self._ref)
                self.control.call(self.control.stub.CloseSession, request, patience)
        self._ref = control_pb2.SessionRef()
        if channel is not None and not in_use:
            channel.close()
        self.control.close()

    def _start(self, op: Op, mode: Mode, shard: int, tile: int, lease: int, title: str) -> Pending:
        pending = Pending(self, op, mode, title)
        deadline = time.monotonic() + self.timeout_s
        # What was handed back goes first: a fetch of the same tile must find it stored.
        self.send_ended()
        while self._book.ended or not self._submit(pending, shard, tile, lease):
            self._turn(None, deadline, title)
        return pending

    def _submit(self, pending: Pending, shard: int, tile: int, lease: int) -> bool:
        with self._condition:
            channel = self._live_channel()
            if len(self._pending) >= RING_ENTRIES:
                return False
            number = self._next_id
            blocked_ns, cause = self._blocked.popleft() if self._blocked else (0, 0)
            entry = pack_submission(
                (number, pending.op, pending.mode, shard, tile, self._generation, lease, blocked_ns, cause)
            )
            # Known before it is sent: its completion may be reaped by another thread at once.
            self._pending[number] = pending
            if not channel.submit(entry):
                del self._pending[number]
                self._blocked.append((blocked_ns, cause))
                return False
            self._next_id += 1
            return True

    def _live_channel(self) -> Channel:
        if self._channel is None:
            reason = "is used in a forked child" if self._pid != os.getpid() else "is closed or has not reserved"
            raise OffloadError(Code.NO_SESSION, f"the session of {self.title} {reason}")
        return self._channel

    def send_ended(self) -> None:
        """Tell the daemon of leases whose buffers have died. Without a channel there is nobody to tell."""
        if self._channel is None:
            return
        while self._book.ended:
            try:
                lease = self._book.ended.popleft()
            except IndexError:
                return
            pending = Pending(self, lease.op or Op.RELEASE, lease.mode, lease.title, lease)
            if not self._submit(pending, 0, 0, lease.number):
                self._book.ended.appendleft(lease)
                return
            self.stores += pending.op is Op.STORE

    def before_store(self, lease: Lease, buffer: Buffer) -> None:
        """For channels that carry bytes: take them along now, while the buffer lives."""
        with self._condition:
            self._live_channel().before_store(lease.number, buffer)

    # ---- completions ---------------------------------------------------------------------------------------------
    def await_completion(self, pending: Pending, timeout_s: float | None = None) -> Completion:
        """Wait for one request; OffloadError for its failure or at the deadline."""
        started = time.monotonic_ns()
        # A daemon that let one wait run out gets no such patience for the next before it has answered something, or
        # whoever gives up many requests one after the other would wait as many times.
        patience = _SILENT_SECONDS if self._silent else self.timeout_s
        deadline = started / 1e9 + (patience if timeout_s is None else timeout_s)
        try:
            while pending.completion is None:
                self._turn(pending, deadline, pending.title)
        except BaseException:
            self._abandon(pending)
            raise
        if pending.op is Op.FETCH and pending.completion.waited_ns:
            if threading.get_ident() == self._foreground:
                self.note_blocked(time.monotonic_ns() - started, pending.completion.cause)
            else:
                self._background_cause = pending.completion.cause
        if pending.completion.code != Code.OK:
            raise self._explain(pending, pending.completion)
        if self._deferred:
            self._give_back(pending, pending.completion)
            self.raise_deferred()
        return pending.completion

    def note_blocked(self, blocked_ns: int, cause: int | None = None) -> None:
        """The rank was held up for so long. Told to the daemon with the next request: only the rank knows. Fetches of
        the thread that opened the session are counted by themselves; others are not, since the rank may be computing
        meanwhile. If it then waits for that thread, this is where it says so; the cause is then that thread's last."""
        if not blocked_ns:
            return
        self.wait_seconds += blocked_ns / 1e9
        self._blocked.append((blocked_ns, self._background_cause if cause is None else cause))

    def lend(self, pending: Pending, completion: Completion) -> Slot:
        lease = Lease(completion.lease, pending.title, pending.mode)
        buffer = None
        if completion.length:
            with self._condition:
                buffer = self._live_channel().buffer(completion.lease, completion.offset, completion.length)
        self._book.lend(lease, buffer)
        return Slot(self, self._book, lease, buffer, completion.length)

    def _abandon(self, pending: Pending) -> None:
        """Nobody waits any more; a slot that is granted all the same goes back as soon as that is known."""
        with self._condition:
            pending.abandoned = True
            completion = pending.completion
        if completion is not None:
            self._give_back(pending, completion)

    def _give_back(self, pending: Pending, completion: Completion) -> None:
        """Whoever gets an error instead of this slot cannot hand it back: it must not stay on loan."""
        if pending.op is Op.FETCH and completion.code == Code.OK and self._channel is not None:
            self.lend(pending, completion).release()

    def raise_deferred(self) -> None:
        """Raise the first failure of a STORE or RELEASE that nobody waited for."""
        if self._deferred:
            raise self._deferred.pop(0)

    def _turn(self, pending: Pending | None, deadline: float, title: str) -> None:
        """One round of waiting: reap as leader, or wait to be woken as follower."""
        self.send_ended()
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            self._silent = True
            raise OffloadError(
                Code.TIMED_OUT,
                f"{self.title}: no answer for {title} within {self.timeout_s:g} s; see the daemon's status and log",
            )
        with self._condition:
            if pending is not None and pending.completion is not None:
                return
            if self._reaping:
                self._condition.wait(min(remaining, _POLL_SECONDS))
                return
            channel = self._live_channel()
            self._reaping = True
        arrived: list[Completion] = []
        try:
            channel.wait(min(remaining, _POLL_SECONDS))
            arrived = channel.poll()
        finally:
            with self._condition:
                self._reaping = False
                self._dispatch(arrived)
                self._condition.notify_all()
                left = self._channel is not channel
            if left:
                channel.close()  # the session was closed meanwhile, and this thread is the last to use it

    def _dispatch(self, arrived: list[Completion]) -> None:
        if arrived:
            self._silent = False
        for completion in arrived:
            pending = self._pending.pop(completion.id, None)
            if pending is None:
                continue  # cannot be: the daemon answers each request once
            pending.completion = completion
            if pending.lease is not None and completion.code != Code.OK:
                self._deferred.append(self._explain(pending, completion))
            if pending.abandoned:
                self._give_back(pending, completion)

    def _explain(self, pending: Pending, completion: Completion) -> OffloadError:
        paths = list(self.control.hello.paths)
        return explain(self.title, pending.op, pending.title, completion, paths, self._book.held(), self._book.stuck())


class _Forked:
    """Marks the session unusable in a forked child, without keeping it alive."""

    def __init__(self, session: ClientSession) -> None:
        self._session = weakref.ref(session)

    def __call__(self) -> None:
        session = self._session()
        if session is not None:
            session._channel = None


def _tiles(length: int, tile_bytes: int) -> tuple[tuple[int, int], ...]:
    return tuple((start, min(tile_bytes, length - start)) for start in range(0, length, tile_bytes))


def connect(
    endpoint: str,
    *,
    job: str = "",
    launch_id: str = "",
    rank: int = 0,
    world_size: int = 1,
    local_world_size: int = 1,
    host_bytes_min: int = 0,
    swap_bytes_min: int = 0,
    weight: float = 1.0,
    timeout_s: float = 60.0,
    token_file: str | None = None,
) -> ClientSession:
    """Open a session with the daemon at `endpoint`. OffloadError, one sentence, for whatever stands against it."""
    check_timeout(timeout_s, "timeout_s of connect")
    control = ControlClient(parse(endpoint), token_file, timeout_s, metadata.version("offloadd"))
    try:
        request = control_pb2.OpenSessionRequest(
            ticket=control.ticket,
            job=job,
            launch_id=launch_id,
            rank=rank,
            world_size=world_size,
            local_world_size=local_world_size,
            host_bytes_min=host_bytes_min,
            swap_bytes_min=swap_bytes_min,
            weight=weight,
        )
        opened = control.call(control.stub.OpenSession, request)
    except BaseException:
        control.close()
        raise
    return ClientSession(control, opened, rank, timeout_s)
