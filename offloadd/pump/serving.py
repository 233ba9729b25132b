"""Starts transfers: takes what the scheduler picks, asks the store for memory, and prepares what it says.

Used by the conductor, once per step. Bounded by attempts and by what the engine takes. What finds no memory blocks its
session until something comes free; it never waits.
"""

from __future__ import annotations

from offloadd.core.records import Residency, TileKey, TrafficClass
from offloadd.core.stats import Cause, Stats
from offloadd.pump.desk import Desk
from offloadd.pump.flights import Flight, Flights
from offloadd.scheduler.queues import NO_PATH, SessionQueue, Want
from offloadd.scheduler.scheduler import Scheduler
from offloadd.store.arena import Reservation, Room
from offloadd.store.residency import Tile
from offloadd.store.store import Store, Verdict

PICK_LIMIT = 256
"""Attempts to start something per step."""


class Serving:
    """Pick, prepare, submit."""

    def __init__(
        self, store: Store, scheduler: Scheduler, flights: Flights, desk: Desk, stats: Stats, checksums: bool
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._flights = flights
        self._desk = desk
        self._stats = stats
        self._checksums = checksums

    def serve(self, now_ns: int) -> bool:
        """Start what may start. True: there is more, and the engine would take it."""
        more = True
        for _ in range(PICK_LIMIT):
            # With the engine full its next completion brings us back.
            pick = self._scheduler.pick() if self._flights.room() > 0 else None
            if pick is None:
                more = False
                break
            if pick.want is not None:
                if pick.want.spill:
                    self._spill_wanted(pick.queue, pick.want, now_ns)
                else:
                    self._load_wanted(pick.queue, pick.want, now_ns)
            elif pick.key is not None:
                self._prefetch(pick.queue, pick.key, now_ns)
            else:
                self._write_back(pick.queue, now_ns)
        self._flights.submit()
        return more

    def want_spill(self, tile: Tile, now_ns: int) -> None:
        """Somebody waits for this tile's spill: it is demand."""
        queue = self._scheduler.queue(tile.session)
        if queue is not None and not tile.spill_queued and tile.spillable:
            tile.spill_queued = True
            queue.push(Want(tile.key, tile.path, tile.padded, True, now_ns))

    def _load_wanted(self, queue: SessionQueue, want: Want, now_ns: int) -> None:
        tile = self._store.tile(queue.session, want.key)
        if tile is None:
            return
        verdict = self._desk.answer(queue, tile, now_ns)
        if verdict is not Verdict.LOAD and verdict is not Verdict.SLOT:
            return
        if verdict is Verdict.LOAD and want.path == NO_PATH:
            # An OVERWRITE queued it and is gone; those behind need the device.
            queue.push(Want(tile.key, tile.path, tile.padded, False, now_ns))
            return
        room = self._store.reserve(tile, True, now_ns)
        self._note_room(queue, tile, room)
        if room.room > Room.TAKEN_BY_EVICTION:
            for spill in room.spills:
                self.want_spill(spill, now_ns)
            cause = Cause.SLOTS_EXHAUSTED if room.room is Room.WAIT else Cause.WRITEBACK
            self._scheduler.block(queue, want, cause, now_ns)
            return
        queue.blocked_since_ns = 0
        if verdict is Verdict.LOAD:
            self._load(queue, tile, TrafficClass.DEMAND, now_ns - want.since_ns)
        else:
            self._desk.drive(queue, tile, now_ns)

    def _load(self, queue: SessionQueue, tile: Tile, klass: TrafficClass, waited_ns: int) -> None:
        transfer = self._store.begin_load(tile, klass, self._checksums)
        self._flights.add_charged(Flight(transfer, tile.path, tile), queue, waited_ns)

    def _spill(self, queue: SessionQueue, tile: Tile, klass: TrafficClass, waited_ns: int) -> None:
        transfer = self._store.begin_spill(tile, klass)
        self._flights.add_charged(Flight(transfer, tile.path, tile), queue, waited_ns)

    def _spill_wanted(self, queue: SessionQueue, want: Want, now_ns: int) -> None:
        tile = self._store.tile(queue.session, want.key)
        if tile is None:
            return
        tile.spill_queued = False
        if tile.spillable and (tile.evictable or tile.flushing):
            self._spill(queue, tile, TrafficClass.DEMAND, now_ns - want.since_ns)
        else:
            # It was leased, dropped or written meanwhile: whoever waited for its memory must choose anew.
            queue.wake()

    def _prefetch(self, queue: SessionQueue, key: TileKey, now_ns: int) -> None:
        plan = queue.plan
        tile = self._store.tile(queue.session, key)
        wanted = tile is not None and tile.residency is Residency.COLD and key not in queue.parked
        if tile is None or not wanted or not plan.needs_bytes(plan.ahead):
            plan.ahead += 1
            return
        if not self._scheduler.windows.has_room(tile.path, tile.padded):
            queue.prefetch_needs = (tile.path, tile.padded)
            return
        queue.prefetch_needs = None
        # Room that has to be made costs a later load of what makes it: worth it only as far ahead as hides the device.
        near = queue.guessed_bytes < self._store.holdings(queue.session).arena.prefetch_bytes
        room = self._store.reserve(tile, False, now_ns, evict=near)
        self._note_room(queue, tile, room)
        if room.room > Room.TAKEN_BY_EVICTION:
            queue.prefetch_stopped = True
            return
        plan.ahead += 1
        tile.prefetched = True
        queue.guessed_bytes += tile.padded
        self._stats.session(queue.session).prefetch_issued += 1
        self._load(queue, tile, TrafficClass.PREFETCH, 0)

    def _write_back(self, queue: SessionQueue, now_ns: int) -> None:
        tile = self._store.write_back_candidate(queue.session, now_ns)
        if tile is None:
            queue.write_back_stopped = True
            return
        if not self._scheduler.windows.has_room(tile.path, tile.padded):
            queue.write_back_needs = (tile.path, tile.padded)
            return
        queue.write_back_needs = None
        self._spill(queue, tile, TrafficClass.WRITE_BACK, 0)

    def _note_room(self, queue: SessionQueue, tile: Tile, room: Reservation) -> None:
        """Book evictions; let write-back run ahead as long as memory is short."""
        arena = self._store.holdings(queue.session).arena
        if room.room is Room.TAKEN_BY_EVICTION or room.room is Room.SPILL_FIRST:
            queue.allow_write_back(tile.padded, arena.watermark)
        for evicted, reason in arena.take_evicted():
            self._stats.evictions[reason] += 1
            if self._desk.end_guess(queue, evicted):
                self._stats.session(queue.session).prefetch_wasted += 1
            self._scheduler.note_evicted(queue.session, evicted.key)
