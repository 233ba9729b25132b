"""SwapBackend: where a rank's shards live when they are not being used.

The engine asks for a shard (or one tile of it), computes in the memory it is given, and hands it back. Two
implementations: `InProcessBackend` keeps plain tensors (device none and cpu); `DaemonBackend` asks offloadd.
Both pass tests/conformance/test_swap_backend.py, and nothing above this seam knows which one runs.

Starting and waiting are two calls, so that overlap is visible where it happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True, slots=True)
class SwapSpec:
    """A 1-D shard to be kept."""

    name: str
    numel: int
    """Elements; may be 0."""
    dtype: torch.dtype
    kind: str
    """param | master | exp_avg | exp_avg_sq | other."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A fixed range of a shard: the unit of fetching. A shard that fits the backend's tile size is one tile."""

    shard: int
    index: int
    start: int
    """First element within the shard."""
    numel: int


@dataclass(frozen=True, slots=True)
class SwapShard:
    """A registered shard."""

    id: int
    spec: SwapSpec
    tiles: tuple[Tile, ...]
    """In order, covering the shard; empty for an empty shard. Tile size (elements) depends on the byte size of the
    dtype only through the backend's `tile_numel`, so shards of equal numel have equal tiles whatever their dtype."""


class Access(NamedTuple):
    """One entry of an access plan."""

    shard: int
    tile: int
    mode: str
    """read | update | overwrite."""


class Slot(Protocol):
    """One tile's bytes, lent. Exactly one of `store` and `release` ends it; the memory goes back when, after that,
    the last tensor over it dies."""

    tile: Tile
    tensor: torch.Tensor
    """1-D, of the shard's dtype, 64-byte aligned; `tile.numel` elements."""

    def store(self) -> None:
        """The bytes changed and are complete: ownership goes over; the caller must not write again. Never waits for
        the disk. Errors surface at the next `wait` or `flush` of this backend. ValueError on a read slot."""

    def release(self) -> None:
        """The bytes are as they were fetched."""


class Pending(Protocol):
    """A fetch under way."""

    def wait(self) -> Slot:
        """The slot; waits at most the backend's time-out. Raises SwapError naming the shard. May be called once."""


class SwapError(RuntimeError):
    """A fetch or store failed; one sentence naming job, rank, shard, operation and what to do."""


class SwapBackend(Protocol):
    """Keeps shards. Used from the rank's forward and backward threads, so calls are thread-safe."""

    tile_numel: int
    """Elements per tile: a multiple of 1024."""

    def register(self, specs: Sequence[SwapSpec]) -> list[SwapShard]:
        """Make room for shards, all or none. Names are unique within the backend. Contents are absent until stored
        once."""

    def fetch(self, tile: Tile, mode: str) -> Pending:
        """Start fetching. read: shared, contents as stored. update: exclusive, contents as stored. overwrite:
        exclusive, contents undefined, the caller writes every element."""

    def plan(self, accesses: Sequence[Access], steps: int = 1) -> None:
        """A hint: the order in which tiles will be fetched, cyclically, from now on. Wrong hints cost time only.
        `steps`: training steps that one cycle covers."""

    def waited(self, seconds: float) -> None:
        """The rank was held up for so long by a thread of its own that fetches from here; for the account of stalls."""

    def flush(self) -> None:
        """Return when everything stored is where it survives the memory it was stored from; raise what failed."""

    def statistics(self) -> dict[str, float]:
        """Counters: fetches, fetch_wait_seconds, stores, bytes_fetched, bytes_stored; daemon backends add
        disk_read_bytes, disk_written_bytes and stall seconds by cause."""

    def close(self) -> None:
        """Give everything back. Idempotent."""
