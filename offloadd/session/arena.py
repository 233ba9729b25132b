"""A job's arena: one memfd, of which each session maps its own region.

The daemon allocates every page before it lends it, so that memory is charged to the daemon's cgroup and a shortage
is an error at Reserve, never a SIGBUS in a rank. The memfd is sealed against shrinking: a client cannot pull pages
from under the daemon.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading

from offloadd.core.errors import Code, OffloadError
from offloadd.core.units import PAGE_BYTES, align_up, human


class Region:
    """A session's part of the arena, mapped in the daemon until `close`."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length
        self._map = mmap.mmap(descriptor, length, offset=offset)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.memory = memoryview(self._map)

    def close(self) -> None:
        """Give the pages back to the kernel and unmap. The engine must have let go of `memory` before."""
        self._map.madvise(mmap.MADV_REMOVE)
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
            os.ftruncate(self.descriptor, offset + length)
            os.posix_fallocate(self.descriptor, offset, length)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise OffloadError(
                Code.NO_HOST_BUDGET,
                f"the kernel refused {human(length)} of memory for the arena ({os.strerror(error.errno)}); "
                "lower memory.host_bytes or free memory on this node",
            ) from error
        self._length = offset + length
        return Region(self.descriptor, offset, length)

    def close(self) -> None:
        """Blocking: waits for a `grow` under way, which must not go on with a descriptor that is someone else's."""
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
