"""Slots of parameter shards held while optimizer tiles pass over them.

Used by `ShardedAdam`. A tile of optimizer state may end in the middle of a parameter's tile; the parameter's slot
then stays open until the tile with the rest has been updated too, and is stored exactly once.
"""

from __future__ import annotations

import torch

from trainer.optim.subgroups import Piece
from trainer.swap.accesslog import AccessLog
from trainer.swap.backend import Pending, Slot, SwapBackend, Tile


class _Lease:
    def __init__(self, pending: Pending, remaining: int) -> None:
        self.pending: Pending | None = pending
        self.slot: Slot | None = None
        self.remaining = remaining


class ParamLeases:
    """Open parameter slots, by tile."""

    def __init__(self, backend: SwapBackend, log: AccessLog) -> None:
        self._backend, self._log = backend, log
        self._open: dict[Tile, _Lease] = {}

    def start(self, piece: Piece, mode: str) -> None:
        """Begin fetching the tile under a piece, unless it is open."""
        if piece.tile not in self._open:
            self._log.note(self._backend, piece.tile, mode)
            self._open[piece.tile] = _Lease(self._backend.fetch(piece.tile, mode), piece.tile.numel)

    def view(self, piece: Piece) -> torch.Tensor:
        """The piece's elements in the slot; waits for it."""
        lease = self._open[piece.tile]
        if lease.pending is not None:
            lease.slot, lease.pending = lease.pending.wait(), None
        if lease.slot is None:
            raise AssertionError(f"the slot of {piece.zero.name} was not kept")
        return lease.slot.tensor[piece.in_param : piece.in_param + piece.numel]

    def done(self, piece: Piece) -> None:
        """A piece is complete; the last one stores the slot. The caller has dropped its view."""
        lease = self._open[piece.tile]
        lease.remaining -= piece.numel
        if lease.remaining == 0 and lease.slot is not None:
            del self._open[piece.tile]
            lease.slot.store()

    def all_closed(self) -> bool:
        """Whether every slot was stored."""
        return not self._open
