"""Which swap file a tile's extent goes to.

Used by the store at registration only. Bytes are spread in proportion to the paths' weights (measured bandwidth):
each tile goes to the file that is furthest behind its share. It allocates nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offloadd.core.errors import Code, OffloadError


@dataclass(frozen=True, slots=True)
class SwapTarget:
    """A swap file that a session may use."""

    file: int
    """The engine's number for it."""
    path: int
    """Index of its path in the daemon's list."""
    weight: float
    """Share of the bytes, relative to the other targets: the path's measured bandwidth."""


class Placement:
    """Deficit by bytes over a session's targets."""

    def __init__(self, targets: Sequence[SwapTarget]) -> None:
        for target in targets:
            if not target.weight > 0:
                raise OffloadError(
                    Code.BAD_REQUEST, f"swap path {target.path}: weight {target.weight} is not above 0; recalibrate it"
                )
        self.targets = tuple(targets)
        self._placed = {target.file: 0 for target in targets}

    def choose(self, length: int) -> SwapTarget:
        """The target whose share would be least exceeded by `length` more bytes; ties go to the first listed."""
        target = min(self.targets, key=lambda t: (self._placed[t.file] + length) / t.weight)
        self._placed[target.file] += length
        return target

    def undo(self, file: int, length: int) -> None:
        """Take a choice back (a registration that was aborted)."""
        self._placed[file] -= length

    def placed(self, file: int) -> int:
        """Bytes placed on a file so far."""
        return self._placed[file]
