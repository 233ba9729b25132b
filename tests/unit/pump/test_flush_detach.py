"""Flushes reach the disk and the catalog; detached sessions leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import CATALOG_PATH, Direction, Mode, Op, Request
from offloadd.scheduler.queues import SessionQueue
from offloadd.store.catalog import unpack_extents
from offloadd.store.holdings import SLICE_TILES
from tests.pump_world import PAGE, Rank, World, to_the_end
from tests.sim_engine import checksums_of


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def test_a_flush_writes_syncs_and_records_checksums(world: World) -> None:
    rank = world.open()
    ((tile,),) = world.register(1, PAGE)
    content = bytes(range(256)) * 16
    rank.put(tile, content)
    assert rank.flush().code is Code.OK
    directions = [t.direction for t in world.engine.log]
    assert directions == [Direction.CHECKSUM, Direction.WRITE, Direction.SYNC]
    found = world.catalog.version("job1", 0, "s0").result(10)
    assert found is not None
    file, _, offset, length, whole = unpack_extents(found[0])[0]
    assert whole
    assert bytes(world.engine.files[file][offset : offset + length]) == content
    assert found[1] == checksums_of(memoryview(content))


def test_a_second_flush_has_nothing_to_do(world: World) -> None:
    rank = world.open()
    ((tile,),) = world.register(1, PAGE)
    rank.put(tile, b"a" * PAGE)
    rank.flush()
    before = len(world.engine.log)
    assert rank.flush().code is Code.OK
    assert len(world.engine.log) == before


def test_a_write_lease_during_a_flush_waits_for_the_spill(world: World) -> None:
    rank = world.open()
    ((tile,),) = world.register(1, PAGE)
    rank.put(tile, b"a" * PAGE)
    flush, update = rank.send(Op.FLUSH), rank.send(Op.FETCH, tile, Mode.UPDATE)
    while world.pump.step():
        pass
    assert update not in rank.replies
    assert rank.wait(update).code is Code.OK
    assert rank.wait(flush).code is Code.OK


def test_a_flush_while_stored_bytes_are_being_updated_is_a_conflict(world: World) -> None:
    rank = world.open()
    ((tile,),) = world.register(1, PAGE)
    rank.put(tile, b"a" * PAGE)
    rank.fetch(tile, Mode.UPDATE)
    assert rank.flush().code is Code.LEASE_CONFLICT


def test_nothing_is_written_while_memory_suffices(world: World) -> None:
    rank = world.open(region_bytes=8 * PAGE)
    (tiles,) = world.register(1, 8 * PAGE)
    world.follow(1, tiles)
    for _ in range(3):
        for tile in tiles:
            rank.put(tile, b"a" * PAGE)
    world.run()
    assert not any(t.direction is Direction.WRITE for t in world.engine.log)


def test_detaching_waits_for_what_is_in_flight(world: World) -> None:
    rank = world.open(region_bytes=PAGE)
    (tiles,) = world.register(1, 2 * PAGE)
    for tile in tiles:
        rank.put(tile, b"a" * PAGE)
    rank.send(Op.FETCH, tiles[0])
    world.pump.step()
    quiet: list[int] = []
    world.pump.detach(1, quiet.append)
    world.pump.detach(1, quiet.append)
    assert quiet == []
    assert not world.pump.is_detached(1)
    with pytest.raises(ValueError, match="in use"):
        world.engine.unregister_region(1)
    world.run(lambda: world.pump.is_detached(1))
    assert quiet == [1, 1]
    world.engine.unregister_region(1)
    to_the_end(world.store.close_session(1))
    assert world.store.sessions() == []


def test_detaching_a_quiet_session_is_immediate_and_its_numbers_can_be_used_again(world: World) -> None:
    world.open()
    world.leave(1)
    rank = world.open()
    ((tile,),) = world.register(1, PAGE)
    rank.put(tile, b"a" * PAGE)


def test_waiting_requests_of_a_detached_session_are_answered_nowhere(world: World) -> None:
    rank = world.open(region_bytes=PAGE)
    (tiles,) = world.register(1, 2 * PAGE)
    rank.fetch(tiles[0], Mode.OVERWRITE)
    waiting = rank.send(Op.FETCH, tiles[1], Mode.OVERWRITE)
    world.pump.step()
    world.pump.detach(1)
    world.run()
    assert waiting not in rank.replies


class Broken(Rank):
    """A client that wrote nonsense into its ring."""

    def drain(self, limit: int) -> list[Request]:
        raise OffloadError(Code.BAD_REQUEST, "a ring that cannot be")


def test_a_broken_endpoint_ends_its_own_session_only(world: World) -> None:
    healthy = world.open(1)
    world.open(2)
    world.pump.detach(2)
    world.store.open_session(3, "bad", 0, 3, PAGE, PAGE, 0, [])
    broken: list[int] = []
    world.pump.on_broken = lambda session, error: broken.append(session)
    world.pump.attach(Broken(world, 3))
    ((tile,),) = world.register(1, PAGE)
    healthy.put(tile, b"a" * PAGE)
    assert broken == [3]
    assert world.pump.is_detached(3)


def test_attaching_an_unknown_session_is_refused(world: World) -> None:
    with pytest.raises(OffloadError) as caught:
        world.pump.attach(Rank(world, 7))
    assert caught.value.code is Code.NO_SESSION


def test_each_step_drains_a_bounded_number(world: World) -> None:
    rank = world.open()
    for _ in range(300):
        rank.send(Op.NOP)
    assert world.pump.step()
    assert len(rank.replies) == 256
    assert not world.pump.step()
    assert len(rank.replies) == 300


def test_a_session_that_ends_with_transfers_in_one_batch_takes_no_neighbours_along() -> None:
    world = World()
    leaving, staying = world.open(1), world.open(2)
    tiles = world.register(1, *[PAGE] * 4)
    other = world.register(2, PAGE)[0][0]
    for (key,) in tiles:
        leaving.put(key, bytes(PAGE))
    staying_lease = staying.fetch(other, Mode.OVERWRITE).lease
    # Four checksums of the one and one of the other, all due at the same instant: one batch of outcomes.
    leases = [leaving.fetch(key, Mode.UPDATE).lease for (key,) in tiles]
    for lease in leases:
        leaving.send(Op.STORE, lease=lease)
    stored = staying.send(Op.STORE, lease=staying_lease)
    world.pump.step()
    quiet: list[int] = []
    world.pump.detach(1, quiet.append)
    assert not quiet
    assert staying.wait(stored).code is Code.OK
    assert quiet == [1]
    assert staying.fetch(other).code is Code.OK
    world.close()


def test_a_flush_that_the_catalog_could_not_record_says_so_and_the_next_one_records_it(world: World) -> None:
    rank = world.open()
    ((tile,),) = world.register(1, PAGE)
    rank.put(tile, b"a" * PAGE)
    trigger = "CREATE TEMP TRIGGER broken BEFORE INSERT ON shard_versions BEGIN SELECT RAISE(ABORT, 'broken'); END"
    world.catalog.submit(lambda database: database.execute(trigger)).result(10)
    reply = rank.flush()
    assert (reply.code, reply.path) == (Code.IO_ERROR, CATALOG_PATH)
    world.catalog.submit(lambda database: database.execute("DROP TRIGGER broken")).result(10)
    assert rank.flush().code is Code.OK
    found = world.catalog.version("job1", 0, "s0").result(10)
    assert found is not None
    assert unpack_extents(found[0])[0][4]


def full_of_changed_tiles(world: World, count: int) -> Rank:
    rank = world.open(region_bytes=count * PAGE)
    (tiles,) = world.register(1, count * PAGE)
    for at in range(0, count, 200):
        fetches = [rank.send(Op.FETCH, tile, Mode.OVERWRITE) for tile in tiles[at : at + 200]]
        world.run(lambda fetches=fetches: all(number in rank.replies for number in fetches))
        for number in fetches:
            rank.send(Op.STORE, lease=rank.replies[number].lease)
    world.run()
    return rank


def test_a_flush_of_very_many_tiles_lets_others_have_their_turn() -> None:
    world = World(checksums=False, slots=8)
    rank = full_of_changed_tiles(world, 3 * SLICE_TILES)
    asked: list[int] = []
    push = SessionQueue.push
    other = world.open(2)
    flush = rank.send(Op.FLUSH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SessionQueue, "push", lambda queue, want: (asked.append(want.key.index), push(queue, want))[1])
        begun = []
        while len(asked) < 3 * SLICE_TILES:
            before = len(asked)
            answer = other.send(Op.NOP)
            assert world.pump.step()
            assert answer in other.replies
            begun.append(len(asked) - before)
    assert max(begun) == SLICE_TILES
    assert sorted(asked) == list(range(3 * SLICE_TILES))
    world.run(lambda: flush in rank.replies, limit=100_000)
    assert rank.replies[flush].code is Code.OK
    assert world.store.regions()[1].clean == 3 * SLICE_TILES * PAGE
    world.close()


def test_a_session_with_very_many_tiles_ends_in_slices_and_gives_all_back() -> None:
    world = World(checksums=False)
    full_of_changed_tiles(world, 3 * SLICE_TILES)
    held = world.store.holdings(1)
    quiet: list[int] = []
    world.pump.detach(1, quiet.append)
    assert quiet == [1]
    records = [held.arena.owners, held.arena.victims._heap, held.shards[0].tiles]
    work = world.store.close_session(1)
    while any(records):
        before = sum(map(len, records))
        next(work)
        assert 0 <= before - sum(map(len, records)) <= SLICE_TILES
        assert world.store.sessions() == []
    to_the_end(work)
    assert world.store._shards == {}
    assert world.store._files == {}
    world.close()
