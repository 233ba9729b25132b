"""What a rank may hold, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from offloadd.core.errors import Code
from offloadd.core.records import Direction, Mode, Op, TileKey
from tests.pump_world import PAGE, World


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def test_reading_what_was_never_stored_is_not_stored(world: World) -> None:
    rank = world.open()
    ((tile,),) = world.register(1, PAGE)
    assert rank.fetch(tile).code is Code.NOT_STORED


def test_readers_share_and_writers_exclude(world: World) -> None:
    rank = world.open()
    ((tile,),) = world.register(1, PAGE)
    rank.put(tile, b"x" * PAGE)
    assert rank.fetch(tile).code is Code.OK
    assert rank.fetch(tile).code is Code.OK
    assert rank.fetch(tile, Mode.UPDATE).code is Code.LEASE_CONFLICT
    assert rank.fetch(tile, Mode.OVERWRITE).code is Code.LEASE_CONFLICT
    assert rank.wait(rank.send(Op.DROP, tile)).code is Code.LEASE_CONFLICT


def test_releasing_an_overwrite_leaves_nothing(world: World) -> None:
    rank = world.open()
    ((tile,),) = world.register(1, PAGE)
    rank.put(tile, b"x" * PAGE)
    rank.end(rank.fetch(tile, Mode.OVERWRITE).lease, False)
    assert rank.fetch(tile).code is Code.NOT_STORED


def test_dropping_leaves_nothing(world: World) -> None:
    rank = world.open()
    ((tile,),) = world.register(1, PAGE)
    rank.put(tile, b"x" * PAGE)
    assert rank.wait(rank.send(Op.DROP, tile)).code is Code.OK
    assert rank.fetch(tile).code is Code.NOT_STORED


@pytest.mark.parametrize("store", [True, False])
def test_a_lease_ends_once(world: World, store: bool) -> None:
    rank = world.open()
    ((tile,),) = world.register(1, PAGE)
    lease = rank.fetch(tile, Mode.OVERWRITE).lease
    assert rank.end(lease, True).code is Code.OK
    assert rank.end(lease, store).code is Code.BAD_LEASE


def test_a_read_lease_cannot_store(world: World) -> None:
    rank = world.open()
    ((tile,),) = world.register(1, PAGE)
    rank.put(tile, b"x" * PAGE)
    lease = rank.fetch(tile).lease
    assert rank.end(lease, True).code is Code.BAD_LEASE
    assert rank.end(lease, False).code is Code.OK


def test_another_sessions_lease_and_tile_are_unknown(world: World) -> None:
    rank, other = world.open(1), world.open(2)
    ((tile,),) = world.register(1, PAGE)
    lease = rank.fetch(tile, Mode.OVERWRITE).lease
    assert other.end(lease, True).code is Code.BAD_LEASE
    assert other.fetch(tile).code is Code.UNKNOWN_SHARD
    assert rank.fetch(TileKey(99, 0)).code is Code.UNKNOWN_SHARD


def test_an_empty_tile_needs_no_memory_and_no_device(world: World) -> None:
    rank = world.open()
    ((tile,),) = world.register(1, 0)
    rank.put(tile, b"")
    assert rank.get(tile) == b""
    assert world.engine.log == []


def test_memory_only_shards_never_reach_the_device(world: World) -> None:
    rank = world.open(region_bytes=4 * PAGE)
    ((kept,),) = world.register(1, PAGE, on_disk=False, prefix="kept")
    ((*tiles,),) = world.register(1, 8 * PAGE)
    rank.put(kept, b"k" * PAGE)
    for tile in tiles:
        rank.put(tile, b"x" * PAGE)
    assert rank.get(kept) == b"k" * PAGE
    assert kept not in {transfer.tile for transfer in world.engine.log}


def test_a_fetch_during_the_checksum_waits_for_it(world: World) -> None:
    rank = world.open()
    ((tile,),) = world.register(1, PAGE)
    lease = rank.fetch(tile, Mode.OVERWRITE).lease
    stored, fetched = rank.send(Op.STORE, lease=lease), rank.send(Op.FETCH, tile)
    while world.pump.step():
        pass
    assert fetched not in rank.replies
    assert rank.wait(fetched).code is Code.OK
    assert rank.replies[stored].code is Code.OK


def test_without_checksums_nothing_is_checksummed() -> None:
    world = World(checksums=False)
    rank = world.open(region_bytes=PAGE)
    (tiles,) = world.register(1, 3 * PAGE)
    for number, tile in enumerate(tiles):
        rank.put(tile, bytes([number]) * PAGE)
    assert [rank.get(tile)[0] for tile in tiles] == [0, 1, 2]
    assert not any(t.checksum or t.direction is Direction.CHECKSUM for t in world.engine.log)
    world.close()


def test_exhausted_memory_is_an_error_naming_what_is_leased_and_never_a_hang(world: World) -> None:
    rank = world.open(region_bytes=2 * PAGE)
    (tiles,) = world.register(1, 3 * PAGE)
    assert [rank.fetch(tile, Mode.OVERWRITE).code for tile in tiles[:2]] == [Code.OK] * 2
    before = world.clock.now_ns()
    reply = rank.fetch(tiles[2], Mode.OVERWRITE)
    assert (reply.code, reply.length) == (Code.SLOTS_EXHAUSTED, 2 * PAGE)
    assert world.clock.now_ns() - before == 10_000_000_000


def test_a_blocked_fetch_goes_on_as_soon_as_a_lease_ends(world: World) -> None:
    rank = world.open(region_bytes=PAGE)
    (tiles,) = world.register(1, 2 * PAGE)
    lease = rank.fetch(tiles[0], Mode.OVERWRITE).lease
    waiting = rank.send(Op.FETCH, tiles[1], Mode.OVERWRITE)
    world.pump.step()
    assert waiting not in rank.replies
    rank.end(lease, True)
    assert rank.wait(waiting).code is Code.OK


def test_nop_is_answered_at_once(world: World) -> None:
    rank = world.open()
    number = rank.send(Op.NOP)
    world.pump.step()
    assert rank.replies[number].code is Code.OK
