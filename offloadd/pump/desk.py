"""Answers requests about tiles: grants, refuses, or parks them until what they wait for has happened.

Used by the conductor. First come, first served, per tile: whoever finds others waiting queues behind them.
"""

from __future__ import annotations

from collections import deque

from offloadd.core.errors import Code
from offloadd.core.records import Mode, Op, Request, Residency
from offloadd.core.stats import Cause, Stats
from offloadd.pump.flights import Flight, Flights
from offloadd.pump.replies import Replies
from offloadd.scheduler.queues import NO_PATH, SessionQueue, Waiter, Want
from offloadd.scheduler.scheduler import Scheduler
from offloadd.store.outcomes import Settled
from offloadd.store.residency import Tile
from offloadd.store.store import Store, Verdict

_CAUSE = {
    Verdict.PARK_LOADING: Cause.DEVICE_BUSY,
    Verdict.PARK_SPILLING: Cause.WRITEBACK,
    Verdict.PARK_CHECKING: Cause.CHECKSUM,
    Verdict.LOAD: Cause.NOT_PREFETCHED,
    Verdict.SLOT: Cause.SLOTS_EXHAUSTED,
}


class Desk:
    """The counter at which requests are answered."""

    def __init__(
        self, store: Store, scheduler: Scheduler, flights: Flights, replies: Replies, stats: Stats, checksums: bool
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._flights = flights
        self._replies = replies
        self._stats = stats
        self._checksums = checksums

    def on_tile(self, queue: SessionQueue, request: Request, now_ns: int) -> None:
        """FETCH or DROP."""
        tile = self._store.tile(request.session, request.tile)
        if tile is None:
            self._replies.plain(request, Code.UNKNOWN_SHARD, now_ns)
            return
        if request.op is Op.FETCH:
            self._note_fetch(queue, request, tile, now_ns)
        waiters = queue.parked.get(tile.key)
        if waiters:
            self._scheduler.park(request, waiters[0].cause, now_ns)
            return
        verdict = self._try(queue, request, tile, now_ns, None)
        if verdict is not None:
            self._scheduler.park(request, _CAUSE[verdict], now_ns)
            self._want(queue, tile, verdict, now_ns)

    def end_lease(self, queue: SessionQueue, request: Request, now_ns: int) -> None:
        """STORE or RELEASE."""
        stored = request.op is Op.STORE
        code, tile = self._store.end(request.session, request.lease, stored)
        if tile is None:
            self._replies.plain(request, code, now_ns)
            return
        if stored:
            stats = self._stats.session(request.session)
            stats.stores += 1
            stats.bytes_stored += tile.length
        if stored and self._checksums and tile.on_disk:
            self._flights.add(Flight(self._store.begin_checksum(tile), NO_PATH, tile, request))
        else:
            self._replies.plain(request, code, now_ns)
        queue.progress()

    def drive(self, queue: SessionQueue, tile: Tile, now_ns: int) -> None:
        """The tile changed: answer those who wait for it, as far as that goes, and ask for what the rest needs."""
        verdict = self.answer(queue, tile, now_ns)
        if verdict is not None:
            self._want(queue, tile, verdict, now_ns)

    def answer(self, queue: SessionQueue, tile: Tile, now_ns: int) -> Verdict | None:
        """Answer in order; what the first one waits for who cannot be answered, or None."""
        waiters = queue.parked.get(tile.key)
        while waiters:
            verdict = self._try(queue, waiters[0].request, tile, now_ns, waiters[0])
            if verdict is not None:
                for waiter in waiters:
                    waiter.turn(_CAUSE[verdict], now_ns)
                return verdict
            waiters.popleft()
        queue.parked.pop(tile.key, None)
        return None

    def fail(self, queue: SessionQueue, tile: Tile, settled: Settled, now_ns: int, path: int | None = None) -> None:
        """A load failed, or there is no slot to be had: answer the fetches that needed it. An OVERWRITE needs no
        load, so it stays. `path`: the one at fault, if it is not the tile's own."""
        self.end_guess(queue, tile)
        no_slot = settled.code is Code.SLOTS_EXHAUSTED
        leased = self._store.holdings(queue.session).leased_bytes if no_slot else 0
        kept: deque[Waiter] = deque()
        for waiter in queue.parked.pop(tile.key, ()):
            request = waiter.request
            if request.op is Op.FETCH and (no_slot or request.mode is not Mode.OVERWRITE):
                self._replies.refused(request, settled, tile.path if path is None else path, leased, now_ns, waiter)
            else:
                kept.append(waiter)
        if kept:
            queue.parked[tile.key] = kept

    def _note_fetch(self, queue: SessionQueue, request: Request, tile: Tile, now_ns: int) -> None:
        stats = self._stats.session(request.session)
        before = queue.plan.cycles
        if not queue.plan.advance(tile.key):
            stats.mispredictions += 1
        if queue.plan.cycles != before:
            stats.turn(queue.plan.cycles, queue.plan.steps, now_ns)
        # The cursor moved, so the prefetcher may have room to go on.
        queue.prefetch_stopped = False
        guessed = self.end_guess(queue, tile)
        if request.mode is Mode.OVERWRITE:
            return
        stats.prefetch_useful += guessed
        if tile.residency is Residency.LOADING or tile.checking:
            stats.late += 1
        elif tile.residency is Residency.COLD:
            stats.misses += 1
        else:
            stats.hits += 1

    @staticmethod
    def end_guess(queue: SessionQueue, tile: Tile) -> bool:
        """Whether the tile was prefetched and not fetched since; from now on it is like any other."""
        if not tile.prefetched:
            return False
        tile.prefetched = False
        queue.guessed_bytes -= tile.padded
        return True

    def _try(
        self, queue: SessionQueue, request: Request, tile: Tile, now_ns: int, waiter: Waiter | None
    ) -> Verdict | None:
        """Answer a FETCH or DROP if it can be answered now; else what it waits for."""
        if request.op is Op.DROP:
            return self._try_drop(queue, request, tile, now_ns)
        verdict, number = self._store.fetch(tile, request.mode)
        if verdict is Verdict.GRANTED:
            self._stats.session(request.session).bytes_fetched += tile.length
            self._replies.granted(request, tile, number, now_ns, waiter)
            return None
        if verdict is Verdict.REFUSED:
            lost = number == Code.CORRUPT
            settled = Settled(Code(number), 0, tile.lost_granule if lost else 0)
            self._replies.refused(request, settled, tile.path if lost else 0, 0, now_ns, waiter)
            return None
        return verdict

    def _try_drop(self, queue: SessionQueue, request: Request, tile: Tile, now_ns: int) -> Verdict | None:
        verdict = self._store.drop(tile)
        if verdict is Verdict.REFUSED:
            self._replies.plain(request, Code.LEASE_CONFLICT, now_ns)
            return None
        if verdict is Verdict.GRANTED:
            self._stats.evictions["drop"] += 1
            self.end_guess(queue, tile)
            self._replies.plain(request, Code.OK, now_ns)
            queue.progress()
            return None
        return verdict

    def _want(self, queue: SessionQueue, tile: Tile, verdict: Verdict, now_ns: int) -> None:
        if verdict is Verdict.LOAD:
            queue.push(Want(tile.key, tile.path, tile.padded, False, now_ns))
        elif verdict is Verdict.SLOT:
            queue.push(Want(tile.key, NO_PATH, 0, False, now_ns))
