"""A session's life, from open to close, across the rooms: the one place that knows the order.

Open: promise. Reserve: all ranks of the job together; then arena, files, store, endpoint, pump. Close, for whatever
reason: fence, detach from the pump, wait until the engine is done with the region, then give everything back.
Called by the gRPC services, and by the attach socket when a rank dies. Event loop only; slow calls go to a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, Protocol, TypeVar

from offloadd.control.describe import counters
from offloadd.control.locks import NamedLocks
from offloadd.core.clock import Clock
from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import Mode, ShardSpec, TileKey
from offloadd.core.units import human
from offloadd.io.engine import Engine
from offloadd.pump import Pump
from offloadd.ring.shared import RingEndpoint
from offloadd.ring.stream import StreamEndpoint
from offloadd.scheduler.plan import AccessPlan
from offloadd.scheduler.scheduler import Scheduler
from offloadd.session.arena import Region
from offloadd.session.peer import Peer
from offloadd.session.registry import Job, OpenRequest, Registry, Session
from offloadd.session.reservation import Grant, Need, Reservations
from offloadd.store.placement import SwapTarget
from offloadd.store.store import Store

log = logging.getLogger("offloadd.lifecycle")

_Result = TypeVar("_Result")

_MODES = frozenset(int(mode) for mode in Mode)

QUIET_SECONDS_MAX = 60.0
"""Longest wait for a closing session's transfers. Beyond it nobody waits for the session any more; its region and what
it was promised stay taken, together, until the device has let go."""
REMOVALS_AT_ONCE = 2
"""Jobs whose files are being removed. A slow disk must not have all threads, which others' Reserve needs too."""
ATTACH_SECONDS = 30.0
"""How long a session over TCP may exist without its stream, by which alone its client's end would be noticed."""


class JobFiles(Protocol):
    """The swap files of one job: one per path."""

    targets: tuple[SwapTarget, ...]

    def grow(self, file: int, length: int) -> None:
        """Allocate the file's space up to `length` bytes. Blocking; NO_SPACE with figures."""

    def withdraw(self) -> None:
        """Take the descriptors back from the engine. Event loop only."""

    def remove(self) -> None:
        """Close and delete. Blocking."""


class Doorbells(Protocol):
    """The event loop's side: which endpoints to listen to."""

    def watch(self, endpoint: RingEndpoint | StreamEndpoint) -> None: ...

    def unwatch(self, session: int) -> None: ...


async def _to_the_end(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run `work` to its end even if the caller goes away: half a reservation would belong to nobody."""
    task = asyncio.get_running_loop().create_task(work)
    # If nobody waits any more, its error is nobody's.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


async def _in_slices(work: Generator[None, None, _Result]) -> _Result:
    """Run a long piece of work that belongs on the loop; others get a turn wherever it yields."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: _Result = done.value
            return result
        await asyncio.sleep(0)


class Lifecycle:
    """Conducts registry, store, scheduler, pump and engine when sessions come and go."""

    def __init__(
        self,
        registry: Registry,
        store: Store,
        scheduler: Scheduler,
        pump: Pump,
        engine: Engine,
        open_files: Callable[[Job], Awaitable[JobFiles]],
        doorbells: Doorbells,
        clock: Clock,
        attach_seconds: float = ATTACH_SECONDS,
    ) -> None:
        self._registry = registry
        self._reservations = Reservations(registry)
        self._store = store
        self._scheduler = scheduler
        self._pump = pump
        self._engine = engine
        self._open_files = open_files
        self._doorbells = doorbells
        self._clock = clock
        self._attach_seconds = attach_seconds
        self._without_stream: dict[int, asyncio.TimerHandle] = {}
        self._files: dict[Job, JobFiles] = {}
        self._names = NamedLocks()
        """A job's is held while its files are opened or removed: the next job may have the same name."""
        self._removals = asyncio.Semaphore(REMOVALS_AT_ONCE)
        self._lending = asyncio.Lock()
        """Held while the engine takes or gives back a region, in a thread: one at a time."""
        self._kept: set[int] = set()
        """Sessions that have ended and whose memory a device still holds."""
        self._endpoints: dict[int, RingEndpoint | StreamEndpoint] = {}
        self._tickets: dict[str, Session] = {}
        self._closing: dict[int, asyncio.Task[None]] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False
        self.sessions_opened = 0
        self.ended_cleanly = False
        """The last session that ended was closed by its client."""
        self.idle_since_ns = clock.now_ns()
        """When the last session ended; the start, before the first."""

    # ---- open, reserve, register -----------------------------------------------------------------------------------
    async def open(self, request: OpenRequest, uid: int, peer: Peer | None, ticket: str) -> Session:
        """A new session; an older one of the same rank is fenced and closed first."""
        if self.draining:
            raise OffloadError(Code.DRAINING, "this daemon is stopping and takes no new sessions; try again soon")
        if ticket and ticket in self._tickets:
            raise OffloadError(Code.BAD_TOKEN, "this ticket has opened a session already; connect once per session")
        session, fenced = self._registry.open(request, uid, peer)
        self._empty.clear()
        self.sessions_opened += 1
        if ticket:
            self._tickets[ticket] = session
        log.info("%s: session %d opened, incarnation %d", session.title, session.id, session.incarnation)
        self._expect_stream(session)
        if fenced is not None and not await self.close(fenced, "fenced by a newer session of the same rank"):
            await self.close(session, "its predecessor still holds its memory")
            raise OffloadError(
                Code.NO_HOST_BUDGET,
                f"{session.title}: the memory of its previous session is still held by a transfer; check the device's "
                "log (dmesg) and try again",
            )
        return session

    def _expect_stream(self, session: Session) -> None:
        """Over TCP no pidfd and no socket say that the client has died, before it has a stream."""
        if session.peer is None and not session.closing:
            self._without_stream[session.id] = asyncio.get_running_loop().call_later(
                self._attach_seconds, self._give_up, session
            )

    def _stop_expecting(self, session: Session) -> None:
        timer = self._without_stream.pop(session.id, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, session: Session) -> None:
        self._without_stream.pop(session.id, None)
        self._start_closing(session, f"its client opened no stream within {self._attach_seconds:g} s")

    def authenticate(self, session: int, secret: str) -> Session:
        return self._registry.authenticate(session, secret)

    async def reserve(self, session: Session, need: Need, timeout_s: float, stream: bool) -> Region:
        """Grant memory and swap to all ranks of the job, or to none, and connect the session to the pump."""
        return await _to_the_end(self._reserve(session, need, timeout_s, stream))

    async def _reserve(self, session: Session, need: Need, timeout_s: float, stream: bool) -> Region:
        async with session.changing:
            self._check_open(session)
            # Waiting for the other ranks has a bound of its own.
            self._stop_expecting(session)
            try:
                grant = await self._reservations.reserve(session, need, timeout_s)
                region = await asyncio.to_thread(session.job.arena.grow, grant.host_bytes)
                session.region = region
                try:
                    await self._furnish(session, region, grant, stream)
                except BaseException:
                    session.region = None
                    await asyncio.to_thread(region.close)
                    raise
            finally:
                self._expect_stream(session)
        log.info(
            "%s: granted %s of host memory, swap: %s, tiles of %s",
            session.title,
            human(region.length),
            human(grant.swap_bytes) if session.swap_fixed else "as much as its shards need",
            human(grant.tile_bytes),
        )
        return region

    async def _furnish(self, session: Session, region: Region, grant: Grant, stream: bool) -> None:
        """Files, engine, store, scheduler, endpoint: all or none."""
        files = await self._job_files(session.job)
        async with contextlib.AsyncExitStack() as undo:
            await self._lend(self._engine.register_region, session.id, region.memory)
            undo.push_async_callback(self._lend, self._engine.unregister_region, session.id)
            self._check_open(session)
            self._store.open_session(
                session.id,
                session.job.name,
                session.rank,
                session.id,
                region.length,
                grant.tile_bytes,
                self._registry.swap.total,  # the registry keeps the books, and grows a session's share as it registers
                files.targets,
                session.weight,
            )
            undo.push_async_callback(self._leave_store, session.id)
            self._scheduler.open_session(session.id, session.weight)
            undo.callback(self._scheduler.close_session, session.id)
            self._connect(session, region, stream)
            undo.pop_all()

    async def _job_files(self, job: Job) -> JobFiles:
        async with self._names.hold(job.name):
            files = self._files.get(job)
            if files is None:
                files = self._files[job] = await self._open_files(job)
            return files

    async def _lend(self, change: Callable[..., None], *arguments: object) -> None:
        """Pinning a GiB takes long enough to be felt, so the engine does it in a thread."""
        async with self._lending:
            await asyncio.to_thread(change, *arguments)

    @staticmethod
    def _check_open(session: Session) -> None:
        if session.closing:
            raise OffloadError(
                Code.STALE_SESSION, f"{session.title} ended while it was being served; open a new session"
            )

    def _connect(self, session: Session, region: Region, stream: bool) -> None:
        def resolve(shard: int, tile: int) -> TileKey | None:
            return self._store.resolve(session.id, shard, tile)

        endpoint: RingEndpoint | StreamEndpoint
        if stream:
            endpoint = StreamEndpoint(session.id, session.incarnation, resolve, self._clock, region.memory)
        else:
            endpoint = RingEndpoint(session.id, session.incarnation, resolve, self._clock)
        self._endpoints[session.id] = endpoint
        self._pump.attach(endpoint)
        self._doorbells.watch(endpoint)

    def descriptors(self, secret: str, peer: Peer) -> tuple[int, int, int, int]:
        """What the attach socket sends: arena, ring and both doorbells of the session with this secret."""
        session = self._registry.by_secret(secret)
        if session.job.uid != peer.uid:
            raise OffloadError(Code.WRONG_USER, f"{session.title} belongs to user {session.job.uid}, not {peer.uid}")
        endpoint = self._endpoints.get(session.id)
        if not isinstance(endpoint, RingEndpoint):
            raise OffloadError(Code.BAD_REQUEST, f"{session.title} has no ring yet; reserve first")
        return (session.job.arena.descriptor, *endpoint.descriptors())

    def stream(self, session: Session) -> StreamEndpoint:
        """The endpoint of a session that reserved over TCP."""
        endpoint = self._endpoints.get(session.id)
        if not isinstance(endpoint, StreamEndpoint):
            raise OffloadError(Code.BAD_REQUEST, f"{session.title} has no stream; reserve over the same endpoint first")
        if session.id not in self._without_stream:
            raise OffloadError(Code.BAD_REQUEST, f"{session.title} has its stream already; open one per session")
        self._stop_expecting(session)
        return endpoint

    async def register(self, session: Session, specs: Sequence[ShardSpec]) -> tuple[int, int]:
        """(number of the first shard within the session, swap bytes used)."""
        return await _to_the_end(self._register(session, specs))

    async def _register(self, session: Session, specs: Sequence[ShardSpec]) -> tuple[int, int]:
        async with session.changing:
            self._check_open(session)
            if session.region is None:
                raise OffloadError(Code.BAD_REQUEST, f"{session.title} must reserve before it registers shards")
            files = self._files[session.job]
            first = len(self._store.holdings(session.id).shards)
            charged = session.swap_bytes
            registration = await _in_slices(self._store.prepare_registration(session.id, specs))
            try:
                self._registry.charge_swap(session, self._store.holdings(session.id).swap_used)
                for file, length in registration.grow.items():
                    await asyncio.to_thread(files.grow, file, length)
                self._check_open(session)
                await asyncio.wrap_future(self._store.record_registration(registration))
                self._check_open(session)
            except BaseException:
                await _in_slices(self._store.abort_registration(registration))
                self._registry.refund_swap(session, charged)
                raise
            self._store.commit_registration(registration)
            # Tiles are many, live long and lie in no cycle: one look at them by the collector would take 0.2 s.
            gc.freeze()
            return first, registration.swap_bytes

    async def plan(
        self, session: Session, shards: Sequence[int], tiles: Sequence[int], modes: Sequence[int], steps: int
    ) -> None:
        """What is fetched in which order, in numbers within the session; unknown ones are refused. `steps`: training
        steps that the plan covers. A long plan is made, and its predecessor unmade, in a thread."""
        async with session.changing:
            self._check_open(session)
            if session.region is None:
                raise OffloadError(Code.BAD_REQUEST, f"{session.title} must reserve before it plans")

            def make() -> AccessPlan:
                # Only reads, and what it reads changes with registrations only, which `changing` keeps out.
                keys = []
                for place, (shard, tile, mode) in enumerate(zip(shards, tiles, modes, strict=True)):
                    key = self._store.resolve(session.id, shard, tile)
                    if key is None:
                        raise OffloadError(
                            Code.UNKNOWN_SHARD,
                            f"{session.title}: entry {place} of the plan: there is no shard {shard} tile {tile}; "
                            "register shards before they are planned",
                        )
                    if mode not in _MODES:
                        raise OffloadError(
                            Code.BAD_REQUEST,
                            f"{session.title}: entry {place} of the plan: there is no mode {mode}; give one of "
                            f"{min(_MODES)} to {max(_MODES)}",
                        )
                    keys.append(key)
                overwrites = {index for index, mode in enumerate(modes) if mode == Mode.OVERWRITE}
                return AccessPlan(keys, 0, overwrites, steps)

            plan = await asyncio.to_thread(make)
            self._check_open(session)
            replaced = [self._pump.follow(session.id, plan)]
            await asyncio.to_thread(replaced.clear)

    # ---- the end ---------------------------------------------------------------------------------------------------
    def connection_lost(self, ticket: str) -> None:
        """The attach socket says that the holder of a ticket is gone."""
        session = self._tickets.pop(ticket, None)
        if session is not None:
            self._start_closing(session, "the rank is gone")

    def broken(self, session: int, error: OffloadError) -> None:
        """The pump says that a session's ring cannot be trusted any more."""
        for found in self._registry.sessions():
            if found.id == session:
                log.error("%s: %s", found.title, error.message)
                self._start_closing(found, "its ring is broken")

    async def close(self, session: Session, reason: str, clean: bool = False) -> bool:
        """End a session and return when everything it held has been given back. Idempotent. `clean`: the client asked
        for it, so nothing of its job is to be expected again. False: a device or a failure still holds its memory."""
        task = self._start_closing(session, reason, clean)
        if session.id in self._kept:
            return False
        # Not cancelled with whoever waits here.
        done, _ = await asyncio.wait({task}, timeout=QUIET_SECONDS_MAX)
        return bool(done) and not task.cancelled() and task.exception() is None

    async def close_all(self, reason: str) -> None:
        await asyncio.gather(*(self.close(session, reason) for session in self._registry.sessions()))

    def _start_closing(self, session: Session, reason: str, clean: bool = False) -> asyncio.Task[None]:
        task = self._closing.get(session.id)
        if task is None:
            session.closing = True
            self.ended_cleanly = clean
            self._stop_expecting(session)
            task = asyncio.get_running_loop().create_task(self._close(session, reason))
            self._closing[session.id] = task
            task.add_done_callback(lambda done: self._closed(session, done))
        return task

    def _closed(self, session: Session, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return  # the daemon itself ends
        if task.exception() is not None:
            # Its memory may still be in use: neither that nor what was promised of it is lent to anybody else.
            self._keep(session)
            log.error("%s: its end failed and its memory is kept", session.title, exc_info=task.exception())
            return
        self._kept.discard(session.id)
        self._closing.pop(session.id, None)
        self._note_if_empty()

    def _keep(self, session: Session) -> None:
        self._kept.add(session.id)
        self._note_if_empty()

    def _note_if_empty(self) -> None:
        if not self.session_count():
            self.idle_since_ns = self._clock.now_ns()
            self._empty.set()
            gc.unfreeze()

    async def _close(self, session: Session, reason: str) -> None:
        log.info("%s: session %d ends: %s", session.title, session.id, reason)
        # Whoever waits for this rank learns it now, which also ends a Reserve of the session's own.
        self._reservations.rank_lost(session)
        self._tickets = {ticket: held for ticket, held in self._tickets.items() if held is not session}
        async with session.changing:
            endpoint = self._endpoints.pop(session.id, None)
            if endpoint is not None:
                self._doorbells.unwatch(session.id)
                await self._detach(session, endpoint)
            region, session.region = session.region, None
            if region is not None:
                await asyncio.to_thread(region.close)
            # Only now: what was promised to it is promised to others as soon as it is forgotten.
            async with self._names.hold(session.job.name):
                job = self._registry.forget(session)
                if job is not None:
                    await self._end_job(job)

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until no session is left; False at the deadline."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def _detach(self, session: Session, endpoint: RingEndpoint | StreamEndpoint) -> None:
        """Wait for the transfers in flight, then take the session from pump, scheduler, store and engine."""
        quiet = asyncio.Event()
        self._pump.detach(session.id, lambda _: quiet.set())
        endpoint.close()
        try:
            await asyncio.wait_for(quiet.wait(), QUIET_SECONDS_MAX)
        except asyncio.TimeoutError:
            log.error(
                "%s: transfers still in flight after %g s; its %s stay taken until the device lets go; check the "
                "device's log (dmesg)",
                session.title,
                QUIET_SECONDS_MAX,
                human(session.host_bytes),
            )
            self._keep(session)
            # Nobody waits for this any more; it ends with the transfers, or with the daemon.
            await quiet.wait()
            log.info("%s: its last transfer has ended, and its memory returns", session.title)
        await self._leave_store(session.id)
        await self._lend(self._engine.unregister_region, session.id)

    async def _leave_store(self, session: int) -> None:
        await _in_slices(self._store.close_session(session))

    async def _end_job(self, job: Job) -> None:
        files = self._files.pop(job, None)
        if files is not None:
            try:
                files.withdraw()
                async with self._removals:
                    await asyncio.to_thread(files.remove)
            except (OSError, ValueError):
                # A file that a device still works on stays open until the daemon ends.
                log.exception("job %s: its swap files could not be removed", job.name)
        await asyncio.to_thread(job.arena.close)
        log.info("job %s: over", job.name)

    # ---- observation -----------------------------------------------------------------------------------------------
    def statistics(self, session: Session) -> dict[str, float]:
        """Counters of one session, flat; empty before it has reserved."""
        for snapshot in self._pump.snapshot().sessions:
            if snapshot.session == session.id:
                return counters(snapshot)
        return {}

    def session_count(self) -> int:
        """Sessions that are open or ending; not those of which only memory is left that a device holds."""
        return sum(session.id not in self._kept for session in self._registry.sessions())
