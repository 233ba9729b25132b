"""The store: what is where, who holds it, and what has to move. It moves no bytes itself.

Called by the pump (data path: returns verdicts and transfers) and by control (sessions and registration: raises
OffloadError), both on the loop's thread. `reserve` and `begin_*` reserve and say what I/O is needed; `settle_*`
commit or roll back. It never waits, and it knows no plan but through the order lent to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from enum import IntEnum

from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import (
    Direction,
    Extent,
    Mode,
    Outcome,
    Residency,
    ShardSpec,
    Span,
    TileKey,
    TrafficClass,
    Transfer,
)
from offloadd.core.stats import RegionSnapshot
from offloadd.core.units import MIB
from offloadd.store.allocator import ExtentAllocator
from offloadd.store.arena import Arena, Reservation, Room
from offloadd.store.catalog import Catalog
from offloadd.store.eviction import NoPlan, UseOrder
from offloadd.store.holdings import Holdings, Registration, SessionTerms
from offloadd.store.outcomes import SETTLED_OK, Settled, classify, first_difference
from offloadd.store.placement import SwapTarget
from offloadd.store.residency import Lease, Shard, Tile

WATERMARK_BYTES = 64 * MIB
"""Under pressure this much (at most a quarter of the region) is kept free or clean ahead of eviction: what keeps the
device busy with writes while it reads."""


class Verdict(IntEnum):
    """What becomes of a fetch or drop right now."""

    GRANTED = 0
    REFUSED = 1
    PARK_LOADING = 2
    PARK_SPILLING = 3
    PARK_CHECKING = 4
    LOAD = 5
    """Needs a slot and a read."""
    SLOT = 6
    """Needs a slot only."""


class Store:
    """All sessions' tiles."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._order: UseOrder = NoPlan()
        self._sessions: dict[int, Holdings] = {}
        self._shards: dict[int, Shard] = {}
        self._files: dict[int, ExtentAllocator] = {}
        self._shard_numbers = itertools.count(1)
        self._lease_numbers = itertools.count(1)
        self._transfer_numbers = itertools.count(1)

    def set_order(self, order: UseOrder) -> None:
        """Lend the access plans; before the first session opens."""
        self._order = order

    # ---- sessions and registration (control) ---------------------------------------------------------------------

    def open_session(
        self,
        session: int,
        job: str,
        rank: int,
        region: int,
        region_bytes: int,
        tile_bytes: int,
        swap_bytes: int,
        files: Sequence[SwapTarget],
        weight: float = 1.0,
    ) -> None:
        """Take a session's terms. Raises OffloadError BAD_REQUEST when they contradict themselves."""
        terms = SessionTerms(job, rank, region, region_bytes, tile_bytes, swap_bytes, tuple(files), weight)
        terms.check()
        who = f"job {job} rank {rank}: open"
        if session in self._sessions:
            raise OffloadError(Code.BAD_REQUEST, f"{who}: session {session} is already open")
        if any(held.terms.region == region for held in self._sessions.values()):
            raise OffloadError(Code.BAD_REQUEST, f"{who}: region {region} belongs to another session")
        tiles = min(region_bytes // 4, WATERMARK_BYTES)
        arena = Arena(session, region_bytes, max(tile_bytes, tiles), self._order, tile_bytes)
        self._sessions[session] = Holdings(session, terms, arena)
        for target in files:
            self._files.setdefault(target.file, ExtentAllocator())

    def close_session(self, session: int) -> Generator[None, None, None]:
        """Give back everything the session held, in slices; it is closed from the first one on. Nothing of it may be in
        flight. Unknown sessions are ignored."""
        held = self._sessions.pop(session, None)
        if held is None:
            return
        for shard in held.shards:
            del self._shards[shard.id]
        self.catalog.forget(held.terms.job, held.terms.rank)
        yield from held.give_back(self._files)
        used = {file for other in self._sessions.values() for file in other.placement_files}
        for file in held.placement_files:
            # One that is closing in slices is no longer among the open ones, and still has extents to give back.
            if file not in used and file in self._files and not self._files[file].live_bytes:
                del self._files[file]

    def prepare_registration(self, session: int, specs: Sequence[ShardSpec]) -> Generator[None, None, Registration]:
        """Allocate, all or none, in slices; the caller makes the files as long as `grow` says, tells the
        catalog, then commits or aborts."""
        held = self._held(session)
        first = next(self._shard_numbers)
        self._shard_numbers = itertools.count(first + max(1, len(specs)))
        return held.prepare(specs, first, self._files)

    def record_registration(self, registration: Registration) -> Future[None]:
        """Tell the catalog of the shards, before they exist; the future says when it has them."""
        held = self._held(registration.session)
        return self.catalog.register(held.terms.job, held.terms.rank, map(held.new_row, registration.prepared))

    def commit_registration(self, registration: Registration) -> None:
        """The shards exist from now on."""
        self._held(registration.session).commit(registration, self._files)
        for shard in registration.prepared:
            self._shards[shard.id] = shard

    def abort_registration(self, registration: Registration) -> Generator[None, None, None]:
        """Give back what prepare took, in slices. Harmless when the session has ended meanwhile."""
        held = self._sessions.get(registration.session)
        if held is not None:
            yield from held.abort(registration, self._files)

    def resolve(self, session: int, local_shard: int, tile: int) -> TileKey | None:
        """A client's numbers (order of registration, tile index) as a key, or None when out of bounds."""
        held = self._sessions.get(session)
        if held is None or local_shard < 0:
            return None
        try:
            shard = held.shards[local_shard]
        except IndexError:  # also when the session ends under a plan that is made in a thread
            return None
        return shard.tiles[tile].key if 0 <= tile < len(shard.tiles) else None

    def terms(self, session: int) -> SessionTerms:
        """What the session was granted. OffloadError NO_SESSION if there is none."""
        return self._held(session).terms

    def holdings(self, session: int) -> Holdings:
        """The session's record, for status and flushes. OffloadError NO_SESSION if there is none."""
        return self._held(session)

    def sessions(self) -> list[int]:
        """Numbers of the open sessions."""
        return list(self._sessions)

    # ---- data path (pump) ----------------------------------------------------------------------------------------

    def tile(self, session: int, key: TileKey) -> Tile | None:
        """The session's tile of that key, or None."""
        shard = self._shards.get(key[0])
        if shard is None or shard.session != session or not 0 <= key[1] < len(shard.tiles):
            return None
        return shard.tiles[key[1]]

    def fetch(self, tile: Tile, mode: Mode) -> tuple[Verdict, int]:
        """Try to lend a tile. The number is the lease when GRANTED, the code when REFUSED, else 0."""
        if tile.checking:
            return Verdict.PARK_CHECKING, 0
        if tile.writer or (tile.readers and mode is not Mode.READ):
            return Verdict.REFUSED, Code.LEASE_CONFLICT
        state = tile.residency
        if state is Residency.LOADING:
            return Verdict.PARK_LOADING, 0
        if mode is not Mode.READ and (state is Residency.SPILLING or tile.flushing):
            return Verdict.PARK_SPILLING, 0
        if mode is Mode.OVERWRITE:
            return (Verdict.GRANTED, self._lend(tile, mode)) if tile.has_room else (Verdict.SLOT, 0)
        if state is Residency.RESIDENT or state is Residency.SPILLING:
            return Verdict.GRANTED, self._lend(tile, mode)
        if state is Residency.COLD:
            return Verdict.LOAD, 0
        return Verdict.REFUSED, Code.CORRUPT if state is Residency.LOST else Code.NOT_STORED

    def end(self, session: int, number: int, stored: bool) -> tuple[Code, Tile | None]:
        """End a lease. After `stored` the tile is dirty (see `begin_checksum`)."""
        held = self._sessions[session]
        lease = held.leases.get(number)
        if lease is None or (stored and lease.mode is Mode.READ):
            return Code.BAD_LEASE, None
        del held.leases[number]
        tile = lease.tile
        if lease.mode is Mode.READ:
            tile.readers -= 1
        else:
            tile.writer = 0
        if stored:
            tile.blank = False
            tile.residency = Residency.RESIDENT
            tile.dirty = tile.on_disk
            tile.checksums = b""
        elif tile.blank:
            self._forget(tile, held)
        held.arena.refresh(tile)
        return Code.OK, tile

    def drop(self, tile: Tile) -> Verdict:
        """Forget a tile's bytes unless it is leased or in flight."""
        if tile.checking:
            return Verdict.PARK_CHECKING
        if tile.residency is Residency.LOADING:
            return Verdict.PARK_LOADING
        if tile.leased:
            return Verdict.REFUSED
        if tile.residency is Residency.SPILLING or tile.flushing:
            return Verdict.PARK_SPILLING
        held = self._sessions[tile.session]
        if tile.disk_checksums is not None:
            held.changed.add(tile.key.shard)
        tile.disk_checksums = None
        self._forget(tile, held)
        return Verdict.GRANTED

    def reserve(self, tile: Tile, demand: bool, now_ns: int, evict: bool = True) -> Reservation:
        """Give a COLD, ABSENT or LOST tile a slot, evicting what the order allows (if `evict`)."""
        if tile.has_room:
            return Reservation(Room.TAKEN)
        return self._sessions[tile.session].arena.reserve(tile, demand, now_ns, evict)

    def write_back_candidate(self, session: int, now_ns: int) -> Tile | None:
        """The dirty tile to spill next ahead of need; None when the store is clean enough, or pauses after an error."""
        arena = self._sessions[session].arena
        return None if now_ns < arena.spill_retry_at_ns else arena.write_back_candidate()

    def begin_load(self, tile: Tile, klass: TrafficClass, checksums: bool) -> Transfer:
        """The tile has its slot: read into it."""
        tile.residency = Residency.LOADING
        return self._transfer(tile, Direction.READ, klass, tile.extent, checksums and bool(tile.checksums))

    def settle_load(self, tile: Tile, outcome: Outcome) -> Settled:
        """RESIDENT, or COLD again after a device error, or LOST when the checksums differ."""
        arena = self._sessions[tile.session].arena
        settled = classify(outcome, tile.padded)
        if settled.code is not Code.OK:
            arena.release_slot(tile)
            tile.residency = Residency.COLD
            return settled
        if outcome.checksums and tile.checksums:
            granule = first_difference(tile.checksums, outcome.checksums)
            if granule >= 0:
                arena.release_slot(tile)
                tile.residency = Residency.LOST
                tile.lost_granule = granule
                return Settled(Code.CORRUPT, 0, granule)
        tile.residency = Residency.RESIDENT
        arena.refresh(tile)
        return settled

    def begin_spill(self, tile: Tile, klass: TrafficClass) -> Transfer:
        """Write a dirty tile that nobody is writing to. Its extent holds nothing whole until this settles."""
        held = self._sessions[tile.session]
        tile.residency = Residency.SPILLING
        tile.spill_queued = False
        tile.disk_checksums = None
        held.arena.spilling_bytes += tile.padded
        held.arena.victims.discard(tile)
        held.changed.add(tile.key.shard)
        return self._transfer(tile, Direction.WRITE, klass, tile.extent, False)

    def settle_spill(self, tile: Tile, outcome: Outcome, now_ns: int) -> Settled:
        """Clean; or still dirty, the error remembered for the next flush, and spilling paused."""
        held = self._sessions[tile.session]
        settled = classify(outcome, tile.padded)
        held.arena.spilling_bytes -= tile.padded
        tile.residency = Residency.RESIDENT
        if settled.code is Code.OK:
            tile.dirty = False
            tile.disk_checksums = tile.checksums
            if tile.extent is not None:
                held.writes[tile.extent.file] = held.writes.get(tile.extent.file, 0) + 1
            held.arena.spill_succeeded()
        else:
            if held.spill_error is None:
                held.spill_error = (settled.code, settled.errno, tile.path)
            held.arena.spill_failed(now_ns)
        held.arena.refresh(tile)
        return settled

    def begin_checksum(self, tile: Tile) -> Transfer:
        """Checksum what was just stored; nobody gets the tile meanwhile."""
        tile.checking = True
        self._sessions[tile.session].arena.victims.discard(tile)
        return self._transfer(tile, Direction.CHECKSUM, TrafficClass.DEMAND, None, True)

    def settle_checksum(self, tile: Tile, outcome: Outcome) -> Settled:
        """Keep the checksums. On failure the bytes are whole but unguarded."""
        tile.checking = False
        settled = SETTLED_OK if outcome.result >= 0 else classify(outcome, tile.padded)
        tile.checksums = outcome.checksums if settled.code is Code.OK else b""
        self._sessions[tile.session].arena.refresh(tile)
        return settled

    def begin_sync(self, session: int, file: int) -> Transfer:
        """fdatasync one file."""
        span = Span(self._sessions[session].terms.region, 0, 0)
        number = next(self._transfer_numbers)
        nothing = TileKey(0, 0)
        extent = Extent(file, 0, 0)
        return Transfer(number, Direction.SYNC, TrafficClass.DEMAND, session, nothing, span, extent, 0, False)

    # ---- flushes (pump) ------------------------------------------------------------------------------------------

    def flush_set(self, session: int) -> list[Tile] | None:
        """Every tile stored and not on disk, marked so that it stays as it is; None when one of them is leased for
        writing, so that what was stored before can no longer be told from what is being written."""
        held = self._sessions[session]
        found = [t for t in held.arena.owners.values() if t.dirty]
        if [t for t in found if t.writer]:
            return None
        for tile in found:
            tile.flushing += 1
        held.arena.victims.discard_dirty(found)
        return found

    def flushed(self, tile: Tile) -> None:
        """One flush no longer waits for the tile."""
        tile.flushing -= 1
        if not tile.flushing:
            self._sessions[tile.session].arena.refresh(tile)

    def commit_flush(self, session: int) -> tuple[Future[None], set[int]] | None:
        """Tell the catalog of the shards that changed; None when none did. See `commit_failed`."""
        held = self._sessions[session]
        if not held.changed:
            return None
        changed, held.changed = held.changed, set()
        rows = map(held.row, [self._shards[number] for number in changed])
        return self.catalog.flush(held.terms.job, held.terms.rank, rows), changed

    def commit_failed(self, session: int, shards: set[int]) -> None:
        """The catalog could not: those shards still have to be told of."""
        self._sessions[session].changed |= shards

    # ---- observation ---------------------------------------------------------------------------------------------

    def regions(self) -> dict[int, RegionSnapshot]:
        """Bytes by state per session."""
        return {n: h.arena.snapshot(h.swap_used, h.terms.swap_bytes) for n, h in self._sessions.items()}

    # ---- inside --------------------------------------------------------------------------------------------------

    def _lend(self, tile: Tile, mode: Mode) -> int:
        number = next(self._lease_numbers)
        held = self._sessions[tile.session]
        held.leases[number] = Lease(tile, mode)
        held.arena.victims.discard(tile)
        if mode is Mode.READ:
            tile.readers += 1
            return number
        tile.writer = number
        if mode is Mode.OVERWRITE:
            tile.residency = Residency.RESIDENT
            tile.blank = True
            tile.dirty = False
        return number

    def _forget(self, tile: Tile, held: Holdings) -> None:
        held.arena.release_slot(tile)
        tile.residency = Residency.ABSENT
        tile.blank = tile.dirty = False
        tile.checksums = b""

    def _transfer(
        self, tile: Tile, direction: Direction, klass: TrafficClass, extent: Extent | None, checksum: bool
    ) -> Transfer:
        return Transfer(
            next(self._transfer_numbers),
            direction,
            klass,
            tile.session,
            tile.key,
            Span(self._sessions[tile.session].terms.region, tile.offset, tile.padded),
            extent,
            tile.length,
            checksum,
        )

    def _held(self, session: int) -> Holdings:
        held = self._sessions.get(session)
        if held is None:
            raise OffloadError(Code.NO_SESSION, f"session {session} is not open; open it first")
        return held
