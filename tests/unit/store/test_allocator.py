"""Slots and extents: no overlap, coalescing, chunk walls, and the rule against fragmentation."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from offloadd.core.units import PAGE_BYTES
from offloadd.store.allocator import ExtentAllocator, Runs, SlotAllocator
from offloadd.store.catalog import Catalog
from offloadd.store.placement import SwapTarget
from offloadd.store.store import Store
from tests.pump_world import World, to_the_end

PAGE = PAGE_BYTES

Script = list[tuple[bool, int]]
scripts: st.SearchStrategy[Script] = st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=80)


@given(scripts, st.sampled_from([4, 8, 64]))
def test_slots_never_overlap_or_cross_a_chunk(script: Script, chunk_pages: int) -> None:
    chunk = chunk_pages * PAGE
    slots = SlotAllocator(37 * PAGE, chunk)
    for take, number in script:
        if take:
            slots.take(min(chunk, (number + 1) * PAGE), high=number % 3 == 0)
        elif slots.taken:
            slots.give(sorted(slots.taken)[number % len(slots.taken)])
        end = 0
        for start, length in sorted(slots.taken.items()):
            assert start >= end
            assert start // chunk == (start + length - 1) // chunk
            end = start + length
        assert end <= 37 * PAGE
        assert sum(slots.taken.values()) + slots.free.free_bytes == 37 * PAGE


@given(scripts)
def test_freeing_everything_gives_one_run_per_chunk(script: Script) -> None:
    slots = SlotAllocator(20 * PAGE, 8 * PAGE)
    for take, number in script:
        if take:
            slots.take(min(8, number + 1) * PAGE)
        elif slots.taken:
            slots.give(sorted(slots.taken)[number % len(slots.taken)])
    for start in list(slots.taken):
        slots.give(start)
    assert slots.free.runs() == [(0, 8 * PAGE), (8 * PAGE, 8 * PAGE), (16 * PAGE, 4 * PAGE)]


def test_best_fit_takes_the_smallest_run_that_does() -> None:
    runs = Runs()
    for start, length in ((0, 8), (100, 3), (200, 5)):
        runs.give(start, length)
    assert runs.take(3) == 100
    assert runs.take(4) == 200


def test_what_never_moves_goes_to_the_far_end() -> None:
    slots = SlotAllocator(10 * PAGE)
    assert slots.take(2 * PAGE, high=True) == 8 * PAGE
    assert slots.take(2 * PAGE) == 0


def test_freed_extents_are_used_before_the_file_grows() -> None:
    file = ExtentAllocator()
    first, second = file.take(3 * PAGE), file.take(PAGE)
    file.give(first, 3 * PAGE)
    assert file.take(2 * PAGE) == first
    assert file.end == second + PAGE
    assert file.live_bytes == 3 * PAGE


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.data())
def test_with_k_tiles_pinned_a_region_of_2k_plus_1_tiles_always_serves_one_more(k: int, data: st.DataObject) -> None:
    """The theorem of allocator.py, played through the pump: wherever the pinned ones lie, one more fits."""
    tile = 4 * PAGE
    world = World(latency_ns=(1, 1))
    rank = world.open(region_bytes=(2 * k + 1) * tile, tile_bytes=tile)
    lengths = data.draw(st.lists(st.integers(1, tile), min_size=3 * k + 4, max_size=3 * k + 4))
    tiles = [key for shard in world.register(1, *lengths, tile) for key in shard]
    for key, length in zip(tiles, [*lengths, tile], strict=True):
        rank.put(key, bytes(length))
    pinned = data.draw(st.permutations(tiles[:-1]))[:k]
    between = data.draw(st.lists(st.sampled_from(tiles[:-1]), max_size=10))
    for key in pinned:
        for other in between:
            rank.get(other)
        assert rank.fetch(key).code == 0
    assert rank.fetch(tiles[-1]).code == 0
    world.close()


def test_shards_beyond_4_gib_are_only_numbers() -> None:
    from offloadd.core.records import ShardSpec

    catalog = Catalog(":memory:")
    store = Store(catalog)
    store.open_session(1, "j", 0, 1, 64 << 20, 16 << 20, 1 << 40, [SwapTarget(1, 0, 2.0), SwapTarget(2, 1, 1.0)])
    registration = to_the_end(store.prepare_registration(1, [ShardSpec("big", "float32", (6 << 30) + 4, "master")]))
    assert sum(tile.length for tile in registration.prepared[0].tiles) == (6 << 30) + 4
    assert registration.grow[1] + registration.grow[2] == (6 << 30) + PAGE
    assert 1.9 < registration.grow[1] / registration.grow[2] < 2.1
    catalog.close()
