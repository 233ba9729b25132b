"""What the device does wrong reaches the rank as a named error, and never as wrong bytes."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from offloadd.core.errors import Code
from offloadd.core.records import Direction, Mode, Residency, TileKey, Transfer
from offloadd.core.units import GRANULE_BYTES
from tests.pump_world import PAGE, Rank, World


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def cold(world: World, tile_bytes: int = PAGE, count: int = 2) -> tuple[Rank, list[TileKey]]:
    """The first tiles of a shard are on disk only; the last is in memory."""
    rank = world.open(region_bytes=tile_bytes, tile_bytes=tile_bytes)
    (tiles,) = world.register(1, count * tile_bytes)
    for number, tile in enumerate(tiles):
        rank.put(tile, bytes([number + 1]) * tile_bytes)
    return rank, tiles


def failing(direction: Direction, result: int) -> object:
    def fault(transfer: Transfer) -> int:
        return result if transfer.direction is direction else 0

    return fault


def healthy(transfer: Transfer) -> int:
    return 0


def test_a_flipped_bit_is_corrupt_naming_granule_and_path(world: World) -> None:
    rank, tiles = cold(world, 3 * GRANULE_BYTES)
    tile = world.store.tile(1, tiles[0])
    assert tile is not None
    assert tile.extent is not None
    rank.get(tiles[1])
    world.engine.files[tile.extent.file][tile.extent.offset + 2 * GRANULE_BYTES + 7] ^= 1
    reply = rank.fetch(tiles[0])
    assert (reply.code, reply.granule, reply.path) == (Code.CORRUPT, 2, tile.path)
    assert rank.fetch(tiles[0], Mode.UPDATE).code is Code.CORRUPT
    assert world.pump.snapshot().checksum_failures == 1


def test_a_lost_tile_can_be_overwritten(world: World) -> None:
    rank, tiles = cold(world)
    tile = world.store.tile(1, tiles[0])
    assert tile is not None
    assert tile.extent is not None
    world.engine.files[tile.extent.file][tile.extent.offset] ^= 1
    assert rank.fetch(tiles[0]).code is Code.CORRUPT
    rank.put(tiles[0], b"n" * PAGE)
    assert rank.get(tiles[0]) == b"n" * PAGE


@pytest.mark.parametrize(
    ("result", "code", "number"),
    [
        (-errno.EIO, Code.IO_ERROR, errno.EIO),
        (-errno.ENOSPC, Code.NO_SPACE, errno.ENOSPC),
        (100, Code.SHORT_IO, 0),
    ],
)
def test_a_failed_load_is_named_and_can_be_tried_again(world: World, result: int, code: Code, number: int) -> None:
    rank, tiles = cold(world)
    world.engine.fault = failing(Direction.READ, result)  # type: ignore[assignment]
    reply = rank.fetch(tiles[0])
    assert (reply.code, reply.errno) == (code, number)
    tile = world.store.tile(1, tiles[0])
    assert tile is not None
    assert tile.residency is Residency.COLD
    world.engine.fault = healthy
    assert rank.get(tiles[0]) == b"\1" * PAGE


def test_a_failed_spill_keeps_the_bytes_and_the_next_flush_reports_it_once(world: World) -> None:
    rank = world.open(region_bytes=2 * PAGE)
    (tiles,) = world.register(1, 2 * PAGE)
    rank.put(tiles[0], b"a" * PAGE)
    world.engine.fault = failing(Direction.WRITE, -errno.EIO)  # type: ignore[assignment]
    first = rank.flush()
    assert (first.code, first.errno) == (Code.IO_ERROR, errno.EIO)
    assert rank.get(tiles[0]) == b"a" * PAGE
    world.engine.fault = healthy
    assert rank.flush().code is Code.OK
    assert world.pump.snapshot().sessions[0].spill_errors == 1


def test_spills_that_keep_failing_back_off_and_end_in_an_error(world: World) -> None:
    rank = world.open(region_bytes=PAGE)
    (tiles,) = world.register(1, 2 * PAGE)
    rank.put(tiles[0], b"a" * PAGE)
    world.engine.fault = failing(Direction.WRITE, -errno.EIO)  # type: ignore[assignment]
    reply = rank.fetch(tiles[1], Mode.OVERWRITE)
    assert (reply.code, reply.errno) == (Code.SLOTS_EXHAUSTED, errno.EIO)
    assert sum(t.direction is Direction.WRITE for t in world.engine.log) < 20
    assert rank.get(tiles[0]) == b"a" * PAGE


def test_a_failed_sync_fails_the_flush_and_is_tried_by_the_next(world: World) -> None:
    rank = world.open()
    ((tile,),) = world.register(1, PAGE)
    rank.put(tile, b"a" * PAGE)
    world.engine.fault = failing(Direction.SYNC, -errno.EIO)  # type: ignore[assignment]
    assert rank.flush().code is Code.IO_ERROR
    world.engine.fault = healthy
    assert rank.flush().code is Code.OK
    assert sum(t.direction is Direction.SYNC for t in world.engine.log) == 2
