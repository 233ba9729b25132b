"""A trial of one io_uring driver in a process of its own: `python -m offloadd.io.ringcheck liburing|native`.

Started by `offloadd.io.select` before the daemon uses that driver. A package built for another CPU dies by a signal
here, where it costs nothing. Sets up a ring, registers shared memory, writes and reads one page through it, and prints
one JSON object: {"ok", "errno", "step", "flags", "registered"}.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import select
import sys

import numpy as np

import offloadd_native
from offloadd.core.units import PAGE_BYTES
from offloadd.io.drivers import Driver

WAIT_MS = 5000
REGION_BYTES = 4 * PAGE_BYTES


def open_driver(name: str, entries: int = 1024) -> Driver:
    """A driver by name. OSError, ImportError: it cannot run here. Importing liburing can end the process."""
    if name == "liburing":
        from offloadd.io.drivers.liburing import LiburingDriver

        return LiburingDriver(entries)
    from offloadd.io.drivers.native import NativeDriver

    return NativeDriver(entries)


def _complete(driver: Driver, operation: tuple[int, ...]) -> int:
    """Run one operation to its end; its result."""
    if driver.submit(np.array([operation], dtype=offloadd_native.URING_OP)) != 1:
        raise OSError(errno.EAGAIN, "the ring took no operation")
    poller = select.poll()
    poller.register(driver.fileno(), select.POLLIN)
    out = np.zeros(1, dtype=offloadd_native.URING_COMPLETION)
    while driver.reap(out) == 0:
        if not poller.poll(WAIT_MS):
            raise OSError(errno.ETIME, "no completion arrived, or its eventfd stayed silent")
    result = int(out["result"][0])
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def _round_trip(driver: Driver, address: int, memory: mmap.mmap, fd: int, buffer: int) -> None:
    memory[:PAGE_BYTES] = bytes(range(256)) * (PAGE_BYTES // 256)
    for op, at in ((1, 0), (0, PAGE_BYTES)):
        moved = _complete(driver, (op, buffer, fd, 0, address + at, PAGE_BYTES, 1))
        if moved != PAGE_BYTES:
            raise OSError(errno.EIO, f"a page came back as {moved} bytes")
    if memory[:PAGE_BYTES] != memory[PAGE_BYTES : 2 * PAGE_BYTES]:
        raise OSError(errno.EIO, "what was read differs from what was written")


def check(name: str) -> dict[str, object]:
    """Try the driver; what the process prints."""
    answer: dict[str, object] = {"ok": False, "errno": 0, "step": "set-up", "flags": "", "registered": False}
    try:
        driver = open_driver(name)
        answer["flags"] = driver.flags()
        shared = os.memfd_create("offloadd-ringcheck")
        os.ftruncate(shared, REGION_BYTES)
        memory = mmap.mmap(shared, REGION_BYTES)
        address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        target = os.memfd_create("offloadd-ringcheck-file")
        os.ftruncate(target, REGION_BYTES)
        answer["step"] = "a plain write and read"
        _round_trip(driver, address, memory, target, -1)
        if driver.buffer_slots:
            try:
                driver.set_buffer(0, address, REGION_BYTES)
                answer["registered"] = True
            except OSError as error:  # memlock: the engine then works without registered buffers
                answer["errno"] = error.errno or 0
        if answer["registered"]:
            answer["step"] = "a write and read with a registered buffer"
            _round_trip(driver, address, memory, target, 0)
        answer["ok"] = True
    except OSError as error:
        answer["errno"] = error.errno or errno.EIO
        answer["step"] = f"{answer['step']}: {error.strerror or error}"
    except ImportError as error:
        answer["step"] = f"import: {error}"
    return answer


if __name__ == "__main__":
    print(json.dumps(check(sys.argv[1])))
