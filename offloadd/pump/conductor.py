"""The step: calls every room and carries the records between them. Rooms never call each other.

`Pump.step` is synchronous, bounded and never waits. The app calls it until it returns False, then waits for a doorbell,
the engine's descriptor, the catalog's wake or `next_deadline_ns`. A simulator drives the same code with its own clock
and engine. Every accepted request gets exactly one reply, unless its session is detached first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from offloadd.core.clock import Clock
from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import Direction, Op, Outcome, Reply, Request
from offloadd.core.stats import Cause, Snapshot, Stats
from offloadd.io.engine import Engine
from offloadd.pump.desk import Desk
from offloadd.pump.flights import Flight, Flights
from offloadd.pump.replies import Replies
from offloadd.pump.serving import Serving
from offloadd.scheduler.plan import AccessPlan
from offloadd.scheduler.queues import SessionQueue
from offloadd.scheduler.scheduler import Scheduler
from offloadd.store.flushing import Flushes, FlushJob
from offloadd.store.outcomes import Settled
from offloadd.store.store import Store

DRAIN_LIMIT = 256
"""Requests taken from one endpoint per step."""
OUTSTANDING_LIMIT = 4096
"""Requests of one session that may wait at a time; the rest stay in its ring."""
EXHAUSTED_AFTER_NS = 10_000_000_000
"""A fetch gives up after this long without any slot coming free."""


class Endpoint(Protocol):
    """Where one session's requests come from and its replies go."""

    session: int

    def drain(self, limit: int) -> list[Request]:
        """Up to `limit` valid requests. OffloadError: the client broke it; the session must end."""

    def post(self, replies: Sequence[Reply]) -> None:
        """Hand over replies. OffloadError as above."""


class Pump:
    """One per daemon; all methods on one thread."""

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        engine: Engine,
        clock: Clock,
        checksums: bool = True,
        exhausted_after_ns: int = EXHAUSTED_AFTER_NS,
    ) -> None:
        self.stats = Stats()
        self.on_broken: Callable[[int, OffloadError], None] = lambda session, error: None
        """Called when an endpoint raises. The session is not served any more; the owner should detach it."""
        self._store = store
        self._scheduler = scheduler
        self._engine = engine
        self._clock = clock
        self._exhausted_after_ns = exhausted_after_ns
        self._endpoints: dict[int, Endpoint] = {}
        self._leaving: dict[int, list[Callable[[int], None]]] = {}
        self._replies = Replies(self.stats)
        self._flights = Flights(engine, scheduler, self.stats)
        self._desk = Desk(store, scheduler, self._flights, self._replies, self.stats, checksums)
        self._serving = Serving(store, scheduler, self._flights, self._desk, self.stats, checksums)
        self._flushes = Flushes(store, self._serving.want_spill, self._sync, self._replies.plain)
        store.set_order(scheduler)

    # ---- sessions ------------------------------------------------------------------------------------------------

    def attach(self, endpoint: Endpoint) -> None:
        """Serve a session that the store has opened. OffloadError NO_SESSION or BAD_REQUEST otherwise."""
        session = endpoint.session
        terms = self._store.terms(session)
        if session in self._endpoints or session in self._leaving:
            raise OffloadError(Code.BAD_REQUEST, f"session {session} is already attached")
        self._scheduler.open_session(session, terms.weight)
        self._endpoints[session] = endpoint
        self._replies.open(session)
        stats = self.stats.session(session)
        stats.job, stats.rank = terms.job, terms.rank
        stats.cycle_started_ns = self._clock.now_ns()

    def detach(self, session: int, on_quiet: Callable[[int], None] | None = None) -> None:
        """Stop serving a session. Its waiting requests are answered nowhere. When nothing of it is in flight any more
        `on_quiet` is called (perhaps at once): from then on the store may close it, and its region may be unregistered
        and unmapped. May be called again: every `on_quiet` is called once."""
        callbacks = [] if on_quiet is None else [on_quiet]
        if session in self._leaving:
            self._leaving[session].extend(callbacks)
            return
        self._endpoints.pop(session, None)
        self._replies.forget(session)
        self._scheduler.close_session(session)
        self._flushes.forget(session)
        self._flights.withdraw(session)
        self._leaving[session] = callbacks
        self._end_if_quiet(session)

    def is_detached(self, session: int) -> bool:
        """Nothing of the session is left here."""
        return session not in self._endpoints and session not in self._leaving

    def follow(self, session: int, plan: AccessPlan) -> AccessPlan:
        """Replace the session's access plan; the next step acts on it. Returns the one it replaces, which, if long,
        takes a while to unmake."""
        return self._scheduler.follow(session, plan)

    # ---- the step ------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One round. True: call again now. False: nothing can be done before something happens."""
        now_ns = self._clock.now_ns()
        self.stats.steps += 1
        more = self._drain(now_ns)
        # What could be answered at once goes out before anything slower is begun.
        self._post()
        for flight, outcome in self._flights.reap():
            self._settle(flight, outcome, now_ns)
        more = self._flushes.poll(now_ns) or more
        self._mind_deadlines(now_ns)
        more = self._serving.serve(now_ns) or more
        self._post()
        return more

    def engine_rang(self) -> None:
        """The engine's descriptor is readable: the next step looks, even if nothing is in flight."""
        self._flights.rang = True

    def next_deadline_ns(self) -> int | None:
        """When `step` should be called even if nothing happens; None: no need."""
        times: list[int] = []
        for session in self._endpoints:
            queue = self._queue(session)
            retry = self._store.holdings(session).arena.spill_retry_at_ns
            if retry and (queue.blocked is not None or queue.write_back_credit):
                times.append(retry)
            if queue.blocked is not None and not self._flights.count(session):
                times.append(queue.blocked_since_ns + self._exhausted_after_ns)
        return min(times, default=None)

    def snapshot(self) -> Snapshot:
        """Every counter at this instant; cheap enough for a scrape, to be called on the pump's thread."""
        for session in self._endpoints:
            self.stats.session(session).parameters = self._store.holdings(session).parameters
        engine = (self._engine.name, self._engine.driver, self._engine.statistics())
        return self.stats.snapshot(self._clock.now_ns(), engine, self._store.regions(), self._scheduler.windows.state())

    # ---- inside --------------------------------------------------------------------------------------------------

    def _drain(self, now_ns: int) -> bool:
        more = False
        for session, endpoint in list(self._endpoints.items()):
            if session not in self._endpoints:
                continue  # another one's end took it along
            limit = min(DRAIN_LIMIT, OUTSTANDING_LIMIT - self._replies.outstanding(session))
            if limit <= 0:
                continue
            try:
                requests = endpoint.drain(limit)
            except OffloadError as error:
                self._break(session, error)
                continue
            if not requests:
                continue
            more = more or len(requests) == limit
            self._replies.accepted(session, len(requests))
            self.stats.session(session).requests += len(requests)
            queue = self._queue(session)
            for request in requests:
                if request.blocked_ns:
                    self.stats.session(session).stall_ns[request.blocked_cause] += request.blocked_ns
                self._admit(queue, request, now_ns)
        return more

    def _admit(self, queue: SessionQueue, request: Request, now_ns: int) -> None:
        op = request.op
        if op is Op.FETCH or op is Op.DROP:
            self._desk.on_tile(queue, request, now_ns)
        elif op is Op.STORE or op is Op.RELEASE:
            self._desk.end_lease(queue, request, now_ns)
        elif op is Op.FLUSH:
            self.stats.session(request.session).flushes += 1
            self._flushes.begin(request, now_ns)
        else:
            self._replies.plain(request, Code.OK, now_ns)

    def _settle(self, flight: Flight, outcome: Outcome, now_ns: int) -> None:
        session, tile = flight.transfer.session, flight.tile
        if session in self._leaving:
            self._end_if_quiet(session)
            return
        queue = self._queue(session)
        if tile is None:
            if flight.job is not None and flight.transfer.extent is not None:
                self._flushes.synced(flight.job, flight.transfer.extent.file, outcome, flight.path, now_ns)
            return
        if flight.transfer.direction is Direction.READ:
            settled = self._store.settle_load(tile, outcome)
            if settled.code is Code.CORRUPT:
                self.stats.checksum_failures += 1
            if settled.code is not Code.OK:
                self._desk.fail(queue, tile, settled, now_ns)
        elif flight.transfer.direction is Direction.WRITE:
            settled = self._store.settle_spill(tile, outcome, now_ns)
            if settled.code is not Code.OK:
                self.stats.session(session).spill_errors += 1
            self._flushes.spilled(tile, settled, now_ns)
        else:
            settled = self._store.settle_checksum(tile, outcome)
            if flight.request is not None:
                self._replies.plain(flight.request, settled.code, now_ns, settled.errno)
            if tile.flushing:
                self._serving.want_spill(tile, now_ns)
        if settled.code is Code.OK:
            queue.progress()
        else:
            queue.wake()
        self._desk.drive(queue, tile, now_ns)

    def _mind_deadlines(self, now_ns: int) -> None:
        for session in self._endpoints:
            queue = self._queue(session)
            arena = self._store.holdings(session).arena
            if arena.spill_retry_at_ns and now_ns >= arena.spill_retry_at_ns:
                arena.spill_retry_at_ns = 0
                queue.wake()
            idle = queue.blocked is not None and not self._flights.count(session)
            if idle and now_ns - queue.blocked_since_ns >= self._exhausted_after_ns:
                self._give_up(queue, now_ns)

    def _give_up(self, queue: SessionQueue, now_ns: int) -> None:
        """Nothing came free for too long: say so rather than hang. If spills failed meanwhile, say that."""
        want, cause = queue.unblock()
        tile = self._store.tile(queue.session, want.key)
        if tile is None:
            return
        self.stats.slots_exhausted += 1
        settled, path = Settled(Code.SLOTS_EXHAUSTED), None
        error = self._store.holdings(queue.session).spill_error
        if cause is Cause.WRITEBACK and error is not None:
            settled, path = Settled(Code.SLOTS_EXHAUSTED, error[1]), error[2]
        self._desk.fail(queue, tile, settled, now_ns, path)
        self._desk.drive(queue, tile, now_ns)

    def _sync(self, job: FlushJob, file: int, path: int) -> None:
        transfer = self._store.begin_sync(job.request.session, file)
        self._flights.add(Flight(transfer, path, job=job))

    def _post(self) -> None:
        for session, replies in self._replies.take().items():
            endpoint = self._endpoints.get(session)
            if endpoint is None:
                continue
            try:
                endpoint.post(replies)
            except OffloadError as error:
                self._break(session, error)

    def _break(self, session: int, error: OffloadError) -> None:
        """The client broke its endpoint: the session ends; nothing else does."""
        self.detach(session)
        self.on_broken(session, error)

    def _end_if_quiet(self, session: int) -> None:
        if self._flights.count(session):
            return
        callbacks = self._leaving.pop(session)
        self._flights.forget(session)
        self.stats.sessions.pop(session, None)
        for on_quiet in callbacks:
            on_quiet(session)

    def _queue(self, session: int) -> SessionQueue:
        queue = self._scheduler.queue(session)
        if queue is None:
            raise AssertionError(f"session {session} is served and has no queue")
        return queue
