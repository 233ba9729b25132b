"""The records that pass between rooms: small, frozen, no behaviour beyond construction.

Those made for every request are named tuples, which cost a quarter of a frozen dataclass to make.

`Request` and `Reply` cross the ring; `Transfer` and `Outcome` cross the engine seam. The unit of decision is the
*tile*: a fixed range of a shard of at most the session's `tile_bytes` (some MiB). A shard shorter than that is one
tile. Rooms hand these to each other only through `offloadd.pump`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from offloadd.core.errors import Code


class Op(IntEnum):
    """What a client asks for over the ring or the stream."""

    NOP = 0
    """Answered at once; measures the round trip."""
    FETCH = 1
    """Pin one tile in a slot and say where. `mode` says what for."""
    STORE = 2
    """End an UPDATE or OVERWRITE lease whose bytes changed: checksum, mark dirty, unpin."""
    RELEASE = 3
    """End a lease whose bytes did not change: unpin. On an OVERWRITE lease the tile becomes ABSENT again."""
    DROP = 4
    """Forget a tile's bytes; it becomes ABSENT. Refused with LEASE_CONFLICT while leased."""
    FLUSH = 5
    """Answered when everything this session stored before is on disk and the files are synced."""


class Mode(IntEnum):
    """What a fetched tile will be used for."""

    READ = 0
    UPDATE = 1
    OVERWRITE = 2
    """The caller writes every byte, so nothing is loaded. The tile may be ABSENT."""


class TrafficClass(IntEnum):
    """Order in which the scheduler serves; lower goes first."""

    DEMAND = 0
    PREFETCH = 1
    WRITE_BACK = 2
    EXPORT = 3


class Direction(IntEnum):
    """What an engine does with one transfer."""

    READ = 0
    WRITE = 1
    CHECKSUM = 2
    """No I/O: checksum the span where it lies."""
    SYNC = 3
    """fdatasync of `extent.file`; the span is empty."""


class Residency(IntEnum):
    """Where a tile's bytes are."""

    ABSENT = 0
    COLD = 1
    """On disk only."""
    LOADING = 2
    RESIDENT = 3
    SPILLING = 4
    """Resident, and a write to disk is in flight from its slot."""
    LOST = 5
    """A load found a device error or a checksum mismatch; the bytes are not to be had from this copy."""


class TileKey(NamedTuple):
    """A tile: daemon-wide shard number and index within the shard."""

    shard: int
    index: int  # type: ignore[assignment]  # shadows tuple.index, which nothing here needs


class Span(NamedTuple):
    """Bytes of memory: a region known to the engine, an offset in it and a length. Page-aligned at both ends."""

    region: int
    offset: int
    length: int


class Extent(NamedTuple):
    """Bytes of a swap file: a file known to the engine, an offset in it and a length. Page-aligned at both ends."""

    file: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """What a client says of a shard when it registers it."""

    name: str
    dtype: str
    length: int
    """Logical bytes; may be 0 or exceed 4 GiB. Padding is the daemon's own business."""
    kind: str
    """param | master | exp_avg | exp_avg_sq | other: for accounting only."""
    on_disk: bool = True
    """False: lives in memory only, never spilled, and counts against the session's host bytes as pinned."""
    tile_bytes: int = 0
    """Bytes of each tile but the last; at most the session's, which 0 stands for."""


class Request(NamedTuple):
    """One entry of a submission queue, validated and stamped. `shard` is the daemon-wide number."""

    session: int
    id: int
    op: Op
    mode: Mode
    tile: TileKey
    lease: int
    arrived_ns: int
    blocked_ns: int = 0
    """How long the rank was blocked on an earlier fetch: what a stall really is, as only the rank can know."""
    blocked_cause: int = 0
    """The cause that the reply to that fetch named (core.stats.Cause)."""


CATALOG_PATH = 0xFFFFFFFF
"""In a reply, instead of a swap path: the catalog failed."""


class Reply(NamedTuple):
    """One entry of a completion queue: exactly one per accepted request."""

    session: int
    id: int
    code: Code
    offset: int = 0
    """Where the slot starts, in bytes from the start of the session's region."""
    length: int = 0
    """Logical bytes of the tile."""
    lease: int = 0
    errno: int = 0
    granule: int = 0
    """For CORRUPT: the first granule whose checksum differs."""
    path: int = 0
    """For 3xx: index of the swap path in the daemon's list, or CATALOG_PATH."""
    waited_ns: int = 0
    """How long the daemon held the request before it could answer."""
    cause: int = 0
    """What it waited for longest (core.stats.Cause)."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Work for an engine. Completes exactly once, as the `Outcome` with the same id."""

    id: int
    direction: Direction
    klass: TrafficClass
    session: int
    tile: TileKey
    span: Span
    extent: Extent | None
    length: int
    """Logical bytes; the span's and the extent's lengths are this, page-aligned."""
    checksum: bool
    """Return the granules' checksums: of what was read, or of what is about to be written."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transfer ended. `result` is the bytes moved, always the whole span, or a negative errno."""

    id: int
    result: int
    checksums: bytes = b""
    """Little-endian u32 per granule, over logical bytes only; empty when not asked for."""
    elapsed_ns: int = 0
