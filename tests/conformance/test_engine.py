"""One suite for every engine: what the protocol in offloadd/io/engine.py promises."""

from __future__ import annotations

import errno
import os
import resource
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import offloadd_native
from offloadd.core.records import Direction, Transfer
from offloadd.core.units import GRANULE_BYTES, PAGE_BYTES
from offloadd.io.engine import FileTuning
from tests.conformance.engines import ALL, FILE, MOVING, REGION, Rig, readable, rig_for

READ, WRITE, CHECKSUM, SYNC = Direction.READ, Direction.WRITE, Direction.CHECKSUM, Direction.SYNC
MIB = 1 << 20


@pytest.fixture
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    with rig_for(request.param, tmp_path) as made:
        yield made


moving = pytest.mark.parametrize("rig", MOVING, indirect=True)
every = pytest.mark.parametrize("rig", ALL, indirect=True)


def fill(rig: Rig, seed: int = 0) -> None:
    rig.bytes[:] = np.random.default_rng(seed).integers(0, 256, len(rig.bytes), dtype=np.uint8)


def expected_checksums(data: memoryview) -> bytes:
    return b"".join(
        struct.pack("<I", offloadd_native.crc32c(data[start : start + GRANULE_BYTES]))
        for start in range(0, len(data), GRANULE_BYTES)
    )


# ---- round trips ------------------------------------------------------------------------------------------------


@moving
@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 131_071, 131_073, 1_000_003, 3 * MIB])
def test_what_was_written_is_read_back(rig: Rig, length: int) -> None:
    fill(rig)
    before = bytes(rig.memory[:length])
    assert rig.one(rig.transfer(WRITE, 0, length)).result == -(-length // PAGE_BYTES) * PAGE_BYTES
    rig.bytes[:] = 0
    assert rig.one(rig.transfer(READ, 4 * MIB, length, file_at=0)).result > 0
    assert bytes(rig.memory[4 * MIB : 4 * MIB + length]) == before


@moving
def test_many_concurrent_transfers_keep_apart(rig: Rig) -> None:
    fill(rig)
    before = rig.bytes.copy()
    size = 20 * 1024
    spans = range(0, len(rig.bytes) - size, size + PAGE_BYTES)
    rig.run(*(rig.transfer(WRITE, at, size) for at in spans))
    rig.bytes[:] = 0
    rig.run(*(rig.transfer(READ, at, size) for at in spans))
    assert all((rig.bytes[at : at + size] == before[at : at + size]).all() for at in spans)


@moving
def test_offsets_beyond_4_gib_are_not_cut(rig: Rig) -> None:
    os.ftruncate(rig.fd, (5 << 30) + MIB)
    fill(rig)
    before = bytes(rig.memory[:MIB])
    rig.one(rig.transfer(WRITE, 0, MIB, file_at=5 << 30))
    rig.one(rig.transfer(READ, 2 * MIB, MIB, file_at=5 << 30))
    rig.one(rig.transfer(READ, 4 * MIB, MIB, file_at=1 << 30))
    assert bytes(rig.memory[2 * MIB : 3 * MIB]) == before
    assert not rig.bytes[4 * MIB : 5 * MIB].any()


@moving
def test_a_buffered_file_works_too(request: pytest.FixtureRequest, rig: Rig, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "buffered", os.O_RDWR | os.O_CREAT, 0o600)
    rig.engine.register_file(9, fd, FileTuning(64 << 10, 2))
    fill(rig)
    before = bytes(rig.memory[:300_000])
    rig.one(rig.transfer(WRITE, 0, 300_000, file=9))
    rig.one(rig.transfer(READ, 2 * MIB, 300_000, file_at=0, file=9))
    os.close(fd)
    assert bytes(rig.memory[2 * MIB : 2 * MIB + 300_000]) == before


# ---- the promise of completion ----------------------------------------------------------------------------------


@every
def test_every_transfer_completes_exactly_once(rig: Rig) -> None:
    os.ftruncate(rig.fd, len(rig.bytes))
    kinds = [READ, WRITE, CHECKSUM, SYNC]
    transfers = [rig.transfer(kinds[i % 4], (i % 64) * 65536, 40_000, checksum=i % 3 == 0) for i in range(500)]
    outcomes = rig.run(*transfers)
    assert set(outcomes) == {transfer.id for transfer in transfers}
    assert rig.engine.reap() == []


@every
def test_submit_takes_a_prefix_no_longer_than_free_slots(rig: Rig) -> None:
    free = rig.engine.free_slots()
    transfers = [rig.transfer(CHECKSUM, 0, PAGE_BYTES) for _ in range(free + 10)]
    assert rig.engine.submit(transfers) == free
    assert rig.engine.free_slots() == 0
    assert rig.engine.submit(transfers[free:]) == 0
    seen: list[int] = []
    while len(seen) < free:
        seen += [outcome.id for outcome in rig.reap()]
    assert sorted(seen) == [transfer.id for transfer in transfers[:free]]
    assert rig.engine.free_slots() == free


@every
def test_the_descriptor_is_silent_when_there_is_nothing_to_reap(rig: Rig) -> None:
    rig.run(*(rig.transfer(WRITE, 0, PAGE_BYTES, checksum=True) for _ in range(5)))
    while rig.engine.reap():
        pass
    assert not readable(rig.engine.fileno(), 0)


@every
def test_an_empty_transfer_completes(rig: Rig) -> None:
    assert rig.one(rig.transfer(WRITE, 0, 0)).result == 0
    assert rig.one(rig.transfer(READ, 0, 0, checksum=True)).result == 0


@every
def test_sync_completes_with_zero(rig: Rig) -> None:
    assert rig.one(rig.transfer(SYNC, 0, 0)).result == 0


# ---- checksums --------------------------------------------------------------------------------------------------


@moving
@pytest.mark.parametrize("length", [1, GRANULE_BYTES, GRANULE_BYTES + 1, 777_777])
@pytest.mark.parametrize("direction", [WRITE, CHECKSUM])
def test_checksums_cover_the_logical_bytes_only(rig: Rig, length: int, direction: Direction) -> None:
    fill(rig)
    outcome = rig.one(rig.transfer(direction, 0, length, checksum=True))
    assert outcome.checksums == expected_checksums(rig.memory[:length])


@moving
def test_checksums_of_a_read_are_those_of_the_bytes_that_arrived(rig: Rig) -> None:
    fill(rig)
    written = rig.one(rig.transfer(WRITE, 0, 500_000, checksum=True))
    rig.bytes[:] = 0
    assert rig.one(rig.transfer(READ, 2 * MIB, 500_000, file_at=0, checksum=True)).checksums == written.checksums


@every
def test_no_checksums_unless_asked(rig: Rig) -> None:
    assert rig.one(rig.transfer(WRITE, 0, 200_000)).checksums == b""


# ---- refusals and failures --------------------------------------------------------------------------------------


def unsound(rig: Rig) -> list[Transfer]:
    whole = len(rig.bytes)
    return [
        rig.transfer(READ, region=99),
        rig.transfer(READ, file=99),
        rig.transfer(CHECKSUM, region=99),
        rig.transfer(SYNC, file=99),
        rig.transfer(READ, at=whole, length=PAGE_BYTES),
        rig.transfer(READ, at=whole - PAGE_BYTES, length=2 * PAGE_BYTES, file_at=0),
        rig.transfer(WRITE, at=-PAGE_BYTES),
        rig.transfer(WRITE, at=0, file_at=-PAGE_BYTES),
        rig.transfer(READ, at=0, file_at=(1 << 63) - PAGE_BYTES),
        rig.transfer(READ, at=100, file_at=0),
    ]


@every
@pytest.mark.parametrize("number", range(10))
def test_an_unsound_transfer_completes_with_einval(rig: Rig, number: int) -> None:
    assert rig.one(unsound(rig)[number]).result == -errno.EINVAL


@moving
def test_a_failure_is_of_one_transfer_and_not_of_its_batch(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "readonly"
    path.write_bytes(bytes(MIB))
    fd = os.open(path, os.O_RDONLY)
    rig.engine.register_file(9, fd, FileTuning())
    good = [rig.transfer(WRITE, i * 65536, 65536) for i in range(8)]
    bad = rig.transfer(WRITE, 0, MIB, file=9)
    outcomes = rig.run(*good[:4], bad, *good[4:])
    os.close(fd)
    assert outcomes[bad.id].result == -errno.EBADF
    assert [outcomes[transfer.id].result for transfer in good] == [65536] * 8


@moving
def test_a_read_past_the_end_of_the_file_is_enodata(rig: Rig) -> None:
    os.ftruncate(rig.fd, MIB)
    assert rig.one(rig.transfer(READ, 0, 2 * MIB)).result == -errno.ENODATA


@moving
def test_a_full_device_is_enospc(rig: Rig) -> None:
    fd = os.open("/dev/full", os.O_RDWR)
    rig.engine.register_file(9, fd, FileTuning())
    result = rig.one(rig.transfer(WRITE, 0, MIB, file=9)).result
    os.close(fd)
    assert result == -errno.ENOSPC


@moving
def test_a_limit_on_file_size_is_efbig(rig: Rig) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        result = rig.one(rig.transfer(WRITE, 0, 2 * MIB)).result
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result == -errno.EFBIG


# ---- what is lent -----------------------------------------------------------------------------------------------


@every
def test_a_number_is_lent_once(rig: Rig) -> None:
    with pytest.raises(ValueError, match="already registered"):
        rig.engine.register_region(REGION, rig.memory)
    with pytest.raises(ValueError, match="already registered"):
        rig.engine.register_file(FILE, rig.fd, FileTuning())


@every
def test_what_a_transfer_uses_cannot_be_taken_back(rig: Rig) -> None:
    rig.engine.submit([rig.transfer(WRITE, 0, MIB, checksum=True)])
    with pytest.raises(ValueError, match="in use"):
        rig.engine.unregister_region(REGION)
    with pytest.raises(ValueError, match="in use"):
        rig.engine.unregister_file(FILE)
    while rig.engine.inflight():
        rig.reap()
    rig.engine.unregister_region(REGION)
    rig.engine.unregister_file(FILE)
    assert rig.one(rig.transfer(WRITE)).result == -errno.EINVAL


@every
def test_closing_waits_for_what_is_in_flight_and_its_outcomes_stay_reapable(rig: Rig) -> None:
    transfers = [rig.transfer(WRITE, i * MIB, MIB, checksum=True) for i in range(8)]
    rig.engine.submit(transfers)
    rig.engine.close()
    rig.engine.close()
    assert sorted(outcome.id for outcome in rig.engine.reap()) == [transfer.id for transfer in transfers]
    assert rig.engine.free_slots() == 0


@every
def test_statistics_add_up(rig: Rig) -> None:
    rig.run(rig.transfer(WRITE, 0, MIB, checksum=True), rig.transfer(READ, region=99), rig.transfer(SYNC, 0, 0))
    counters = rig.engine.statistics()
    assert (counters["submitted"], counters["completed"], counters["errors"]) == (3, 3, 1)
    assert counters["bytes_written"] == counters["bytes_checksummed"] == MIB
    assert counters["inflight"] == 0


@every
def test_memory_and_descriptors_stay_flat(rig: Rig) -> None:
    def rss_kib() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4

    def churn(transfers: int) -> None:
        for start in range(0, transfers, 200):
            rig.run(
                *(rig.transfer(WRITE, (i % 256) * PAGE_BYTES, 1000, checksum=True) for i in range(start, start + 200))
            )

    churn(2000)
    descriptors, memory = len(os.listdir("/proc/self/fd")), rss_kib()
    churn(10_000)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert rss_kib() - memory < 4096


@moving
def test_an_idle_engine_can_pass_to_another_thread(rig: Rig) -> None:
    """A daemon makes and calibrates its engine on a helper thread and then uses it from its event loop."""
    fill(rig)
    with ThreadPoolExecutor(1) as helper:
        helper.submit(rig.one, rig.transfer(WRITE, 0, MIB, checksum=True)).result(timeout=30)
    assert rig.one(rig.transfer(READ, 2 * MIB, MIB, file_at=0)).result == MIB
    assert rig.memory[:MIB] == rig.memory[2 * MIB : 3 * MIB]
