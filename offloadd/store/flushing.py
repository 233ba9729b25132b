"""One flush on its way to disk: spills, then syncs, then the catalog.

Made by the store, driven by the pump. It remembers what is still to come and the first error; it starts nothing.
"""

from __future__ import annotations

from concurrent.futures import Future
from enum import IntEnum

from offloadd.core.errors import Code
from offloadd.core.records import Request, TileKey


class Phase(IntEnum):
    """How far a flush has come."""

    SPILL = 0
    SYNC = 1
    COMMIT = 2


class FlushJob:
    """One FLUSH request."""

    __slots__ = ("commit", "error", "phase", "remaining", "request", "syncs")

    def __init__(self, request: Request, remaining: set[TileKey]) -> None:
        self.request = request
        self.remaining = remaining
        """Tiles whose spill it waits for."""
        self.syncs = 0
        """Syncs in flight for it."""
        self.phase = Phase.SPILL
        self.commit: Future[None] | None = None
        self.error: tuple[Code, int, int] | None = None
        """(code, errno, path) of the first thing that failed."""

    def fail(self, code: Code, errno: int, path: int) -> None:
        """Remember the first failure."""
        if self.error is None:
            self.error = (code, errno, path)
