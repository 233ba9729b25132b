"""Tiles and shards: where the bytes are and who holds them.

Used by the store's other modules; the pump reads a tile's fields and never writes them. State only: no policy, no
allocation, no I/O.

    ABSENT --overwrite+store--> RESIDENT(dirty) --spill--> SPILLING --> RESIDENT(clean) --evict--> COLD
    COLD --load--> LOADING --> RESIDENT(clean)          LOADING --bad checksum--> LOST, --device error--> COLD
    SPILLING --device error--> RESIDENT(dirty)          LOST --overwrite--> RESIDENT
"""

from __future__ import annotations

from offloadd.core.records import Extent, Mode, Residency, ShardSpec, TileKey
from offloadd.core.units import PAGE_BYTES, align_up


class Tile:
    """One tile. Slots, not a dataclass: there may be a million of these."""

    __slots__ = (
        "blank",
        "checking",
        "checksums",
        "dirty",
        "disk_checksums",
        "extent",
        "flushing",
        "key",
        "length",
        "lost_granule",
        "offset",
        "on_disk",
        "padded",
        "path",
        "prefetched",
        "readers",
        "residency",
        "session",
        "spill_queued",
        "stamp",
        "writer",
    )

    def __init__(self, key: TileKey, session: int, length: int, extent: Extent | None, path: int) -> None:
        self.key = key
        self.session = session
        self.length = length
        self.padded = align_up(length, PAGE_BYTES)
        self.extent = extent
        self.path = path
        self.on_disk = extent is not None
        self.residency = Residency.ABSENT
        self.offset = -1
        """Where its slot starts in the region; -1: it has none."""
        self.dirty = False
        """Memory is newer than the extent."""
        self.blank = False
        """Under an OVERWRITE lease: the slot holds nothing that counts."""
        self.checking = False
        """Stored, and its checksums are still being computed."""
        self.checksums = b""
        """Of the bytes as they were stored or loaded; empty: none are kept."""
        self.disk_checksums: bytes | None = None
        """Of the bytes in the extent; None: the extent holds nothing whole."""
        self.readers = 0
        self.writer = 0
        """Lease number of the exclusive lease, 0 for none."""
        self.stamp = 0
        """Marks the one valid entry in the victim heap; 0: not a candidate."""
        self.flushing = 0
        """Flushes that wait for this tile's spill; its bytes must stay as they are meanwhile."""
        self.spill_queued = False
        self.prefetched = False
        """Loaded on a guess and not fetched since."""
        self.lost_granule = 0

    @property
    def leased(self) -> bool:
        """Somebody outside may be touching its bytes."""
        return self.readers > 0 or self.writer != 0

    @property
    def has_room(self) -> bool:
        """It has a slot, or needs none."""
        return self.offset >= 0 or not self.length

    @property
    def spillable(self) -> bool:
        """Dirty, whole, not in flight and not being written to."""
        return self.dirty and self.residency is Residency.RESIDENT and not self.writer and not self.checking

    @property
    def evictable(self) -> bool:
        """Its slot could be had, after a spill if it is dirty."""
        return (
            self.residency is Residency.RESIDENT
            and self.offset >= 0
            and self.on_disk
            and not self.readers
            and not self.writer
            and not self.checking
            and not self.flushing
        )


class Shard:
    """A registered shard and its tiles, in order."""

    __slots__ = ("id", "session", "spec", "tiles", "version")

    def __init__(self, id_: int, session: int, spec: ShardSpec, tiles: list[Tile]) -> None:
        self.id = id_
        self.session = session
        self.spec = spec
        self.tiles = tiles
        self.version = 0


class Lease:
    """One tile lent to one session."""

    __slots__ = ("mode", "tile")

    def __init__(self, tile: Tile, mode: Mode) -> None:
        self.tile = tile
        self.mode = mode
