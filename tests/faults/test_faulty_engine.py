"""The fault injector itself: reproducible, typed, and every transfer still completes exactly once."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path

import pytest

from offloadd.core.records import Direction
from offloadd.io.threads import ThreadsEngine
from tests.conformance.engines import Rig
from tests.faults.faulty_engine import FaultyEngine, Plan


def results(directory: Path, plan: Plan, direction: Direction = Direction.WRITE) -> list[int]:
    rig = Rig(FaultyEngine(ThreadsEngine(threads=2), plan), directory)
    transfers = [rig.transfer(direction, (i % 64) * 65536, 30_000, checksum=True) for i in range(200)]
    if direction is Direction.READ:
        rig.run(*(rig.transfer(Direction.WRITE, i * 65536, 65536) for i in range(65)))
    try:
        outcomes = rig.run(*transfers)
        return [outcomes[transfer.id].result for transfer in transfers]
    finally:
        rig.close()


def test_the_same_seed_injects_the_same_faults(tmp_path: Path) -> None:
    plan = Plan(seed=4, eio=0.1, enospc=0.1, eagain=0.1, delay=0.2)
    assert results(tmp_path, plan) == results(tmp_path, plan)


@pytest.mark.parametrize(("fault", "number"), [("eio", errno.EIO), ("enospc", errno.ENOSPC), ("eagain", errno.EAGAIN)])
def test_a_fault_is_of_its_transfer_only(tmp_path: Path, fault: str, number: int) -> None:
    found = Counter(results(tmp_path, Plan(seed=1, **{fault: 0.3})))
    assert set(found) == {-number, 32768}
    assert 30 < found[-number] < 90


def test_delayed_outcomes_still_come(tmp_path: Path) -> None:
    assert results(tmp_path, Plan(seed=2, delay=0.9, delay_completions=50)) == [32768] * 200


def test_a_flipped_bit_shows_in_the_checksum(tmp_path: Path) -> None:
    rig = Rig(FaultyEngine(ThreadsEngine(threads=1), Plan(flip=1.0)), tmp_path)
    rig.bytes[:] = 7
    written = rig.one(rig.transfer(Direction.WRITE, 0, 300_000, checksum=True))
    read = rig.one(rig.transfer(Direction.READ, 0, 300_000, checksum=True))
    flipped = int((rig.bytes[:300_000] != 7).sum())
    rig.close()
    assert flipped == 1
    assert read.checksums != written.checksums
