"""Whose slot goes next: Belady's MIN over the access plan, and windows against fragmentation.

Used by the store's arena only. Orders candidates; it frees nothing and knows no I/O. Belady 1966: evicting what is
used furthest in the future minimises misses, and here the future is known. Tiles outside the plan count as furthest,
least recently used first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Protocol

from offloadd.store.residency import Tile

NO_USE = 1 << 62
"""Position of a tile that the plan never mentions."""


class UseOrder(Protocol):
    """What eviction asks of the access plans. The pump lends the scheduler for it."""

    def next_use(self, session: int, tile: tuple[int, int]) -> int:
        """Absolute plan position of the tile's next use, NO_USE when there is none."""

    def generation(self, session: int) -> int:
        """Changes when the session's plan is replaced, which makes remembered positions worthless."""


class NoPlan:
    """Before any scheduler is lent: least recently used."""

    def next_use(self, session: int, tile: tuple[int, int]) -> int:
        return NO_USE

    def generation(self, session: int) -> int:
        return 0


class VictimHeap:
    """Candidates of one region, furthest next use on top. Lazy: leaving costs one store, entries die when popped."""

    def __init__(self, session: int, order: UseOrder) -> None:
        self._session = session
        self._order = order
        self._heap: list[tuple[int, int, Tile]] = []
        self._stamp = 0
        self._live = 0
        self._generation = order.generation(session)
        self.clean_bytes = 0
        self.dirty_bytes = 0
        """Of the candidates, which do not change from one to the other while they are any."""

    def add(self, tile: Tile) -> None:
        """The tile became a candidate."""
        if not tile.stamp:
            self._count(tile, 1)
        self._stamp += 1
        tile.stamp = self._stamp
        heappush(self._heap, (-self._order.next_use(self._session, tile.key), self._stamp, tile))
        if len(self._heap) > 64 + 4 * self._live:
            self._rebuild()

    def discard(self, tile: Tile) -> None:
        """The tile is none any more."""
        if tile.stamp:
            tile.stamp = 0
            self._count(tile, -1)

    def discard_dirty(self, tiles: Iterable[Tile]) -> None:
        """The same for all dirty candidates at once; they are among `tiles`, which may be very many."""
        for tile in tiles:
            if tile.stamp:
                tile.stamp = 0
                self._live -= 1
        self.dirty_bytes = 0

    def pop(self) -> tuple[Tile, int] | None:
        """The furthest candidate and its next use; it leaves the heap. `put_back` returns it."""
        if self._generation != self._order.generation(self._session):
            self._generation = self._order.generation(self._session)
            self._rebuild()
        while self._heap:
            negative, stamp, tile = heappop(self._heap)
            if tile.stamp != stamp:
                continue
            use = self._order.next_use(self._session, tile.key)
            if use < -negative:
                # The plan has it sooner than when it was pushed: put it where it belongs and look again.
                heappush(self._heap, (-use, stamp, tile))
                continue
            return tile, use
        return None

    def put_back(self, tile: Tile, use: int) -> None:
        """Undo `pop`, keeping the tile's age."""
        heappush(self._heap, (-use, tile.stamp, tile))

    def clear(self, slice_tiles: int) -> Generator[None, None, None]:
        """Forget all of them, some at a time; the heap is not used again."""
        while self._heap:
            del self._heap[-slice_tiles:]
            yield

    def __len__(self) -> int:
        return self._live

    def _count(self, tile: Tile, sign: int) -> None:
        self._live += sign
        if tile.dirty:
            self.dirty_bytes += sign * tile.padded
        else:
            self.clean_bytes += sign * tile.padded

    def _rebuild(self) -> None:
        alive = [entry for entry in self._heap if entry[2].stamp == entry[1]]
        self._heap = [(-self._order.next_use(self._session, t.key), stamp, t) for _, stamp, t in alive]
        heapify(self._heap)


def cheapest_window(
    runs: Iterable[tuple[int, int]],
    owners: Mapping[int, Tile],
    need: int,
    wall: int,
    cost: Callable[[Tile], float | None],
) -> list[Tile] | None:
    """Tiles to evict so that `need` contiguous bytes come free, at the least total cost; None if nothing can.

    `runs` are the free runs, `owners` the tile at each slot's offset. A cost of None is a barrier. Linear in the number
    of slots: called only when no single victim helps.
    """
    pieces: list[tuple[int, int, Tile | None]] = [(start, length, None) for start, length in runs]
    pieces += [(start, tile.padded, tile) for start, tile in owners.items()]
    pieces.sort(key=lambda piece: piece[0])
    best: list[Tile] | None = None
    best_cost = (float("inf"), 0)
    window: list[tuple[int, float, Tile | None]] = []
    length, total, left = 0, 0.0, 0
    for start, size, tile in pieces:
        price = 0.0 if tile is None else cost(tile)
        if (wall and start % wall == 0) or price is None:
            window, length, total, left = [], 0, 0.0, 0
        if price is None:
            continue
        window.append((size, price, tile))
        length, total = length + size, total + price
        while length - window[left][0] >= need:
            length, total, left = length - window[left][0], total - window[left][1], left + 1
        rank = (round(total, 9), length)
        if length >= need and rank < best_cost:
            best_cost = rank
            best = [t for _, _, t in window[left:] if t is not None]
    return best
