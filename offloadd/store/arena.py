"""One session's memory: which slot holds which tile, and how room is made.

Used by the store's facade only. It reserves and evicts; spilling is work for the engine, so what must be spilled
first is returned, never done here. Nothing is freed under a lease or under a transfer.
"""

from __future__ import annotations

from collections.abc import Generator
from enum import IntEnum
from typing import NamedTuple

from offloadd.core.records import Residency
from offloadd.core.stats import RegionSnapshot
from offloadd.core.units import MIB
from offloadd.store.allocator import SlotAllocator
from offloadd.store.eviction import NO_USE, UseOrder, VictimHeap, cheapest_window
from offloadd.store.residency import Tile

PROBE_LIMIT = 8
"""Candidates looked at, furthest use first, before the linear search for a window."""

BACKOFF_FIRST_NS = 10_000_000
BACKOFF_LAST_NS = 2_000_000_000
"""A spill that failed is tried again after 10 ms, doubling to 2 s, so that a dead device costs no spinning."""


PREFETCH_BYTES = 128 * MIB
"""Loaded ahead by evicting, at most (and a quarter of the region): 64 ms of a 2 GB/s device."""


class Room(IntEnum):
    """How an attempt to reserve a slot ended."""

    TAKEN = 0
    TAKEN_BY_EVICTION = 1
    SPILL_FIRST = 2
    """The tiles in `spills` are in the way and dirty."""
    WAIT_SPILL = 3
    """Enough is being spilled already, or spilling must pause after an error."""
    WAIT = 4
    """Everything that could go is leased or being filled (or, for a prefetch, is needed sooner)."""


class Reservation(NamedTuple):
    """`Room` and the tiles to spill first."""

    room: Room
    spills: tuple[Tile, ...] = ()


class Arena:
    """Slots of one region."""

    def __init__(self, session: int, region_bytes: int, watermark: int, order: UseOrder, tile_bytes: int = 0) -> None:
        self.tile_bytes = tile_bytes
        """The session's tile size; 0: tiles are all alike to the allocator."""
        self.slots = SlotAllocator(region_bytes)
        self.owners: dict[int, Tile] = {}
        self.victims = VictimHeap(session, order)
        self.watermark = watermark
        """Bytes kept free or clean at the top of the victim order while there is pressure."""
        self.prefetch_bytes = max(watermark, min(region_bytes // 4, PREFETCH_BYTES))
        """Bytes loaded ahead of use for which others may be evicted. Without a limit the memory would hold only what
        comes next and nothing would survive until its next use: every cycle would load everything (Cao, Felten,
        Karlin, Li 1995: prefetching may not cost hits). Free memory may be filled without limit."""
        self.spilling_bytes = 0
        self.evicted: list[tuple[Tile, str]] = []
        """What was evicted and why, until the pump collects it."""
        self.spill_retry_at_ns = 0
        self._backoff_ns = 0
        self._session = session
        self._order = order

    def reserve(self, tile: Tile, demand: bool, now_ns: int, evict: bool = True) -> Reservation:
        """Give `tile` a slot. A prefetch may only push out what is used later than `tile` itself."""
        if self._take(tile):
            return Reservation(Room.TAKEN)
        if not evict:
            return Reservation(Room.WAIT)
        use = self._order.next_use(self._session, tile.key)
        floor = -1 if demand else use
        reason = "demand" if demand else "prefetch"
        victim, dirty, any_allowed = self._probe(tile.padded, floor)
        if victim is not None:
            self.evict(victim, reason)
            if self._take(tile):
                return Reservation(Room.TAKEN_BY_EVICTION)
        if dirty is not None:
            return self._spill_first((dirty,), tile.padded, now_ns)
        if not demand and not any_allowed:
            # The usual end of prefetching: all that could go is needed sooner. No search.
            return Reservation(Room.WAIT)
        return self._open_window(tile, floor, use, now_ns)

    def evict(self, tile: Tile, reason: str) -> None:
        """Forget a clean tile's memory."""
        self.release_slot(tile)
        tile.residency = Residency.COLD
        self.evicted.append((tile, reason))

    def release_slot(self, tile: Tile) -> None:
        """Free a tile's slot, whatever its state becomes."""
        self.victims.discard(tile)
        if tile.offset >= 0:
            self.slots.give(tile.offset)
            del self.owners[tile.offset]
            tile.offset = -1

    def refresh(self, tile: Tile) -> None:
        """Call after any change of a tile's state: it becomes a candidate (as of now) or ceases to be one."""
        if tile.evictable:
            self.victims.add(tile)
        else:
            self.victims.discard(tile)

    def write_back_candidate(self) -> Tile | None:
        """The dirty tile nearest to eviction, if the top of the victim order is not clean enough; else None."""
        wanted = self.watermark - self.slots.free.free_bytes - self.spilling_bytes
        if wanted <= 0:
            return None
        seen: list[tuple[Tile, int]] = []
        found: Tile | None = None
        while wanted > 0 and (entry := self.victims.pop()) is not None:
            seen.append(entry)
            if entry[0].dirty and not entry[0].spill_queued:
                found = entry[0]
                break
            wanted -= entry[0].padded
        for tile, use in seen:
            self.victims.put_back(tile, use)
        return found

    def spill_failed(self, now_ns: int) -> None:
        """Pause spilling: 10 ms, doubling to 2 s."""
        self._backoff_ns = min(BACKOFF_LAST_NS, max(BACKOFF_FIRST_NS, 2 * self._backoff_ns))
        self.spill_retry_at_ns = now_ns + self._backoff_ns

    def spill_succeeded(self) -> None:
        """The device works (again)."""
        self._backoff_ns = 0
        self.spill_retry_at_ns = 0

    def snapshot(self, swap_allocated: int, swap_limit: int) -> RegionSnapshot:
        """Bytes by state."""
        free, clean, dirty = self.slots.free.free_bytes, self.victims.clean_bytes, self.victims.dirty_bytes
        pinned = self.slots.bytes - free - clean - dirty
        return RegionSnapshot(free, clean, dirty, pinned, swap_allocated, swap_limit)

    def give_back(self, slice_tiles: int) -> Generator[None, None, None]:
        """Forget all slots, some at a time; the arena is not used again."""
        for _ in self.victims.clear(slice_tiles):
            yield
        while self.owners:
            for _ in range(min(slice_tiles, len(self.owners))):
                self.owners.popitem()
            yield

    def take_evicted(self) -> list[tuple[Tile, str]]:
        """Tiles evicted since the last call, with the reason."""
        evicted, self.evicted = self.evicted, []
        return evicted

    def _take(self, tile: Tile) -> bool:
        # Whole tiles from one end, shorter ones and what can never be evicted from the other: where all slots are of
        # one size, every victim makes exactly the room that the next tile needs.
        offset = self.slots.take(tile.padded, high=not tile.on_disk or tile.padded < self.tile_bytes)
        if offset < 0:
            return False
        tile.offset = offset
        self.owners[offset] = tile
        return True

    def _probe(self, need: int, floor: int) -> tuple[Tile | None, Tile | None, bool]:
        """Among the furthest few: the first clean victim that makes the room by itself, the first dirty one, and
        whether any could go at all."""
        seen: list[tuple[Tile, int]] = []
        clean = dirty = None
        allowed = False
        while len(seen) < PROBE_LIMIT and (entry := self.victims.pop()) is not None:
            seen.append(entry)
            tile, use = entry
            if use <= floor:
                break
            allowed = True
            if self.slots.run_with(tile.offset) < need:
                continue
            if not tile.dirty:
                clean = tile
                break
            dirty = dirty or tile
        for tile, use in seen:
            self.victims.put_back(tile, use)
        return clean, dirty, allowed

    def _spill_first(self, tiles: tuple[Tile, ...], need: int, now_ns: int) -> Reservation:
        if self.spilling_bytes >= need or now_ns < self.spill_retry_at_ns:
            return Reservation(Room.WAIT_SPILL)
        return Reservation(Room.SPILL_FIRST, tiles)

    def _open_window(self, tile: Tile, floor: int, use: int, now_ns: int) -> Reservation:
        """No single victim helps: make a contiguous run out of several."""
        base = use if use < NO_USE else 0

        def cost(other: Tile) -> float | None:
            if other.residency is Residency.SPILLING and not other.leased:
                return 0.0
            if not other.evictable:
                return None
            next_use = self._order.next_use(self._session, other.key)
            if next_use <= floor:
                return None
            if next_use == NO_USE:
                return 0.0
            return other.padded * (2.0 if other.dirty else 1.0) / max(1, next_use - base)

        runs = self.slots.free.runs()
        window = cheapest_window(runs, self.owners, tile.padded, self.slots.chunk_bytes, cost)
        if window is None:
            return Reservation(Room.WAIT_SPILL if self.spilling_bytes else Room.WAIT)
        dirty = tuple(t for t in window if t.dirty and t.residency is Residency.RESIDENT)
        if dirty:
            return self._spill_first(dirty, tile.padded, now_ns)
        if any(t.residency is Residency.SPILLING for t in window):
            return Reservation(Room.WAIT_SPILL)
        for other in window:
            self.evict(other, "window")
        return Reservation(Room.TAKEN_BY_EVICTION if self._take(tile) else Room.WAIT)
