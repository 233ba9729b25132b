"""The uring engine over a scripted driver: what it does with each odd answer of a kernel."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from offloadd.core.records import Direction
from offloadd.io.engine import FileTuning
from offloadd.io.uring import ATTEMPTS_MAX, STALLS_MAX, UringEngine
from tests.conformance.engines import FILE, Rig

READ, WRITE = Direction.READ, Direction.WRITE
BLOCK = 128 << 10


class ScriptedDriver:
    """Completes each operation by the script's next answer, or in full when the script has run out."""

    name = "native"
    entries = 64
    buffer_slots = 0

    def __init__(self) -> None:
        self.script: deque[int] = deque()
        self.accept: Callable[[int], int] = lambda count: count
        self.seen: list[tuple[int, int, int]] = []
        self.largest_inflight = 0
        self.hold = False
        self._waiting: deque[tuple[int, int]] = deque()
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._eventfd

    def flags(self) -> str:
        return "scripted"

    def set_buffer(self, slot: int, address: int, length: int) -> None:
        raise OSError(errno.ENOMEM, "no")

    def submit(self, operations: NDArray[np.void]) -> int:
        taken = self.accept(len(operations))
        for operation in operations[:taken]:
            length = int(operation["length"])
            self.seen.append((int(operation["file_offset"]), length, int(operation["op"])))
            self._waiting.append((int(operation["user"]), self.script.popleft() if self.script else length))
        self.largest_inflight = max(self.largest_inflight, len(self._waiting))
        if taken:
            os.eventfd_write(self._eventfd, 1)
        return taken

    def reap(self, out: NDArray[np.void]) -> int:
        os.set_blocking(self._eventfd, False)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        count = min(len(self._waiting), len(out))
        for i in range(count):
            out["user"][i], out["result"][i] = self._waiting.popleft()
        return count

    def close(self) -> None:
        os.close(self._eventfd)


@pytest.fixture
def driver() -> ScriptedDriver:
    return ScriptedDriver()


@pytest.fixture
def rig(driver: ScriptedDriver, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(UringEngine(driver), tmp_path)
    yield made
    made.close()


def test_a_transfer_is_cut_into_blocks_in_file_order(rig: Rig, driver: ScriptedDriver) -> None:
    rig.one(rig.transfer(WRITE, 0, 300_000, file_at=1 << 20))
    blocks = [(1 << 20, BLOCK, 1), ((1 << 20) + BLOCK, BLOCK, 1), ((1 << 20) + 2 * BLOCK, 303_104 - 2 * BLOCK, 1)]
    assert driver.seen == blocks


def test_the_queue_depth_of_a_file_is_kept(rig: Rig, driver: ScriptedDriver) -> None:
    rig.run(*(rig.transfer(READ, 0, 4 << 20) for _ in range(4)))
    assert driver.largest_inflight == 8


def test_a_short_request_is_continued_where_it_stopped(rig: Rig, driver: ScriptedDriver) -> None:
    driver.script.extend([8192, 4096])
    assert rig.one(rig.transfer(READ, 0, 65536)).result == 65536
    assert driver.seen == [(0, 65536, 0), (8192, 57344, 0), (12288, 53248, 0)]
    assert rig.engine.statistics()["short_continued"] == 2


def test_a_short_request_is_continued_from_a_whole_page(rig: Rig, driver: ScriptedDriver) -> None:
    driver.script.append(5000)
    rig.one(rig.transfer(READ, 0, 65536))
    assert driver.seen[1] == (4096, 61440, 0)


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EINTR])
def test_what_the_kernel_asks_to_retry_is_retried(rig: Rig, driver: ScriptedDriver, error: int) -> None:
    driver.script.extend([-error] * 3)
    assert rig.one(rig.transfer(WRITE, 0, 4096)).result == 4096
    assert rig.engine.statistics()["retried"] == 3


def test_retries_are_bounded(rig: Rig, driver: ScriptedDriver) -> None:
    driver.script.extend([-errno.EAGAIN] * 100)
    assert rig.one(rig.transfer(WRITE, 0, 4096)).result == -errno.EAGAIN
    assert len(driver.seen) == ATTEMPTS_MAX + 1


def test_the_first_error_is_reported_and_the_rest_is_not_sent(rig: Rig, driver: ScriptedDriver) -> None:
    driver.script.extend([BLOCK, -errno.EIO, -errno.ENOSPC])
    assert rig.one(rig.transfer(WRITE, 0, 4 << 20)).result == -errno.EIO
    assert len(driver.seen) == 8  # one depth's worth, of the 32 that the transfer has


def test_a_failed_transfer_gives_no_checksums(rig: Rig, driver: ScriptedDriver) -> None:
    driver.script.append(-errno.EIO)
    assert rig.one(rig.transfer(READ, 0, 4096, checksum=True)).checksums == b""


@pytest.mark.parametrize(("direction", "error"), [(READ, errno.ENODATA), (WRITE, errno.ENOSPC)])
def test_no_progress_is_an_error(rig: Rig, driver: ScriptedDriver, direction: Direction, error: int) -> None:
    driver.script.append(0)
    assert rig.one(rig.transfer(direction, 0, 4096)).result == -error


def test_a_refused_submission_fails_its_transfers_only(rig: Rig, driver: ScriptedDriver) -> None:
    def refuse(count: int) -> int:
        driver.accept = lambda count: count
        raise OSError(errno.ENXIO, "gone")

    driver.accept = refuse
    assert rig.one(rig.transfer(WRITE, 0, 4096)).result == -errno.ENXIO
    assert rig.one(rig.transfer(WRITE, 0, 4096)).result == 4096


def test_a_ring_that_takes_one_at_a_time_still_gets_everything(rig: Rig, driver: ScriptedDriver) -> None:
    driver.accept = lambda count: min(count, 1)
    outcomes = rig.run(*(rig.transfer(WRITE, i * 65536, 65536) for i in range(10)))
    assert {outcome.result for outcome in outcomes.values()} == {65536}


def test_an_idle_ring_that_takes_nothing_is_given_up(rig: Rig, driver: ScriptedDriver) -> None:
    calls = []
    driver.accept = lambda count: calls.append(count) or 0  # type: ignore[func-returns-value]
    assert rig.one(rig.transfer(WRITE, 0, 4096)).result == -errno.EAGAIN
    assert len(calls) == STALLS_MAX + 1


def test_memory_that_cannot_be_registered_is_counted(driver: ScriptedDriver, tmp_path: Path) -> None:
    driver.buffer_slots = 4
    rig = Rig(UringEngine(driver), tmp_path)
    counted = rig.engine.statistics()["unregistered_regions"]
    result = rig.one(rig.transfer(WRITE, 0, 4096)).result
    rig.close()
    assert (counted, result) == (1, 4096)


def test_a_busy_file_leaves_room_for_another(rig: Rig, driver: ScriptedDriver) -> None:
    rig.engine.unregister_file(FILE)
    rig.engine.register_file(FILE, rig.fd, FileTuning(4096, 1000))
    rig.engine.register_file(9, rig.fd, FileTuning(4096, 1000))
    rig.engine.submit([rig.transfer(READ, 0, 4 << 20), rig.transfer(WRITE, 0, 4 << 20, file=9)])
    assert {op for _, _, op in driver.seen} == {0, 1}
    while rig.engine.inflight():
        rig.reap()
