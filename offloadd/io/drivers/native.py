"""io_uring through the native module: raw system calls, no library. Runs on every CPU.

Created by `offloadd.io.select`; called by the uring engine only. Adds nothing to `offloadd_native.Uring` but the table
of registered buffers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import offloadd_native
from offloadd.io.drivers import open_within_memlock

BUFFER_SLOTS = 1024
"""Registered chunks of at most 1 GiB: a TiB of arenas."""


class NativeDriver:
    """A `Driver` over `offloadd_native.Uring`."""

    name = "native"

    def __init__(self, entries: int = 1024) -> None:
        """OSError when the kernel refuses a ring."""
        self._ring, self.entries = open_within_memlock(entries, offloadd_native.Uring)
        self.buffer_slots = BUFFER_SLOTS
        try:
            offloadd_native.uring_reserve_buffers(self._ring.ring_fileno(), BUFFER_SLOTS)
        except OSError:
            self.buffer_slots = 0  # before Linux 5.19: every transfer then pins its own pages

    def fileno(self) -> int:
        return self._ring.fileno()

    def flags(self) -> str:
        return self._ring.flags()

    def set_buffer(self, slot: int, address: int, length: int) -> None:
        offloadd_native.uring_set_buffer(self._ring.ring_fileno(), slot, address, length)

    def submit(self, operations: NDArray[np.void]) -> int:
        return self._ring.submit(operations)

    def reap(self, out: NDArray[np.void]) -> int:
        return self._ring.reap(out)

    def close(self) -> None:
        self._ring.close()
