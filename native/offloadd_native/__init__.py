"""The native module: shared-memory ring, io_uring, checksums and optimizer kernels. See __init__.pyi for the API."""

try:
    from offloadd_native._ext import (
        BF16,
        F16,
        F32,
        URING_COMPLETION,
        URING_OP,
        ChecksumPool,
        Ring,
        RingCorrupt,
        Uring,
        adam_step,
        cpu_level,
        cpu_levels,
        crc32c,
        ring_bytes,
        set_cpu_level,
        stream_copy_bytes,
        uring_reserve_buffers,
        uring_set_buffer,
    )
except ImportError as error:
    raise ImportError(
        f"offloadd's native module is not built for this Python ({error}); "
        "install the package with 'pip install .' (needs a C++17 compiler) and try again"
    ) from error

__all__ = [
    "BF16",
    "F16",
    "F32",
    "URING_COMPLETION",
    "URING_OP",
    "ChecksumPool",
    "Ring",
    "RingCorrupt",
    "Uring",
    "adam_step",
    "cpu_level",
    "cpu_levels",
    "crc32c",
    "ring_bytes",
    "set_cpu_level",
    "stream_copy_bytes",
    "uring_reserve_buffers",
    "uring_set_buffer",
]
