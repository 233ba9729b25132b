"""Sizes and alignments that every room shares, with the reason for each.

Owns no state. Everything here is bytes unless the name says otherwise.
"""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

PAGE_BYTES = 4096
"""Slots and extents start and end on this: O_DIRECT asks for at most it, and mmap for exactly it."""

GRANULE_BYTES = 128 * KIB
"""One checksum covers this much of a tile. Fixed, so that retuning the block size never invalidates a catalog."""

REGISTRATION_CHUNK_BYTES = GIB
"""The kernel refuses a registered io_uring buffer above 1 GiB (EFAULT), so no slot straddles such a boundary."""


def align_up(value: int, alignment: int) -> int:
    """Smallest multiple of `alignment` that is >= `value`."""
    return -(-value // alignment) * alignment


def granules(length: int) -> int:
    """Number of checksum granules that cover `length` bytes (0 for an empty tile)."""
    return -(-length // GRANULE_BYTES)


def human(value: float) -> str:
    """Bytes for people: binary units, three significant digits."""
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
