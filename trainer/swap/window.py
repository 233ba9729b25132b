"""How many reads may be under way at once: a fetch that nobody waits for yet holds memory all the same.

Used by `trainer.swap.daemon`. A gather or a prefetch may ask for more tiles than the session has memory for. Asked all
at once, those needed last could take what those needed first wait for; so only so many are asked for, and the rest
follow in order as slots go back. Whoever waits for one that has not been asked for yet asks for it at once.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol


class Asking(Protocol):
    """A fetch that can be begun later. `begin` is called once and keeps what it raises for whoever waits."""

    def begin(self) -> None: ...


class ReadWindow:
    """Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._lock = threading.Lock()
        self._under_way = 0
        self._queue: deque[Asking] = deque()

    def enter(self, asking: Asking) -> None:
        """Begin now, or when it is its turn."""
        with self._lock:
            if self._queue or self._under_way >= self._limit:
                self._queue.append(asking)
                return
            self._under_way += 1
            asking.begin()

    def need(self, asking: Asking) -> None:
        """Somebody waits: begin if that has not happened, whatever the limit says."""
        with self._lock:
            if asking in self._queue:
                self._queue.remove(asking)
                self._under_way += 1
                asking.begin()

    def leave(self) -> None:
        """One slot went back, or will never come."""
        with self._lock:
            self._under_way -= 1
            while self._queue and self._under_way < self._limit:
                self._under_way += 1
                self._queue.popleft().begin()
