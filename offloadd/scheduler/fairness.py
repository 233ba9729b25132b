"""Who goes next and how much may be in flight: start-time fair queueing across sessions, a byte window per path.

Used by the scheduler. Pure arithmetic; it holds no queue. Goyal, Vin, Cheng 1996: each session has a virtual time
that grows by bytes / weight; the one furthest behind is served, and one that wakes up starts at the present, so that
idling saves up nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from offloadd.core.units import MIB

WINDOW_DEFAULT_BYTES = 8 * MIB


class Windows:
    """Bytes in flight per path."""

    def __init__(self, limits: Mapping[int, int]) -> None:
        self._limits = dict(limits)
        self._inflight: dict[int, int] = {}

    def limit(self, path: int) -> int:
        """The path's window in bytes."""
        return self._limits.get(path, WINDOW_DEFAULT_BYTES)

    def has_room(self, path: int, length: int) -> bool:
        """Whether `length` more bytes may go. A path with nothing in flight takes a transfer of any size."""
        inflight = self._inflight.get(path, 0)
        return inflight == 0 or inflight + length <= self.limit(path)

    def open(self, path: int, length: int) -> None:
        """A transfer starts."""
        self._inflight[path] = self._inflight.get(path, 0) + length

    def close(self, path: int, length: int) -> None:
        """It ended."""
        self._inflight[path] -= length

    def inflight(self, path: int) -> int:
        """Bytes in flight."""
        return self._inflight.get(path, 0)

    def state(self) -> dict[int, tuple[int, int]]:
        """Path to (bytes in flight, limit)."""
        return {p: (self.inflight(p), self.limit(p)) for p in sorted({*self._limits, *self._inflight})}


class VirtualTime:
    """One session's account in the fair queue."""

    __slots__ = ("finish", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.finish = 0.0


class FairClock:
    """The queue's own time: the start tag of the service begun last."""

    def __init__(self) -> None:
        self.now = 0.0

    def start_tag(self, account: VirtualTime) -> float:
        """When the session's next service would start, in virtual time; the least goes first."""
        return max(account.finish, self.now)

    def charge(self, account: VirtualTime, length: int) -> None:
        """The session was served `length` bytes."""
        start = max(account.finish, self.now)
        self.now = start
        account.finish = start + length / account.weight
