"""Time as a value that can be handed in, so that tests and simulations move it themselves."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic nanoseconds from an arbitrary start."""

    def now_ns(self) -> int: ...


class MonotonicClock:
    """The real one."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


class ManualClock:
    """A clock that moves only when told to; for tests and simulation."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, delta_ns: int) -> None:
        if delta_ns < 0:
            raise ValueError("a monotonic clock cannot go back")
        self._now_ns += delta_ns
