"""The narrow seam under the uring engine: one ring, arrays of device requests in, arrays of completions out.

Owned by `offloadd.io.uring`, which alone calls a driver, from one thread. A driver never waits, retries or continues
anything, and knows no transfers: each operation it accepts comes back exactly once under its `user` number. The array
layouts are `offloadd_native.URING_OP` and `URING_COMPLETION`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Ring = TypeVar("Ring")
ENTRIES_MIN = 32


def open_within_memlock(entries: int, open_ring: Callable[[int], Ring]) -> tuple[Ring, int]:
    """A ring and its entries: as many as asked for, or halved until the limit on locked memory allows them. The queues
    themselves count against that limit on recent kernels, and 64 KiB, a common default, is less than 1024 entries.
    OSError of the kernel when even the smallest fails, or for another reason."""
    while True:
        try:
            return open_ring(entries), entries
        except OSError as error:
            if error.errno != errno.ENOMEM or entries // 2 < ENTRIES_MIN:
                raise
            entries //= 2


class Driver(Protocol):
    """One io_uring."""

    name: str
    """liburing | native."""
    entries: int
    """Operations in flight, at most."""
    buffer_slots: int
    """Entries of the table of registered buffers; 0 where this kernel or package offers none."""

    def fileno(self) -> int:
        """An eventfd that polls readable when `reap` may have something; `reap` clears it."""

    def flags(self) -> str:
        """Set-up flags in force, for status."""

    def set_buffer(self, slot: int, address: int, length: int) -> None:
        """Register memory (at most 1 GiB) in one table entry, or empty the entry (0, 0). OSError on refusal."""

    def submit(self, operations: NDArray[np.void]) -> int:
        """Start a prefix; returns how many were accepted. OSError: none of these will complete."""

    def reap(self, out: NDArray[np.void]) -> int:
        """Fill `out` with completions that have arrived; returns how many."""

    def close(self) -> None:
        """Let go of the ring. Idempotent. The caller has drained it."""
