"""What one session is waiting for: requests parked on tiles, loads and spills wanted, prefetch and write-back state.

Used by the scheduler and read by the pump. Pure.
"""

from __future__ import annotations

from collections import deque

from offloadd.core.records import Request, TileKey
from offloadd.core.stats import Cause
from offloadd.scheduler.fairness import VirtualTime
from offloadd.scheduler.plan import AccessPlan

NO_PATH = -1
"""A want that needs memory but no device."""


class Waiter:
    """A parked request, and what it has waited for since when."""

    __slots__ = ("cause", "request", "since_ns", "waited")

    def __init__(self, request: Request, cause: Cause, now_ns: int) -> None:
        self.request = request
        self.cause = cause
        self.since_ns = now_ns
        self.waited: dict[Cause, int] = {}

    def turn(self, cause: Cause, now_ns: int) -> None:
        """From now on it waits for something else."""
        if cause is not self.cause:
            self.waited[self.cause] = self.waited.get(self.cause, 0) + now_ns - self.since_ns
            self.cause, self.since_ns = cause, now_ns


class Want:
    """One tile that should be loaded (or given a slot), or spilled, because a rank waits."""

    __slots__ = ("key", "length", "path", "since_ns", "spill")

    def __init__(self, key: TileKey, path: int, length: int, spill: bool, now_ns: int) -> None:
        self.key = key
        self.path = path
        self.length = length
        self.spill = spill
        self.since_ns = now_ns


class SessionQueue:
    """One session, as the scheduler sees it."""

    def __init__(self, session: int, weight: float) -> None:
        self.session = session
        self.account = VirtualTime(weight)
        self.plan = AccessPlan(())
        self.generation = 0
        self.loads: dict[int, deque[Want]] = {}
        """Per path, in order of arrival."""
        self.spills: dict[int, deque[Want]] = {}
        self.parked: dict[TileKey, deque[Waiter]] = {}
        self.blocked: Want | None = None
        """The load that found no memory; nothing else of the session gets memory before it does."""
        self.blocked_since_ns = 0
        self.blocked_cause = Cause.SLOTS_EXHAUSTED
        self.prefetch_stopped = False
        """The prefetcher found no room; until something changes it need not look again."""
        self.guessed_bytes = 0
        """Prefetched and not fetched since."""
        self.prefetch_needs: tuple[int, int] | None = None
        """The prefetcher waits for this much room (path, bytes) in a window."""
        self.write_back_credit = 0
        """Bytes that write-back may still spill ahead of need."""
        self.write_back_stopped = False
        self.write_back_needs: tuple[int, int] | None = None

    def push(self, want: Want, front: bool = False) -> None:
        """Queue a want on its path."""
        queues = self.spills if want.spill else self.loads
        queue = queues.get(want.path)
        if queue is None:
            queue = queues[want.path] = deque()
        if front:
            queue.appendleft(want)
        else:
            queue.append(want)

    def allow_write_back(self, length: int, limit: int) -> None:
        """Memory was short by `length`: write-back may spill twice that ahead of the next need, up to `limit`."""
        self.write_back_credit = min(limit, self.write_back_credit + 2 * length)
        self.write_back_stopped = False

    def progress(self) -> None:
        """Memory came free, or may have: the blocked one's patience starts anew."""
        self.blocked_since_ns = 0
        self.wake()

    def unblock(self) -> tuple[Want, Cause]:
        """Take the blocked want out for good."""
        want, self.blocked = self.blocked, None
        self.blocked_since_ns = 0
        if want is None:
            raise AssertionError(f"session {self.session}: nothing is blocked")
        return want, self.blocked_cause

    def wake(self) -> None:
        """Something of the session changed: all that had stopped may look again."""
        self.prefetch_stopped = self.write_back_stopped = False
        self.prefetch_needs = self.write_back_needs = None
        if self.blocked is not None:
            self.push(self.blocked, front=True)
            self.blocked = None
