"""A lock per name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Shared:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    """Who holds it or waits for it."""


class NamedLocks:
    """Whoever holds a name keeps others of that name waiting, and nobody else. A lock exists as long as somebody holds
    it or waits for it, so there are never more than callers. Event loop only."""

    def __init__(self) -> None:
        self._locks: dict[str, _Shared] = {}

    def __len__(self) -> int:
        return len(self._locks)

    @contextlib.asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """In the order of asking."""
        shared = self._locks.setdefault(name, _Shared())
        shared.users += 1
        try:
            async with shared.lock:
                yield
        finally:
            shared.users -= 1
            if not shared.users:
                del self._locks[name]
