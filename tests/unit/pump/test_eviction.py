"""Under a cyclic plan the memory keeps what is used soonest; the device moves no more than it must."""

from __future__ import annotations

from offloadd.core.records import Direction, Mode, TileKey
from offloadd.core.stats import Cause
from tests.pump_world import PAGE, Rank, World


def start(world: World, tiles: int, slots: int, plan: bool = True) -> tuple[Rank, list[TileKey]]:
    rank = world.open(region_bytes=slots * PAGE)
    (keys,) = world.register(1, tiles * PAGE)
    for key in keys:
        rank.put(key, b"a" * PAGE)
    if plan:
        world.follow(1, keys)
    return rank, keys


def moved(world: World, direction: Direction) -> int:
    return sum(t.direction is direction for t in world.engine.log)


def cycle(rank: Rank, keys: list[TileKey], mode: Mode = Mode.READ) -> None:
    for key in keys:
        lease = rank.fetch(key, mode).lease
        rank.end(lease, mode is not Mode.READ)


def test_half_of_a_cycle_that_fits_half_is_found_in_memory() -> None:
    world = World()
    rank, keys = start(world, tiles=64, slots=32)
    cycle(rank, keys)
    before = moved(world, Direction.READ)
    cycle(rank, keys)
    # MIN loads 64 - 31 per cycle; loading ahead costs at most its allowance, a quarter of the region, more.
    assert moved(world, Direction.READ) - before <= 64 - 31 + 8
    world.close()


def test_what_is_read_only_is_written_once() -> None:
    world = World()
    rank, keys = start(world, tiles=16, slots=4)
    for _ in range(3):
        cycle(rank, keys)
    assert moved(world, Direction.WRITE) <= 16
    world.close()


def test_prefetched_tiles_are_hits() -> None:
    world = World()
    rank, keys = start(world, tiles=16, slots=8)
    for _ in range(2):
        for key in keys:
            world.run()
            rank.get(key)
    stats = world.pump.snapshot().sessions[0]
    assert stats.misses == 0
    assert stats.prefetch_wasted == 0
    world.close()


def test_without_a_plan_the_least_recently_used_goes() -> None:
    world = World()
    rank, keys = start(world, tiles=3, slots=3, plan=False)
    (more,) = world.register(1, PAGE, prefix="more")
    rank.get(keys[0])
    rank.put(more[0], b"b" * PAGE)
    before = moved(world, Direction.READ)
    rank.get(keys[0])
    rank.get(keys[2])
    assert moved(world, Direction.READ) == before
    world.close()


def test_mixed_sizes_are_served_by_evicting_a_window() -> None:
    world = World()
    rank = world.open(region_bytes=8 * PAGE, tile_bytes=4 * PAGE)
    keys = [shard[0] for shard in world.register(1, *[PAGE] * 8, 4 * PAGE)]
    for key in keys[:-1]:
        rank.put(key, b"a" * PAGE)
    rank.put(keys[-1], b"b" * 4 * PAGE)
    assert rank.get(keys[-1]) == b"b" * 4 * PAGE
    assert dict(world.pump.snapshot().evictions)["window"] > 0
    world.close()


def test_waiting_is_booked_under_its_cause() -> None:
    world = World()
    rank, keys = start(world, tiles=2, slots=1, plan=False)
    stats = world.pump.stats.session(1)
    written = stats.stall_ns[Cause.WRITEBACK]
    assert written > 0
    rank.get(keys[0])
    assert stats.stall_ns[Cause.NOT_PREFETCHED] > 0
    assert stats.stall_ns[Cause.SLOTS_EXHAUSTED] == 0
    world.close()


def test_a_wrong_plan_costs_time_only() -> None:
    world = World()
    rank, keys = start(world, tiles=16, slots=4)
    world.follow(1, keys[::-1])
    cycle(rank, keys, Mode.UPDATE)
    cycle(rank, keys)
    assert world.pump.snapshot().sessions[0].replies == len(rank.sent)
    world.close()


def test_one_cycle_reports_its_bytes_per_parameter() -> None:
    world = World()
    rank, keys = start(world, tiles=8, slots=2)
    cycle(rank, keys, Mode.UPDATE)
    cycle(rank, keys, Mode.UPDATE)
    cycle(rank, keys, Mode.UPDATE)
    stats = world.pump.snapshot().sessions[0]
    assert stats.cycles == 3
    # fp32 masters: 4 bytes read and 4 written per parameter and cycle, less what stayed in memory.
    assert 4 < stats.bytes_per_parameter <= 8
    world.close()
