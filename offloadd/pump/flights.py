"""What the engine is doing: transfers prepared and not yet accepted, transfers in flight, and whom each is for.

Used by the other parts of the pump; the only one that talks to the engine. Opens and closes the scheduler's windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from offloadd.core.records import Direction, Outcome, Request, Transfer
from offloadd.core.stats import Stats
from offloadd.io.engine import Engine
from offloadd.scheduler.queues import NO_PATH, SessionQueue
from offloadd.scheduler.scheduler import Scheduler
from offloadd.store.flushing import FlushJob
from offloadd.store.residency import Tile


class Flight(NamedTuple):
    """A transfer and whom it is for."""

    transfer: Transfer
    path: int
    tile: Tile | None = None
    request: Request | None = None
    """The STORE that a CHECKSUM answers."""
    job: FlushJob | None = None
    """The flush that a SYNC belongs to."""


class Flights:
    """Transfers between preparation and settlement."""

    def __init__(self, engine: Engine, scheduler: Scheduler, stats: Stats) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._stats = stats
        self._flights: dict[int, Flight] = {}
        self._count: dict[int, int] = {}
        self._outbox: deque[Transfer] = deque()
        self.rang = False
        """The engine's descriptor is readable, which only `reap` clears."""

    def count(self, session: int) -> int:
        """Transfers of a session prepared or in flight."""
        return self._count.get(session, 0)

    def add(self, flight: Flight) -> None:
        """Queue a transfer that takes no path's window (checksum, sync)."""
        transfer = flight.transfer
        self._flights[transfer.id] = flight
        self._count[transfer.session] = self._count.get(transfer.session, 0) + 1
        self._outbox.append(transfer)

    def add_charged(self, flight: Flight, queue: SessionQueue, waited_ns: int) -> None:
        """Queue a read or write: charge the session, open the path's window."""
        transfer = flight.transfer
        self._scheduler.started(queue, transfer.klass, flight.path, transfer.span.length)
        self._stats.path(flight.path).queue_wait[transfer.direction].record(waited_ns)
        self.add(flight)

    def room(self) -> int:
        """How many more transfers the engine would take beyond those queued."""
        return self._engine.free_slots() - len(self._outbox)

    def submit(self) -> None:
        """Hand the engine what it takes; the rest keeps its order."""
        while self._outbox:
            batch = list(self._outbox)
            accepted = self._engine.submit(batch)
            if not accepted:
                return
            for _ in range(accepted):
                self._outbox.popleft()

    def reap(self) -> Iterator[tuple[Flight, Outcome]]:
        """What has ended, one by one: each one's books are closed just before it is given out, so that a session counts
        as quiet only with its last. An engine with nothing in flight is asked only when it rang."""
        if not self._flights and not self.rang:
            return
        self.rang = False
        for outcome in self._engine.reap():
            flight = self._flights.pop(outcome.id, None)
            if flight is None:
                raise AssertionError(f"the engine completed transfer {outcome.id}, which is not in flight")
            self._land(flight)
            self._account(flight, outcome)
            yield flight, outcome

    def withdraw(self, session: int) -> None:
        """Forget the session's transfers that the engine has not accepted."""
        kept: deque[Transfer] = deque()
        for transfer in self._outbox:
            if transfer.session == session:
                self._land(self._flights.pop(transfer.id))
            else:
                kept.append(transfer)
        self._outbox = kept

    def forget(self, session: int) -> None:
        """The session is quiet."""
        self._count.pop(session, None)

    def _land(self, flight: Flight) -> None:
        self._count[flight.transfer.session] -= 1
        if flight.path != NO_PATH and flight.transfer.direction is not Direction.SYNC:
            self._scheduler.settled(flight.path, flight.transfer.span.length)

    def _account(self, flight: Flight, outcome: Outcome) -> None:
        transfer = flight.transfer
        if transfer.direction is Direction.CHECKSUM:
            return
        path = self._stats.path(flight.path)
        if outcome.result < 0:
            path.errors[-outcome.result] = path.errors.get(-outcome.result, 0) + 1
            return
        if transfer.direction is Direction.SYNC:
            return
        way = int(transfer.direction)
        path.bytes_moved[way] += outcome.result
        path.transfers[way] += 1
        path.durations[way].record(outcome.elapsed_ns)
        self._stats.session(transfer.session).bytes_moved[way] += outcome.result
