"""One suite for both ways to reach a daemon: shared-memory ring and gRPC stream."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from offloadd.client import (
    PLAN_LENGTH_MAX,
    ClientSession,
    Code,
    Mode,
    OffloadError,
    RegisteredShard,
    ShardSpec,
    Slot,
    connect,
)
from offloadd.core.units import KIB, MIB
from offloadd.wire.pb import control_pb2
from tests.daemon import Daemon, running


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running(control__listen="127.0.0.1:0", session__slot_wait_seconds=0.3) as started:
        yield started


@pytest.fixture(params=["ring", "stream"])
def session(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[ClientSession]:
    opened = daemon.session(request.param, host_bytes=4 * MIB, tile_bytes=256 * KIB, pinned_tiles=4)
    yield opened
    opened.close()


def register(session: ClientSession, length: int, name: str = "a") -> RegisteredShard:
    return session.register([ShardSpec(name, "float32", length, "param")])[0]


def view(slot: Slot) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(slot.buffer or b"", dtype=np.uint8)


def put(session: ClientSession, shard: RegisteredShard, tile: int, seed: int) -> bytes:
    data = np.random.default_rng(seed).bytes(shard.tiles[tile][1])
    slot = session.fetch(shard, tile, Mode.OVERWRITE).wait()
    view(slot)[:] = np.frombuffer(data, dtype=np.uint8)
    slot.store()
    return data


def get(session: ClientSession, shard: RegisteredShard, tile: int) -> bytes:
    slot = session.fetch(shard, tile, Mode.READ).wait()
    data = view(slot).tobytes()
    slot.release()
    return data


def code_of(caught: pytest.ExceptionInfo[OffloadError]) -> Code:
    assert "\n" not in caught.value.message
    return caught.value.code


def test_a_round_trip_is_answered(session: ClientSession) -> None:
    for _ in range(100):
        session.nop()
    assert session.statistics()["misses"] == 0


@pytest.mark.parametrize("length", [1, 511, 4096, 4097, 256 * KIB, 256 * KIB + 1, 1_000_003])
def test_bytes_of_any_length_come_back(session: ClientSession, length: int) -> None:
    shard = register(session, length)
    stored = [put(session, shard, tile, tile) for tile in range(len(shard.tiles))]
    assert b"".join(get(session, shard, tile) for tile in range(len(shard.tiles))) == b"".join(stored)
    assert sum(map(len, stored)) == length


def test_more_than_memory_holds_comes_back_from_disk(session: ClientSession) -> None:
    shard = register(session, 16 * MIB)
    stored = [put(session, shard, tile, tile) for tile in range(64)]
    session.flush()
    assert [get(session, shard, tile) for tile in range(64)] == stored
    assert session.statistics()["disk_read_bytes"] >= 12 * MIB


def test_an_update_changes_part_of_a_tile_and_keeps_the_rest(session: ClientSession) -> None:
    shard = register(session, 1000)
    before = put(session, shard, 0, 1)
    slot = session.fetch(shard, 0, Mode.UPDATE).wait()
    view(slot)[:10] = 7
    slot.store()
    assert get(session, shard, 0) == bytes([7] * 10) + before[10:]


def test_a_tile_never_stored_is_refused_by_name(session: ClientSession) -> None:
    shard = register(session, 1000, "layer.weight")
    with pytest.raises(OffloadError, match=r"layer\.weight.*never stored") as caught:
        session.fetch(shard, 0, Mode.READ).wait()
    assert code_of(caught) is Code.NOT_STORED


def test_a_dropped_tile_is_gone(session: ClientSession) -> None:
    shard = register(session, 1000)
    put(session, shard, 0, 1)
    session.drop(shard, 0)
    with pytest.raises(OffloadError) as caught:
        session.fetch(shard, 0, Mode.READ).wait()
    assert code_of(caught) is Code.NOT_STORED


def test_readers_share_and_a_writer_excludes(session: ClientSession) -> None:
    shard = register(session, 1000)
    put(session, shard, 0, 1)
    first, second = (session.fetch(shard, 0, Mode.READ).wait() for _ in range(2))
    with pytest.raises(OffloadError) as caught:
        session.fetch(shard, 0, Mode.UPDATE).wait()
    assert code_of(caught) is Code.LEASE_CONFLICT
    first.release()
    second.release()
    session.fetch(shard, 0, Mode.UPDATE).wait().release()


def test_a_read_slot_cannot_be_stored(session: ClientSession) -> None:
    shard = register(session, 1000)
    put(session, shard, 0, 1)
    slot = session.fetch(shard, 0, Mode.READ).wait()
    with pytest.raises(ValueError, match="fetched for reading"):
        slot.store()
    slot.release()


def test_a_slot_is_handed_back_once(session: ClientSession) -> None:
    shard = register(session, 1000)
    put(session, shard, 0, 1)
    slot = session.fetch(shard, 0, Mode.READ).wait()
    slot.release()
    with pytest.raises(ValueError, match="handed back already"):
        slot.release()


def test_the_slot_stays_as_long_as_a_view_of_it_lives(session: ClientSession) -> None:
    shard = register(session, 16 * MIB)
    data = put(session, shard, 0, 0)
    slot = session.fetch(shard, 0, Mode.READ).wait()
    kept = view(slot)
    slot.release()
    for tile in range(1, 64):
        put(session, shard, tile, tile)
    assert kept.tobytes() == data


def test_memory_all_on_loan_is_an_error_that_says_so(session: ClientSession) -> None:
    shard = register(session, 16 * MIB)
    held = [session.fetch(shard, tile, Mode.OVERWRITE).wait() for tile in range(16)]
    one_more = session.fetch(shard, 16, Mode.OVERWRITE)
    with pytest.raises(OffloadError, match="16 tiles fetched and not handed back") as caught:
        one_more.wait()
    assert code_of(caught) is Code.SLOTS_EXHAUSTED
    for slot in held:
        slot.release()
    session.fetch(shard, 20, Mode.OVERWRITE).wait().release()


def test_threads_share_a_session(session: ClientSession) -> None:
    shard = register(session, 16 * MIB)
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for tile in range(first, first + 16):
                data = put(session, shard, tile, tile)
                if get(session, shard, tile) != data:
                    raise AssertionError(f"tile {tile} came back different")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(16 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_a_plan_makes_later_fetches_hits(session: ClientSession) -> None:
    shard = register(session, 8 * MIB)
    stored = [put(session, shard, tile, tile) for tile in range(32)]
    session.flush()
    session.plan([(shard.number, tile, Mode.READ) for tile in range(32)])
    assert [get(session, shard, tile) for tile in range(32)] == stored
    assert session.statistics()["prefetch_useful"] > 0


def test_a_model_larger_than_the_quota_is_refused_with_figures(daemon: Daemon) -> None:
    session = daemon.session(host_bytes=4 * MIB, swap_bytes=8 * MIB, tile_bytes=256 * KIB)
    with pytest.raises(OffloadError, match=r"8 MiB .*need 16 MiB") as caught:
        register(session, 16 * MIB)
    assert code_of(caught) is Code.NO_SWAP_BUDGET
    session.close()


# ---- access plans ----------------------------------------------------------------------------------------------------
def planned(session: ClientSession, shard: RegisteredShard, tiles: Iterable[int]) -> None:
    session.plan([(shard.number, tile, Mode.READ) for tile in tiles])


def test_the_longest_plan_is_taken_and_followed_and_one_longer_is_refused_with_figures(session: ClientSession) -> None:
    shard = register(session, 8 * MIB)
    stored = [put(session, shard, tile, tile) for tile in range(32)]
    session.flush()
    longest = [(shard.number, tile % 32, Mode.READ) for tile in range(PLAN_LENGTH_MAX)]
    session.plan(longest)
    with pytest.raises(OffloadError, match=r"a plan of 1048577 shards.* 1048576 at most") as caught:
        session.plan([*longest, longest[0]])
    assert code_of(caught) is Code.BAD_REQUEST
    # What was refused has not replaced what was taken.
    assert [get(session, shard, tile) for tile in range(32)] == stored
    assert session.statistics()["prefetch_useful"] > 0
    assert session.statistics()["mispredictions"] == 0


@pytest.mark.parametrize(("beyond", "tile"), [(0, 4), (1, 0), (0, 2**32 - 1), (2**31, 0)])
def test_a_plan_of_what_is_not_registered_is_refused_by_its_place(
    session: ClientSession, beyond: int, tile: int
) -> None:
    shard = register(session, 1 * MIB)
    number = shard.number + beyond
    with pytest.raises(OffloadError, match=rf"entry 1 of the plan: there is no shard {number} tile {tile}") as caught:
        session.plan([(shard.number, 0, Mode.READ), (number, tile, Mode.READ)])
    assert code_of(caught) is Code.UNKNOWN_SHARD
    put(session, shard, 0, 1)


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [((2, 1, 1), "2 shards, 1 tiles and 1 modes"), ((1, 0, 1), "1 shards, 0 tiles"), ((0, 0, 1), "and 1 modes")],
)
def test_a_plan_whose_lists_differ_in_length_is_refused_with_each(
    session: ClientSession, counts: tuple[int, int, int], sentence: str
) -> None:
    shard = register(session, 1000)
    shards, tiles, modes = counts
    request = control_pb2.SubmitPlanRequest(
        session=session._ref, shards=[shard.number] * shards, tiles=[0] * tiles, modes=[0] * modes
    )
    with pytest.raises(OffloadError, match=sentence) as caught:
        session.control.call(session.control.stub.SubmitPlan, request)
    assert code_of(caught) is Code.BAD_REQUEST


def test_a_plan_with_a_mode_that_does_not_exist_is_refused(session: ClientSession) -> None:
    shard = register(session, 1000)
    request = control_pb2.SubmitPlanRequest(session=session._ref, shards=[shard.number], tiles=[0], modes=[9])
    with pytest.raises(OffloadError, match="entry 0 of the plan: there is no mode 9") as caught:
        session.control.call(session.control.stub.SubmitPlan, request)
    assert code_of(caught) is Code.BAD_REQUEST


@pytest.mark.parametrize("accesses", [[], [(0, 0, Mode.READ)]])
def test_a_plan_before_there_is_memory_is_refused(daemon: Daemon, accesses: list[tuple[int, int, Mode]]) -> None:
    session = connect(daemon.endpoint, timeout_s=20)
    with pytest.raises(OffloadError, match="must reserve before it plans") as caught:
        session.plan(accesses)
    assert code_of(caught) is Code.BAD_REQUEST
    session.close()


def test_an_empty_plan_takes_the_last_one_back(session: ClientSession) -> None:
    shard = register(session, 8 * MIB)
    stored = [put(session, shard, tile, tile) for tile in range(32)]
    session.flush()
    planned(session, shard, range(32))
    assert get(session, shard, 0) == stored[0]
    session.plan([])
    # Nothing is expected any more, so nothing is a surprise.
    assert [get(session, shard, tile) for tile in reversed(range(32))] == stored[::-1]
    assert session.statistics()["mispredictions"] == 0
    planned(session, shard, range(32))
    assert [get(session, shard, tile) for tile in range(32)] == stored


def test_a_plan_replaced_while_it_is_followed_is_followed_from_its_first_entry(session: ClientSession) -> None:
    shard = register(session, 16 * MIB)
    stored = [put(session, shard, tile, tile) for tile in range(64)]
    session.flush()
    planned(session, shard, range(64))
    for _ in range(3):
        assert [get(session, shard, tile) for tile in range(20)] == stored[:20]
        # Tiles that the last plan is having loaded meanwhile are not waited for, nor lost.
        planned(session, shard, reversed(range(64)))
        assert [get(session, shard, tile) for tile in reversed(range(44, 64))] == stored[:43:-1]
        planned(session, shard, range(64))
    assert session.statistics()["mispredictions"] == 0


def test_a_plan_replaced_by_one_thread_while_others_fetch_harms_nobody(session: ClientSession) -> None:
    shard = register(session, 16 * MIB)
    stored = [put(session, shard, tile, tile) for tile in range(64)]
    session.flush()
    failures: list[BaseException] = []

    def fetch(first: int) -> None:
        try:
            for tile in [*range(first, 64, 2)] * 2:
                assert get(session, shard, tile) == stored[tile]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=fetch, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    shift = 0
    while any(thread.is_alive() for thread in threads):
        planned(session, shard, [(tile + shift) % 64 for tile in range(64)])
        shift += 7
    for thread in threads:
        thread.join(60)
    assert not failures
