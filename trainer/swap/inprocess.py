"""InProcessBackend: shards as plain tensors in this process. Devices none and cpu.

Used through the `SwapBackend` protocol by `trainer.zero` and `trainer.optim`. A fetch is a view, nothing is copied
and nothing waits. In guarded mode (tests) every slot is a copy of its own that is poisoned when the lease ends, so
that a use after `store` or `release` shows as NaN or a crash instead of passing by luck.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from trainer.swap.backend import Access, SwapError, SwapShard, SwapSpec, Tile

DEFAULT_TILE_NUMEL = 1 << 24
"""64 MiB of fp32: large enough that the cost per tile vanishes."""

_MODES = ("read", "update", "overwrite")


class _Kept:
    """One shard's bytes, and who has them."""

    def __init__(self, shard: SwapShard) -> None:
        self.shard = shard
        self.data = torch.empty(shard.spec.numel, dtype=shard.spec.dtype)
        self.stored = [False] * len(shard.tiles)
        self.readers = [0] * len(shard.tiles)
        self.writer = [False] * len(shard.tiles)


class InProcessSlot:
    """A lent tile."""

    def __init__(self, backend: InProcessBackend, kept: _Kept, tile: Tile, mode: str) -> None:
        self.tile = tile
        self._backend, self._kept, self._mode = backend, kept, mode
        home = kept.data[tile.start : tile.start + tile.numel]
        # `.data` has a version counter of its own: a write by someone else does not look like one through this slot.
        self.tensor = home.clone() if backend.guarded else home.data
        if backend.guarded and mode == "overwrite":
            self.tensor.view(torch.uint8).fill_(0xFF)
        self._version = self.tensor._version
        self._open = True

    def store(self) -> None:
        """The bytes changed and are complete."""
        if self._mode == "read":
            raise ValueError(f"shard {self._kept.shard.spec.name}: a read slot cannot be stored")
        self._end(stored=True)

    def release(self) -> None:
        """The bytes are as they were."""
        if self._mode == "read" and self.tensor._version != self._version:
            raise SwapError(f"shard {self._kept.shard.spec.name}: a read slot was written to; fetch it for update")
        self._end(stored=False)

    def _end(self, *, stored: bool) -> None:
        if not self._open:
            raise SwapError(f"shard {self._kept.shard.spec.name}: this slot's lease has already ended")
        self._open = False
        if self._backend.guarded:
            if stored:
                start = self.tile.start
                self._kept.data[start : start + self.tile.numel].copy_(self.tensor)
            self.tensor.view(torch.uint8).fill_(0xFF)
            self.tensor.untyped_storage().resize_(0)
        self._backend._ended(self._kept, self.tile, self._mode, stored)


class InProcessPending:
    """A fetch, which needs no time here."""

    def __init__(self, slot: InProcessSlot) -> None:
        self._slot: InProcessSlot | None = slot

    def wait(self) -> InProcessSlot:
        """The slot, once."""
        if self._slot is None:
            raise SwapError("a fetch may be waited for once")
        slot, self._slot = self._slot, None
        return slot


class InProcessBackend:
    """See `trainer.swap.backend.SwapBackend`."""

    def __init__(self, *, tile_numel: int = DEFAULT_TILE_NUMEL, guarded: bool = False) -> None:
        if tile_numel <= 0 or tile_numel % 1024:
            raise ValueError("tile_numel must be a positive multiple of 1024")
        self.tile_numel = tile_numel
        self.guarded = guarded
        self.planned: list[Access] = []
        self._kept: list[_Kept] = []
        self._names: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._counts = dict.fromkeys(("fetches", "fetch_wait_seconds", "stores", "bytes_fetched", "bytes_stored"), 0.0)

    def register(self, specs: Sequence[SwapSpec]) -> list[SwapShard]:
        """Make room for shards, all or none."""
        names = [spec.name for spec in specs]
        with self._lock:
            if len(set(names)) != len(names) or self._names.intersection(names):
                twice = next(name for name in names if names.count(name) > 1 or name in self._names)
                raise SwapError(f"shard {twice} is registered twice")
            first = len(self._kept)
            shards = [SwapShard(first + i, spec, self._tiles(first + i, spec)) for i, spec in enumerate(specs)]
            self._kept += [_Kept(shard) for shard in shards]
            self._names.update(names)
        return shards

    def _tiles(self, shard: int, spec: SwapSpec) -> tuple[Tile, ...]:
        starts = range(0, spec.numel, self.tile_numel)
        return tuple(Tile(shard, i, a, min(self.tile_numel, spec.numel - a)) for i, a in enumerate(starts))

    def fetch(self, tile: Tile, mode: str) -> InProcessPending:
        """Lend a tile at once."""
        if mode not in _MODES:
            raise ValueError(f"mode {mode!r} is none of {', '.join(_MODES)}")
        with self._lock:
            if self._closed:
                raise SwapError("the backend is closed")
            kept = self._kept[tile.shard]
            name = f"shard {kept.shard.spec.name} tile {tile.index}"
            if mode != "overwrite" and not kept.stored[tile.index]:
                raise SwapError(f"{name}: fetched for {mode} before it was ever stored")
            if kept.writer[tile.index] or (mode != "read" and kept.readers[tile.index]):
                raise SwapError(f"{name}: fetched for {mode} while another lease forbids it")
            if mode == "read":
                kept.readers[tile.index] += 1
            else:
                kept.writer[tile.index] = True
            self._counts["fetches"] += 1
            if mode != "overwrite":
                self._counts["bytes_fetched"] += tile.numel * kept.data.element_size()
        return InProcessPending(InProcessSlot(self, kept, tile, mode))

    def _ended(self, kept: _Kept, tile: Tile, mode: str, stored: bool) -> None:
        with self._lock:
            if mode == "read":
                kept.readers[tile.index] -= 1
                return
            kept.writer[tile.index] = False
            if stored:
                kept.stored[tile.index] = True
                self._counts["stores"] += 1
                self._counts["bytes_stored"] += tile.numel * kept.data.element_size()
            elif mode == "overwrite":
                kept.stored[tile.index] = False

    def plan(self, accesses: Sequence[Access], steps: int = 1) -> None:
        """Kept for whoever looks; nothing here is far away."""
        self.planned = list(accesses)

    def waited(self, seconds: float) -> None:
        """Nothing is accounted for here."""

    def flush(self) -> None:
        """Everything stored is already where it lives."""

    def statistics(self) -> dict[str, float]:
        """Counters, and the leases open now."""
        with self._lock:
            open_leases = sum(sum(kept.readers) + sum(kept.writer) for kept in self._kept)
            return {**self._counts, "open_leases": float(open_leases)}

    def close(self) -> None:
        """Let the tensors go."""
        with self._lock:
            self._closed = True
            self._kept.clear()
            self._names.clear()
