"""io_uring through the `liburing` package.

Created by `offloadd.io.select`, and only after a child process has shown that the package runs on this CPU: its wheel
holds instructions that kill the process on CPUs without AVX-512, so this module imports it when a driver is made and
never before. The package takes shared memory only as an `Iovec` over a memoryview. Each `Iovec` it makes keeps a
reference to its view for ever, so windows are made once per place in memory and kept: slots are reused, so there are as
many as the arenas have blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
from ctypes import c_char
from typing import Any

import numpy as np
from numpy.typing import NDArray

import offloadd_native
from offloadd.io.drivers import open_within_memlock
from offloadd.io.drivers.native import BUFFER_SLOTS

READ, WRITE, SYNC = 0, 1, 2
WINDOWS_MAX = 1 << 17
"""Windows kept. Beyond that the oldest go, at the price of some hundred bytes that the package does not give back."""
_AGAIN = (errno.EINTR, errno.EAGAIN, errno.EBUSY)


def _window(address: int, length: int) -> memoryview:
    """Bytes at an address, as the only kind of object that `Iovec` takes for memory not owned by Python."""
    return memoryview((c_char * length).from_address(address)).cast("B")


class LiburingDriver:
    """A `Driver` over the package."""

    name = "liburing"

    def __init__(self, entries: int = 1024) -> None:
        """OSError when the kernel refuses a ring, ImportError without the package."""
        import liburing

        self._lib: Any = liburing
        self._flags = "COOP_TASKRUN"
        self._ring, self.entries = open_within_memlock(entries, self._open)
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        liburing.io_uring_register_eventfd(self._ring, self._eventfd)
        liburing.io_uring_ring_dontfork(self._ring)
        self._cqe: Any = liburing.Cqe()
        self._windows: dict[tuple[int, int], tuple[memoryview, Any]] = {}
        self._inflight = 0
        self._fatal = 0
        self._closed = False
        self.buffer_slots = self._reserve_buffers()

    def _reserve_buffers(self) -> int:
        """Slots of registered buffers; 0 where the kernel lacks the table (5.19) or the vectored calls on it (6.15)."""
        lib = self._lib
        try:
            probe = lib.io_uring_get_probe_ring(self._ring)
            operation = lib.io_uring_op
            both = (operation.IORING_OP_READV_FIXED, operation.IORING_OP_WRITEV_FIXED)
            known = all(lib.io_uring_opcode_supported(probe, int(code)) for code in both)
            lib.io_uring_free_probe(probe)
            if known:
                lib.io_uring_register_buffers_sparse(self._ring, BUFFER_SLOTS)
        except OSError:
            return 0
        return BUFFER_SLOTS if known else 0

    def _open(self, entries: int) -> Any:
        ring = self._lib.Ring()
        try:
            self._lib.io_uring_queue_init(entries, ring, self._lib.IORING_SETUP_COOP_TASKRUN)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: before Linux 5.19
                raise
            self._flags = "plain"
            ring = self._lib.Ring()
            self._lib.io_uring_queue_init(entries, ring)
        return ring

    def fileno(self) -> int:
        return self._eventfd

    def flags(self) -> str:
        return self._flags

    def set_buffer(self, slot: int, address: int, length: int) -> None:
        # The package can replace only the whole table, which would pin every other arena again.
        offloadd_native.uring_set_buffer(int(self._ring.ring_fd), slot, address, length)

    def submit(self, operations: NDArray[np.void]) -> int:
        if self._fatal:
            raise OSError(self._fatal, os.strerror(self._fatal))
        # Only here, where no prepared operation points at a vector: the kernel copies vectors as it takes operations.
        while len(self._windows) > WINDOWS_MAX and not self._lib.io_uring_sq_ready(self._ring):
            del self._windows[next(iter(self._windows))]
        taken = 0
        for operation in operations[: self.entries - self._inflight].tolist():
            sqe = self._lib.io_uring_get_sqe(self._ring)
            if sqe is None:
                break
            self._prepare(sqe, *operation)
            taken += 1
        self._inflight += taken
        self._enter()
        return taken

    def _prepare(
        self, sqe: Any, op: int, buffer: int, fd: int, file_offset: int, address: int, length: int, user: int
    ) -> None:
        lib = self._lib
        if op == SYNC:
            lib.io_uring_prep_fsync(sqe, fd, lib.IORING_FSYNC_DATASYNC)
        else:
            vector = self._vector(address, length)
            if buffer >= 0:
                prepare = lib.io_uring_prep_writev_fixed if op == WRITE else lib.io_uring_prep_readv_fixed
                prepare(sqe, fd, vector, buffer, file_offset)
            else:
                prepare = lib.io_uring_prep_writev if op == WRITE else lib.io_uring_prep_readv
                prepare(sqe, fd, vector, file_offset)
        sqe.user_data = user

    def _vector(self, address: int, length: int) -> Any:
        kept = self._windows.get((address, length))
        if kept is None:
            view = _window(address, length)
            kept = self._windows[address, length] = (view, self._lib.Iovec([view]))
        return kept[1]

    def _enter(self) -> None:
        """Hand the queue to the kernel. What it does not take stays queued, and the next call offers it again."""
        try:
            while self._lib.io_uring_sq_ready(self._ring) and self._lib.io_uring_submit(self._ring) > 0:
                pass
        except OSError as error:
            if error.errno not in _AGAIN:
                self._fatal = error.errno or errno.EIO
                raise

    def reap(self, out: NDArray[np.void]) -> int:
        lib = self._lib
        # Cleared before looking: whatever arrives after the look sets it again.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        if not self._fatal and lib.io_uring_sq_ready(self._ring):
            self._enter()
        ready = int(lib.io_uring_cq_ready(self._ring))
        count = min(ready, len(out))
        if count == 0:
            return 0
        users: list[int] = []
        results: list[int] = []
        iterator = lib.io_uring_cqe_iter_init(self._ring)
        while len(users) < count and lib.io_uring_cqe_iter_next(iterator, self._cqe):
            entry = self._cqe[0]
            users.append(entry.user_data)
            try:
                results.append(entry.res)
            except OSError as error:  # the package raises what the kernel returned
                results.append(-(error.errno or errno.EIO))
        lib.io_uring_cq_advance(self._ring, len(users))
        self._inflight -= len(users)
        out["user"][: len(users)] = users
        out["result"][: len(users)] = results
        if ready > len(users):
            os.eventfd_write(self._eventfd, 1)  # what is left must keep the descriptor readable
        return len(users)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._lib.io_uring_queue_exit(self._ring)
        os.close(self._eventfd)
        self._windows.clear()
