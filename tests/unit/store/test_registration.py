"""Registration is all or none, and says how much was missing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import ShardSpec, TileKey
from offloadd.store import Catalog, Store, SwapTarget
from offloadd.store.catalog import unpack_extents
from offloadd.store.holdings import SLICE_TILES
from tests.pump_world import World, to_the_end

PAGE = 4096


@pytest.fixture
def store() -> Iterator[Store]:
    catalog = Catalog(":memory:")
    store = Store(catalog)
    store.open_session(1, "job", 0, 1, 8 * PAGE, 2 * PAGE, 10 * PAGE, [SwapTarget(5, 0, 1.0)])
    yield store
    catalog.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def spec(name: str, length: int, on_disk: bool = True) -> ShardSpec:
    return ShardSpec(name, "float32", length, "master", on_disk)


def refusal(store: Store, *specs: ShardSpec) -> OffloadError:
    with pytest.raises(OffloadError) as caught:
        to_the_end(store.prepare_registration(1, specs))
    return caught.value


def test_tiles_cover_the_shard_and_only_the_last_is_shorter(store: Store) -> None:
    registration = to_the_end(store.prepare_registration(1, [spec("a", 5 * PAGE + 1)]))
    assert [tile.length for tile in registration.prepared[0].tiles] == [2 * PAGE, 2 * PAGE, PAGE + 1]
    assert registration.grow == {5: 6 * PAGE}


def test_an_empty_shard_is_one_empty_tile_without_swap(store: Store) -> None:
    registration = to_the_end(store.prepare_registration(1, [spec("a", 0)]))
    assert [tile.length for tile in registration.prepared[0].tiles] == [0]
    assert registration.grow == {}


def test_swap_that_is_missing_is_named_in_bytes(store: Store) -> None:
    error = refusal(store, spec("a", 11 * PAGE))
    assert error.code is Code.NO_SWAP_BUDGET
    assert f"{11 * PAGE} and {10 * PAGE} bytes" in error.message


def test_memory_only_shards_must_leave_room_for_one_tile(store: Store) -> None:
    assert refusal(store, spec("a", 7 * PAGE, on_disk=False), spec("b", 2 * PAGE)).code is Code.NO_HOST_BUDGET


@pytest.mark.parametrize("specs", [[spec("a", 1), spec("a", 1)], [spec("a", -1)]])
def test_nonsense_is_refused(store: Store, specs: list[ShardSpec]) -> None:
    assert refusal(store, *specs).code is Code.BAD_REQUEST


def test_abort_gives_everything_back(store: Store) -> None:
    to_the_end(store.abort_registration(to_the_end(store.prepare_registration(1, [spec("a", 10 * PAGE)]))))
    assert to_the_end(store.prepare_registration(1, [spec("a", 10 * PAGE)])).grow == {5: 10 * PAGE}


def test_closing_between_prepare_and_commit_leaks_no_extent(store: Store) -> None:
    store.open_session(2, "other", 0, 2, 8 * PAGE, 2 * PAGE, 10 * PAGE, [SwapTarget(5, 0, 1.0)])
    to_the_end(store.prepare_registration(1, [spec("a", 10 * PAGE)]))
    to_the_end(store.close_session(1))
    assert to_the_end(store.prepare_registration(2, [spec("a", 10 * PAGE)])).grow == {5: 10 * PAGE}


def test_resolve_is_bounds_checked(store: Store) -> None:
    registration = to_the_end(store.prepare_registration(1, [spec("a", 4 * PAGE)]))
    assert store.resolve(1, 0, 0) is None
    store.commit_registration(registration)
    assert store.resolve(1, 0, 1) == TileKey(registration.shards[0], 1)
    for numbers in ((1, 0, 2), (1, 1, 0), (1, -1, 0), (1, 0, -1), (2, 0, 0)):
        assert store.resolve(*numbers) is None


def test_the_catalog_knows_registered_shards_and_forgets_closed_ones(store: Store) -> None:
    registration = to_the_end(store.prepare_registration(1, [spec("a", 3 * PAGE)]))
    store.record_registration(registration).result(10)
    store.commit_registration(registration)
    found = store.catalog.version("job", 0, "a").result(10)
    assert found is not None
    assert unpack_extents(found[0]) == [(5, 0, 0, 2 * PAGE, False), (5, 0, 2 * PAGE, PAGE, False)]
    to_the_end(store.close_session(1))
    assert store.catalog.version("job", 0, "a").result(10) is None


@pytest.mark.parametrize(("tile", "weight"), [(100, 1.0), (0, 1.0), (16 * PAGE, 1.0), (PAGE, 0.0)])
def test_terms_that_contradict_themselves_are_refused(store: Store, tile: int, weight: float) -> None:
    with pytest.raises(OffloadError) as caught:
        store.open_session(3, "x", 0, 3, 8 * PAGE, tile, 0, [], weight)
    assert caught.value.code is Code.BAD_REQUEST


def test_many_tiles_are_made_in_slices_and_others_register_meanwhile(world: World) -> None:
    world.open(1)
    world.open(2)
    work = world.store.prepare_registration(1, [spec("a", 3 * SLICE_TILES * PAGE)])
    turns = 0
    while True:
        try:
            next(work)
        except StopIteration as done:
            registration = done.value
            break
        turns += 1
        world.register(2, PAGE, prefix=f"other{turns}")
    assert turns >= 3
    assert len(registration.prepared[0].tiles) == 3 * SLICE_TILES
    assert not set(registration.shards) & {shard.id for shard in world.store.holdings(2).shards}


def test_a_session_that_ends_between_two_slices_leaves_no_extent(world: World) -> None:
    files = [SwapTarget(5, 0, 1.0)]
    world.open(1, files=files)
    world.open(2, files=files)
    work = world.store.prepare_registration(1, [spec("a", 2 * SLICE_TILES * PAGE)])
    for _ in range(4):
        next(work)
    assert world.store._files[5].live_bytes > 0
    to_the_end(world.store.close_session(1))
    with pytest.raises(OffloadError, match="ended while it registered"):
        to_the_end(work)
    assert world.store._files[5].live_bytes == 0


def test_a_name_given_twice_among_very_many_is_found_at_once(world: World) -> None:
    world.open(1)
    names = [f"n{i}" for i in range(50_000)]
    with pytest.raises(OffloadError, match="shard name 'n7' is already in use"):
        to_the_end(world.store.prepare_registration(1, [spec(name, PAGE) for name in [*names, "n7"]]))


def test_ranks_of_a_job_that_end_together_leave_no_extent_to_two_owners(world: World) -> None:
    files = [SwapTarget(5, 0, 1.0)]
    world.open(1, files=files)
    world.open(2, files=files)
    world.register(1, PAGE, prefix="one")
    world.register(2, 2 * SLICE_TILES * PAGE, prefix="two")
    slow = world.store.close_session(2)
    next(slow)
    to_the_end(world.store.close_session(1))
    world.open(3, files=files)
    to_the_end(slow)
    world.register(3, 2 * SLICE_TILES * PAGE, 2 * SLICE_TILES * PAGE, prefix="three")
    extents = sorted(tile.extent for shard in world.store.holdings(3).shards for tile in shard.tiles if tile.extent)
    assert all(first.offset + first.length <= second.offset for first, second in itertools.pairwise(extents))
