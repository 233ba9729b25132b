"""Where free bytes are: slots of a region and extents of a swap file.

Used by the store only. Knows offsets and lengths; never what lies there, and never touches a byte.

Best fit with coalescing. In a region no run crosses a registration chunk, so no slot can. The rule against
fragmentation is eviction of a contiguous window (eviction.py), and it rests on counting: with k slots of at most
T bytes that cannot move, everything else evicted, the rest of a region lies in at most k + 1 + w gaps, where w is
the number of chunk boundaries inside it. If the region has at least (2k + 1 + w) * T bytes, the gaps hold at least
(k + 1 + w) * T, so one of them holds T. Up to 1 GiB, w is 0 and the bound is (2k + 1) * T.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from offloadd.core.units import PAGE_BYTES, REGISTRATION_CHUNK_BYTES


class Runs:
    """Free runs of a line. `wall`: no run crosses a multiple of it (0: no walls)."""

    def __init__(self, wall: int = 0) -> None:
        self.free_bytes = 0
        self._wall = wall
        self._by_size: list[tuple[int, int]] = []
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}

    def give(self, start: int, length: int) -> None:
        """Make `length` bytes at `start` free; they must lie within one wall-to-wall stretch."""
        if length <= 0:
            return
        self.free_bytes += length
        left, right = self.neighbours(start, length)
        if left:
            self._remove(start - left, left)
        if right:
            self._remove(start + length, right)
        self._insert(start - left, left + length + right)

    def take(self, length: int, high: bool = False) -> int:
        """Start of `length` bytes out of the smallest run that has them, or -1. `high` takes from the highest run's
        end instead: for what will never move, so that it does not break up the rest."""
        at = bisect_left(self._by_size, (length, -1))
        if at == len(self._by_size):
            return -1
        size, start = max(self._by_size[at:], key=lambda run: run[1]) if high else self._by_size[at]
        self._remove(start, size)
        self.free_bytes -= length
        if size > length:
            if high:
                self._insert(start, size - length)
                return start + size - length
            self._insert(start + length, size - length)
        return start

    def neighbours(self, start: int, length: int) -> tuple[int, int]:
        """Free bytes that touch a span on its left and right, on its side of the walls."""
        end = start + length
        left = right = 0
        if not self._wall or start % self._wall:
            before = self._start_before.get(start)
            if before is not None:
                left = start - before
        if not self._wall or end % self._wall:
            right = self._length_at.get(end, 0)
        return left, right

    def largest(self) -> int:
        """Length of the largest run."""
        return self._by_size[-1][0] if self._by_size else 0

    def runs(self) -> list[tuple[int, int]]:
        """(start, length) of every run, by start."""
        return sorted(self._length_at.items())

    def _insert(self, start: int, length: int) -> None:
        insort(self._by_size, (length, start))
        self._length_at[start] = length
        self._start_before[start + length] = start

    def _remove(self, start: int, length: int) -> None:
        del self._by_size[bisect_left(self._by_size, (length, start))]
        del self._length_at[start]
        del self._start_before[start + length]


class SlotAllocator:
    """Slots of one region: page-aligned, never across a registration chunk."""

    def __init__(self, region_bytes: int, chunk_bytes: int = REGISTRATION_CHUNK_BYTES) -> None:
        usable = region_bytes - region_bytes % PAGE_BYTES
        self.bytes = usable
        self.chunk_bytes = chunk_bytes
        self.free = Runs(wall=chunk_bytes)
        self.taken: dict[int, int] = {}
        """Start to length of every slot in use."""
        for start in range(0, usable, chunk_bytes):
            self.free.give(start, min(chunk_bytes, usable - start))

    def take(self, length: int, high: bool = False) -> int:
        """Offset of a slot of `length` bytes (a multiple of the page), or -1."""
        start = self.free.take(length, high)
        if start >= 0:
            self.taken[start] = length
        return start

    def give(self, start: int) -> None:
        """Free a slot."""
        self.free.give(start, self.taken.pop(start))

    def run_with(self, start: int) -> int:
        """How long the free run would be if the slot at `start` were freed."""
        length = self.taken[start]
        left, right = self.free.neighbours(start, length)
        return left + length + right


class ExtentAllocator:
    """Extents of one swap file: out of what was freed first, else at its end."""

    def __init__(self) -> None:
        self.end = 0
        """How long the file has to be."""
        self.granted_length = 0
        """How long the caller has made it."""
        self._free = Runs()

    def take(self, length: int) -> int:
        """Offset of `length` bytes; grows `end` when nothing free is large enough."""
        start = self._free.take(length)
        if start >= 0:
            return start
        start = self.end
        self.end += length
        return start

    def give(self, start: int, length: int) -> None:
        """Free an extent. What is free at the end stays part of the file."""
        self._free.give(start, length)

    @property
    def live_bytes(self) -> int:
        """Bytes in extents that are in use."""
        return self.end - self._free.free_bytes
