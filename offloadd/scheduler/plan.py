"""A session's access plan: the order in which it says it will fetch, cyclically, and how far it has come.

Used by the scheduler. Pure. The plan is a hint: a fetch out of order costs a count, never an error. Positions are
absolute and only grow, over all cycles and over replaced plans, so that they can be compared and kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

from offloadd.core.records import TileKey

NO_USE = 1 << 62
"""Position of what the plan never mentions."""

LOOKAHEAD = 64
"""A fetch this far ahead of the cursor still counts as following the plan: ranks fetch ahead and out of order."""


class AccessPlan:
    """One cyclic list and its cursor."""

    def __init__(
        self, entries: Sequence[TileKey], base: int = 0, overwrites: Collection[int] = (), steps: int = 1
    ) -> None:
        """`overwrites`: indices of entries that need no bytes, because the rank writes all of them. `steps`: training
        steps that one cycle covers."""
        self.entries = entries if isinstance(entries, list) else list(entries)
        self.overwrites = frozenset(overwrites)
        self.steps = max(1, steps)
        self.base = base
        """Absolute position of the first entry's first use."""
        self.cursor = base
        """Everything before it was fetched or passed over."""
        self.ahead = base
        """Prefetch has looked at everything before it."""
        self.mispredictions = 0
        self._where: dict[TileKey, list[int]] = {}
        for position, key in enumerate(self.entries):
            self._where.setdefault(key, []).append(position)
        self._skipped: dict[TileKey, int] = {}
        """Jumped over, and perhaps still to come."""

    def begin_at(self, position: int) -> None:
        """Move a plan that was never used: its first entry's first use is at this absolute position."""
        self.base = self.cursor = self.ahead = position

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def cycles(self) -> int:
        """Times the cursor came round."""
        return (self.cursor - self.base) // len(self.entries) if self.entries else 0

    def at(self, position: int) -> TileKey:
        """The entry at an absolute position."""
        return self.entries[(position - self.base) % len(self.entries)]

    def needs_bytes(self, position: int) -> bool:
        """False for a use that overwrites: loading for it would be in vain."""
        return not self.overwrites or (position - self.base) % len(self.entries) not in self.overwrites

    def next_need(self, key: TileKey) -> int:
        """Position of the next use if it needs the tile's bytes; NO_USE if they are to be overwritten."""
        position = self.next_use(key)
        return position if position == NO_USE or self.needs_bytes(position) else NO_USE

    def next_use(self, key: TileKey) -> int:
        """Absolute position of the next use at or after the cursor (or of one that was jumped over)."""
        if self._skipped:
            late = self._skipped.get(key)
            if late is not None:
                return late
        return self._from_cursor(key)

    def advance(self, key: TileKey) -> bool:
        """A fetch arrived: move the cursor. False when the plan did not see it coming."""
        if not self.entries:
            return True
        if self.entries[(self.cursor - self.base) % len(self.entries)] == key:
            self.cursor += 1
        elif self._skipped.pop(key, None) is not None:
            return True
        else:
            position = self._from_cursor(key)
            if position - self.cursor > min(LOOKAHEAD, len(self.entries) - 1):
                self.mispredictions += 1
                return False
            for passed in range(self.cursor, position):
                self._skipped[self.at(passed)] = passed
            self.cursor = position + 1
        if self._skipped:
            self._forget_skipped()
        self.ahead = max(self.ahead, self.cursor)
        return True

    def _from_cursor(self, key: TileKey) -> int:
        where = self._where.get(key)
        if where is None:
            return NO_USE
        position = (self.cursor - self.base) % len(self.entries)
        start = self.cursor - position
        if len(where) == 1:
            return start + where[0] if where[0] >= position else start + len(self.entries) + where[0]
        at = bisect_left(where, position)
        return start + where[at] if at < len(where) else start + len(self.entries) + where[0]

    def _forget_skipped(self) -> None:
        """Entries that did not come within the look-ahead will not come: they were predicted wrongly."""
        oldest = self.cursor - LOOKAHEAD
        for key, position in list(self._skipped.items()):
            if position >= oldest:
                break
            del self._skipped[key]
            self.mispredictions += 1
