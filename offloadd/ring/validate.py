"""From what a client wrote to a Request, or the reply that refuses it. The same for ring and stream."""

from __future__ import annotations

from collections.abc import Callable

from offloadd.core.errors import Code
from offloadd.core.records import Mode, Op, Reply, Request, TileKey
from offloadd.core.stats import Cause
from offloadd.wire.layout import Submission

Resolve = Callable[[int, int], TileKey | None]
"""(shard number within the session, tile index) -> tile, or None if there is no such tile."""

_OPS = {int(op): op for op in Op}
_MODES = {int(mode): mode for mode in Mode}
_CAUSES = {int(cause) for cause in Cause}
BLOCKED_NS_MAX = 3_600_000_000_000
_NO_TILE = TileKey(0, 0)
_WITHOUT_TILE = frozenset({Op.NOP, Op.FLUSH, Op.STORE, Op.RELEASE})


class Validator:
    """Checks entries of one session. `generation` is the ring's; an entry of an older one is stale."""

    def __init__(self, session: int, generation: int, resolve: Resolve) -> None:
        self._session = session
        self._generation = generation
        self._resolve = resolve

    def check(self, entry: Submission, now_ns: int) -> Request | Reply:
        op = _OPS.get(entry.op)
        mode = _MODES.get(entry.mode)
        if entry.generation != self._generation:
            return self._refuse(entry, Code.STALE_SESSION)
        if op is None or mode is None:
            return self._refuse(entry, Code.BAD_REQUEST)
        tile: TileKey | None = _NO_TILE
        if op not in _WITHOUT_TILE:
            tile = self._resolve(entry.shard, entry.tile)
            if tile is None:
                return self._refuse(entry, Code.UNKNOWN_SHARD)
        # A rank cannot have been blocked for longer than it has existed; nonsense must not spoil the accounts.
        blocked = entry.blocked_ns if entry.blocked_ns < BLOCKED_NS_MAX else 0
        cause = entry.blocked_cause if entry.blocked_cause in _CAUSES else 0
        return Request(self._session, entry.id, op, mode, tile or _NO_TILE, entry.lease, now_ns, blocked, cause)

    def _refuse(self, entry: Submission, code: Code) -> Reply:
        return Reply(self._session, entry.id, code)
