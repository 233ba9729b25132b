"""What the C++ module offers. It touches bytes; it decides nothing. Every call that can take long releases the GIL."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

# ---- instruction sets -------------------------------------------------------------------------------------------
def cpu_level() -> str:
    """Instruction set that the kernels use: avx512 | avx2 | sse42 | baseline. Same bits on every level."""

def cpu_levels() -> list[str]:
    """Every level this CPU can run, best first."""

def set_cpu_level(level: str) -> None:
    """Force a level this CPU has (tests compare levels bit for bit). ValueError otherwise."""

# ---- shared-memory ring -----------------------------------------------------------------------------------------
class RingCorrupt(ValueError):
    """The other side wrote indices, magic, version or generation that cannot be."""

def ring_bytes(entries: int, entry_bytes: int) -> int:
    """Bytes of one queue with this many entries (a power of two), header included, page-aligned."""

class Ring:
    """One single-producer single-consumer queue in shared memory.

    Header: magic, version, generation, entries, entry size; head, tail and sleep flag each on a cache line of its
    own. The consumer trusts nothing it reads: an index out of bounds raises RingCorrupt, entries are copied out once.
    """

    def __init__(
        self, memory: memoryview, offset: int, entries: int, entry_bytes: int, generation: int, create: bool
    ) -> None:
        """`memory` is kept alive. `create` writes the header; otherwise it is checked (RingCorrupt)."""

    def push(self, entries: bytes) -> tuple[int, bool]:
        """Producer: copy in whole entries, as many as fit; publish them with one release store. Returns (how many
        were taken, whether the consumer sleeps and its doorbell must be rung). The sleep flag is read after a
        sequentially consistent fence, so that no wake-up is lost."""

    def pop(self, limit: int) -> bytes:
        """Consumer: copy out up to `limit` entries and free them with one release store."""

    def free(self) -> int:
        """Producer: entries that `push` would take now."""

    def pending(self) -> int:
        """Consumer: entries that `pop` would give now."""

    def sleep(self) -> bool:
        """Consumer, before waiting on the doorbell: set the sleep flag, fence, look again. True: the queue is
        empty, wait. False: something came meanwhile, the flag is cleared again."""

    def wake(self) -> None:
        """Consumer: clear the sleep flag after waiting."""

    def wait(self, doorbell: int, liveness: int, spin_us: float, timeout_ms: int) -> int:
        """Consumer: look for `spin_us`, then sleep until the doorbell (a non-blocking eventfd, cleared on the way),
        until `liveness` is readable or hung up, or until the time is up. 0: time-out, 1: entries are pending, 2: the
        peer is gone and nothing is pending."""

# ---- io_uring on raw system calls -------------------------------------------------------------------------------
URING_OP: Final[np.dtype[np.void]]
"""Structured dtype of one device request: op u1 (0 read, 1 write, 2 fdatasync), buffer i4 (registered index or -1),
fd i4, file_offset u8, address u8, length u4, user u8 (comes back in the completion)."""

URING_COMPLETION: Final[np.dtype[np.void]]
"""Structured dtype of one completion: user u8, result i4 (bytes or -errno)."""

class Uring:
    """An io_uring with its completion eventfd. Set-up tries COOP_TASKRUN, then plain; raises OSError with the kernel's
    errno if neither works. Used by one thread at a time; a thread's operations must complete before it ends."""

    def __init__(self, entries: int) -> None: ...
    def fileno(self) -> int:
        """The completion eventfd."""
    def ring_fileno(self) -> int:
        """The ring itself, for `uring_reserve_buffers` and `uring_set_buffer`."""
    def flags(self) -> str:
        """Set-up flags in force, for status."""
    def register_buffers(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> None:
        """Replace the registered buffers (each <= 1 GiB); OSError on refusal (ENOMEM: memlock). Empty arrays
        unregister."""
    def submit(self, operations: NDArray[np.void]) -> int:
        """Queue and submit a prefix of a contiguous URING_OP array with as few system calls as possible; returns how
        many. Less than asked when the queue is full."""
    def reap(self, out: NDArray[np.void]) -> int:
        """Fill a URING_COMPLETION array with what has arrived; returns how many. Never waits."""
    def wait(self, timeout_ms: int) -> bool:
        """Wait for at least one completion without the GIL; False on time-out."""
    def close(self) -> None: ...

def uring_reserve_buffers(ring_fd: int, slots: int) -> None:
    """Give an io_uring (anyone's) an empty table of registered buffers. OSError on refusal (before Linux 5.19)."""

def uring_set_buffer(ring_fd: int, slot: int, address: int, length: int) -> None:
    """Fill one entry of the table (at most 1 GiB), or empty it (0, 0); the others stay pinned. OSError on refusal
    (ENOMEM: memlock)."""

# ---- checksums --------------------------------------------------------------------------------------------------
def crc32c(data: memoryview, value: int = 0) -> int:
    """CRC-32C (Castagnoli, RFC 3720) of a contiguous buffer."""

class ChecksumPool:
    """Native threads that checksum spans granule by granule, and an eventfd that says when some are done."""

    def __init__(self, threads: int, granule_bytes: int) -> None: ...
    def fileno(self) -> int: ...
    def submit(self, user: int, address: int, length: int) -> None:
        """Queue one span; the memory must stay mapped until its result is reaped."""
    def reap(self) -> list[tuple[int, bytes]]:
        """(user, little-endian u32 per granule) for each finished span."""
    def close(self) -> None:
        """Finish what is queued and join the threads."""

# ---- optimizer kernels ------------------------------------------------------------------------------------------
F32: Final[int]
BF16: Final[int]
F16: Final[int]

def adam_step(
    master: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    grad_dtype: int,
    out: int,
    out_dtype: int,
    count: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction1: float,
    bias_correction2_sqrt: float,
    grad_scale: float,
    adamw: bool,
    threads: int,
) -> None:
    """One Adam/AdamW step over `count` elements, fused: reads gradient, fp32 master and fp32 moments once, writes
    master and moments once and the 16-bit parameter once. Pointers are addresses. `out` 0: no 16-bit copy.
    Kingma & Ba 2015, Loshchilov & Hutter 2019; the operation order is that of trainer/optim/reference.py, with
    which it agrees bit for bit (no contraction into FMA, exact division and square root)."""

def stream_copy_bytes(threads: int, bytes_: int, writes: int) -> float:
    """Bandwidth (B/s) of an in-place kernel with four read streams and `writes` (3 or 4) write streams over
    `bytes_` in all: the yardstick for adam_step."""
