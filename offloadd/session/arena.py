"""A job's arena: one memfd, of which each session maps its own region.

The daemon allocates every page before it lends it, so that memory is charged to the daemon's cgroup and a shortage
is an error at Reserve, never a SIGBUS in a rank. The memfd is sealed against shrinking: a client cannot pull pages
from under the daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading

from offloadd.core.errors import Code, OffloadError
from offloadd.core.units import PAGE_BYTES, align_up, human

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_POPULATE_WRITE = 23  # Linux 5.14


class Region:
    """A session's part of the arena, mapped in the daemon until `close`. Making and closing one is slow and belongs in
    a thread."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        """OSError when the kernel has no memory left; nothing of it is kept then."""
        self.offset = offset
        self.length = length
        self._map = mmap.mmap(descriptor, length, offset=offset)
        self.memory = memoryview(self._map)
        try:
            self._map.madvise(mmap.MADV_DONTFORK)
            os.posix_fallocate(descriptor, offset, length)
            # Best effort: what is not in the page table yet is put there when the engine pins it, which takes longer.
            with contextlib.suppress(OSError):
                self._advise(_MADV_POPULATE_WRITE)
        except BaseException:
            self.close()
            raise

    def _advise(self, advice: int) -> None:
        """mmap.madvise keeps every thread of the process waiting until the kernel is done, 0.1 s and more per GiB."""
        start = ctypes.c_char.from_buffer(self._map)
        try:
            if _LIBC.madvise(ctypes.addressof(start), self.length, advice):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        finally:
            del start  # or the mapping could not be closed

    def close(self) -> None:
        """Give the pages back to the kernel and unmap. The engine must have let go of `memory` before."""
        self._advise(mmap.MADV_REMOVE)
        self.memory.release()
        # If something still exports a view of the mapping, the pages are gone already, and the address range goes
        # when the last view dies.
        with contextlib.suppress(BufferError):
            self._map.close()


class Arena:
    """The memfd of one incarnation of a job."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(f"offloadd-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._length = 0
        self._lock = threading.Lock()

    def grow(self, length: int) -> Region:
        """Allocate and map a new region. Takes about 0.3 s per GiB, so call it off the event loop.
        NO_HOST_BUDGET when the kernel has no memory left."""
        with self._lock:
            if self.descriptor < 0:
                raise OffloadError(Code.STALE_SESSION, "the job ended while memory was prepared for it")
            return self._grow(align_up(length, PAGE_BYTES))

    def _grow(self, length: int) -> Region:
        offset = self._length
        try:
            # One that was refused has left the file longer, and the seal forbids to shorten it.
            if os.fstat(self.descriptor).st_size < offset + length:
                os.ftruncate(self.descriptor, offset + length)
            region = Region(self.descriptor, offset, length)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise OffloadError(
                Code.NO_HOST_BUDGET,
                f"the kernel refused {human(length)} of memory for the arena ({os.strerror(error.errno)}); "
                "lower memory.host_bytes or free memory on this node",
            ) from error
        self._length = offset + length
        return region

    def close(self) -> None:
        """Blocking: waits for a `grow` under way, which must not go on with a descriptor that is someone else's."""
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
