"""The scheduler: who is served next, with what.

Called by the pump, and by control to set plans. Pure: no clock of its own, no I/O, no knowledge of memory; the pump
tells it what the store answered. Classes are strictly ordered (a rank waits, then prefetch, then write-back), with a
bound on how long write-back can be passed over; inside a class sessions share by bytes and weight; each path has a
bounded window of bytes in flight. A spill that a waiting rank depends on is demand itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from offloadd.core.records import Request, TileKey, TrafficClass
from offloadd.core.stats import Cause
from offloadd.core.units import MIB
from offloadd.scheduler.fairness import FairClock, Windows
from offloadd.scheduler.plan import NO_USE, AccessPlan
from offloadd.scheduler.queues import NO_PATH, SessionQueue, Waiter, Want

STARVATION_BYTES = 64 * MIB
"""Write-back goes ahead of everything once, each time this much was served past it while it had work."""


class Pick(NamedTuple):
    """What to look at next. `want` for DEMAND, `key` for PREFETCH, neither for WRITE_BACK (the store chooses)."""

    klass: TrafficClass
    queue: SessionQueue
    want: Want | None = None
    key: TileKey | None = None


class Scheduler:
    """All sessions' queues."""

    def __init__(self, windows: Mapping[int, int]) -> None:
        """`windows`: bytes that may be in flight per path, as a rule max(8 MiB, 2 x queue_depth x block)."""
        self.windows = Windows(windows)
        self._queues: dict[int, SessionQueue] = {}
        self._clock = FairClock()
        self._passed_over = 0

    # ---- sessions and plans --------------------------------------------------------------------------------------

    def open_session(self, session: int, weight: float = 1.0) -> SessionQueue:
        """Begin (or re-weigh) a session."""
        queue = self._queues.get(session)
        if queue is None:
            queue = self._queues[session] = SessionQueue(session, weight)
        queue.account.weight = weight
        return queue

    def close_session(self, session: int) -> None:
        """Forget a session; its waiting requests are answered nowhere."""
        self._queues.pop(session, None)

    def follow(self, session: int, plan: AccessPlan) -> AccessPlan:
        """Replace the access plan: what will be fetched, cyclically, from now on. Empty: nothing is known. Returns the
        one it replaces, so that a long one need not die here."""
        queue = self._queues.get(session) or self.open_session(session)
        plan.begin_at(queue.plan.cursor)
        replaced, queue.plan = queue.plan, plan
        queue.generation += 1
        queue.wake()
        return replaced

    def queue(self, session: int) -> SessionQueue | None:
        """The session's queues."""
        return self._queues.get(session)

    def queues(self) -> list[SessionQueue]:
        """All of them."""
        return list(self._queues.values())

    def next_use(self, session: int, tile: tuple[int, int]) -> int:
        """Absolute plan position of the next use that needs the tile's bytes; NO_USE when there is none."""
        queue = self._queues.get(session)
        return NO_USE if queue is None else queue.plan.next_need(TileKey(*tile))

    def generation(self, session: int) -> int:
        """Changes when the session's plan is replaced."""
        queue = self._queues.get(session)
        return 0 if queue is None else queue.generation

    def note_evicted(self, session: int, tile: TileKey) -> None:
        """A tile that prefetch had counted as present is gone again: look at its position anew."""
        queue = self._queues.get(session)
        if queue is not None:
            plan = queue.plan
            plan.ahead = max(plan.cursor, min(plan.ahead, plan.next_use(tile)))

    # ---- waiting -------------------------------------------------------------------------------------------------

    def park(self, request: Request, cause: Cause, now_ns: int) -> None:
        """The request waits on its tile, behind those already there."""
        queue = self._queues[request.session]
        waiters = queue.parked.get(request.tile)
        if waiters is None:
            waiters = queue.parked[request.tile] = deque()
        waiters.append(Waiter(request, cause, now_ns))

    def want(self, session: int, want: Want) -> None:
        """A rank waits for this load or spill."""
        self._queues[session].push(want)

    def block(self, queue: SessionQueue, want: Want, cause: Cause, now_ns: int) -> None:
        """No memory for `want`: it keeps its place, and the session's other wants wait behind it."""
        queue.blocked = want
        queue.blocked_cause = cause
        if not queue.blocked_since_ns:
            queue.blocked_since_ns = now_ns
        for waiter in queue.parked.get(want.key, ()):
            waiter.turn(cause, now_ns)

    # ---- serving -------------------------------------------------------------------------------------------------

    def pick(self) -> Pick | None:
        """What to try next, or None when nothing may go now."""
        starving = self._passed_over >= STARVATION_BYTES
        if starving and (queue := self._least(self._may_write_back)) is not None:
            self._passed_over = 0
            return Pick(TrafficClass.WRITE_BACK, queue)
        if (queue := self._least(self._may_demand)) is not None:
            return Pick(TrafficClass.DEMAND, queue, want=self._pop(queue))
        if (queue := self._least(self._may_prefetch)) is not None:
            return Pick(TrafficClass.PREFETCH, queue, key=queue.plan.at(queue.plan.ahead))
        if (queue := self._least(self._may_write_back)) is not None:
            return Pick(TrafficClass.WRITE_BACK, queue)
        return None

    def started(self, queue: SessionQueue, klass: TrafficClass, path: int, length: int) -> None:
        """A transfer was prepared: charge the session, open the window."""
        self._clock.charge(queue.account, length)
        self.windows.open(path, length)
        if klass is TrafficClass.WRITE_BACK:
            queue.write_back_credit = max(0, queue.write_back_credit - length)
            self._passed_over = 0
        elif any(self._may_write_back(other) for other in self._queues.values()):
            self._passed_over += length

    def settled(self, path: int, length: int) -> None:
        """It ended: close the window."""
        self.windows.close(path, length)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _least(self, eligible: Callable[[SessionQueue], bool]) -> SessionQueue | None:
        best: SessionQueue | None = None
        best_tag = 0.0
        for queue in self._queues.values():
            if eligible(queue):
                tag = self._clock.start_tag(queue.account)
                if best is None or tag < best_tag:
                    best, best_tag = queue, tag
        return best

    def _may_demand(self, queue: SessionQueue) -> bool:
        return self._ready(queue.spills) is not None or (queue.blocked is None and self._ready(queue.loads) is not None)

    def _may_prefetch(self, queue: SessionQueue) -> bool:
        plan = queue.plan
        if queue.prefetch_stopped or queue.blocked is not None or plan.ahead >= plan.cursor + len(plan.entries):
            return False
        return queue.prefetch_needs is None or self.windows.has_room(*queue.prefetch_needs)

    def _may_write_back(self, queue: SessionQueue) -> bool:
        if queue.write_back_stopped or not queue.write_back_credit:
            return False
        return queue.write_back_needs is None or self.windows.has_room(*queue.write_back_needs)

    def _pop(self, queue: SessionQueue) -> Want:
        """The oldest want whose path has room: spills first, for something waits on their memory."""
        ready = self._ready(queue.spills)
        if ready is None:
            ready = self._ready(queue.loads)
        if ready is None:
            raise AssertionError(f"session {queue.session}: picked for demand without any")
        return ready.popleft()

    def _ready(self, queues: dict[int, deque[Want]]) -> deque[Want] | None:
        best: deque[Want] | None = None
        for path, waiting in queues.items():
            if not waiting or (path != NO_PATH and not self.windows.has_room(path, waiting[0].length)):
                continue
            if best is None or waiting[0].since_ns < best[0].since_ns:
                best = waiting
        return best
