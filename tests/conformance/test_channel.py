"""One suite for both ways to reach a daemon: shared-memory ring and gRPC stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from offloadd.client import ClientSession, Code, Mode, OffloadError, RegisteredShard, ShardSpec, Slot
from offloadd.core.units import KIB, MIB
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
