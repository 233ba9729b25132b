"""The raw io_uring: operations in, completions out, and what happens at its edges."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import offloadd_native
from offloadd.io.select import try_driver
from offloadd_native import URING_COMPLETION, URING_OP, Uring

pytestmark = pytest.mark.uring
READ, WRITE, SYNC = 0, 1, 2


@pytest.fixture
def ring() -> Iterator[Uring]:
    trial = try_driver("native")
    if not trial.ok:
        pytest.skip(f"uring/native: {trial.why}")
    made = Uring(8)
    yield made
    made.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield opened
    os.close(opened)


def operations(count: int, op: int, fd: int, memory: np.ndarray, buffer: int = -1) -> np.ndarray:  # type: ignore[type-arg]
    made = np.zeros(count, dtype=URING_OP)
    made["op"], made["fd"], made["buffer"], made["length"] = op, fd, buffer, 4096
    made["file_offset"] = np.arange(count) * 4096
    made["address"] = memory.ctypes.data + np.arange(count) * 4096
    made["user"] = np.arange(count) + 100
    return made


def drain(ring: Uring, count: int) -> dict[int, int]:
    out = np.zeros(4, dtype=URING_COMPLETION)
    poller = select.poll()
    poller.register(ring.fileno(), select.POLLIN)
    results: dict[int, int] = {}
    while len(results) < count:
        assert poller.poll(10_000), "the eventfd stayed silent"
        got = ring.reap(out)
        results.update(zip(out["user"][:got].tolist(), out["result"][:got].tolist(), strict=True))
    return results


def test_more_operations_than_entries_go_in_as_room_allows(ring: Uring, fd: int) -> None:
    memory = np.arange(40 * 4096, dtype=np.uint32).view(np.uint8)[: 40 * 4096]
    wanted, results, at = operations(40, WRITE, fd, memory), {}, 0
    while at < 40:
        taken = ring.submit(wanted[at:])
        assert 0 < taken <= 16
        at += taken
        results.update(drain(ring, taken))
    assert results == {100 + i: 4096 for i in range(40)}
    assert os.pread(fd, 40 * 4096, 0) == memory.tobytes()


def test_a_registered_buffer_reads_and_can_be_taken_back(ring: Uring, fd: int) -> None:
    os.pwrite(fd, b"x" * 8192, 0)
    memory = np.zeros(8192, dtype=np.uint8)
    try:
        offloadd_native.uring_reserve_buffers(ring.ring_fileno(), 4)
    except OSError as error:
        pytest.skip(f"no table of registered buffers on this kernel: {error}")
    offloadd_native.uring_set_buffer(ring.ring_fileno(), 3, memory.ctypes.data, 8192)
    ring.submit(operations(2, READ, fd, memory, buffer=3))
    assert set(drain(ring, 2).values()) == {4096}
    offloadd_native.uring_set_buffer(ring.ring_fileno(), 3, 0, 0)
    ring.submit(operations(1, READ, fd, memory, buffer=3))
    assert drain(ring, 1) == {100: -errno.EFAULT}
    assert bytes(memory) == b"x" * 8192


def test_one_bad_operation_does_not_stop_its_batch(ring: Uring, fd: int) -> None:
    memory = np.zeros(5 * 4096, dtype=np.uint8)
    wanted = operations(5, WRITE, fd, memory)
    wanted["fd"][2] = 9999
    assert ring.submit(wanted) == 5
    results = drain(ring, 5)
    assert results.pop(102) == -errno.EBADF
    assert set(results.values()) == {4096}


def test_sync_completes(ring: Uring, fd: int) -> None:
    ring.submit(operations(1, SYNC, fd, np.zeros(1, dtype=np.uint8)))
    assert drain(ring, 1) == {100: 0}


def test_waiting_is_bounded(ring: Uring) -> None:
    assert not ring.wait(10)


def test_an_array_of_another_type_is_refused(ring: Uring) -> None:
    with pytest.raises(ValueError, match="URING_OP"):
        ring.submit(np.zeros(3, dtype=np.uint8))  # type: ignore[arg-type]


def test_an_unknown_operation_is_refused(ring: Uring, fd: int) -> None:
    with pytest.raises(ValueError, match="unknown code"):
        ring.submit(operations(1, 7, fd, np.zeros(4096, dtype=np.uint8)))


def test_a_closed_ring_says_so(ring: Uring) -> None:
    ring.close()
    with pytest.raises(ValueError, match="closed"):
        ring.submit(np.zeros(1, dtype=URING_OP))
