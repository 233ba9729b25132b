"""What an engine has been lent: memory regions and file descriptors, and which transfers are using them.

Owned by one engine, which asks here whether a transfer is sound before it touches anything. Never maps, opens or closes
anything itself.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

import numpy as np

from offloadd.core.records import Direction, Extent, Span, Transfer
from offloadd.core.units import PAGE_BYTES
from offloadd.io.engine import FileTuning

FILE_OFFSET_MAX = (1 << 63) - 1


@dataclass(slots=True)
class Region:
    """Memory lent under a number."""

    memory: memoryview
    address: int
    length: int
    buffers: list[int] = field(default_factory=list)
    """Registered-buffer slot of each GiB of the region; -1 where the kernel refused."""
    users: int = 0
    """Transfers in flight."""


@dataclass(slots=True)
class File:
    """A descriptor lent under a number."""

    fd: int
    tuning: FileTuning
    users: int = 0


class Lent:
    """Regions and files of one engine."""

    def __init__(self) -> None:
        self.regions: dict[int, Region] = {}
        self.files: dict[int, File] = {}

    def add_region(self, number: int, memory: memoryview) -> Region:
        """ValueError: the number is taken, or the memory is not writable, contiguous and page-aligned."""
        if number in self.regions:
            raise ValueError(f"region {number} is already registered")
        flat = memory.cast("B") if memory.format != "B" or memory.ndim != 1 else memory
        if flat.readonly:
            raise ValueError(f"region {number} is read-only")
        address = int(np.frombuffer(flat, dtype=np.uint8).ctypes.data)
        if address % PAGE_BYTES or flat.nbytes % PAGE_BYTES:
            raise ValueError(f"region {number} does not start and end on a page of {PAGE_BYTES} bytes")
        region = Region(flat, address, flat.nbytes)
        self.regions[number] = region
        return region

    def remove_region(self, number: int) -> Region:
        """ValueError: unknown, or a transfer uses it."""
        region = self.regions.get(number)
        if region is None:
            raise ValueError(f"region {number} is not registered")
        if region.users:
            raise ValueError(f"region {number} is in use by {region.users} transfers")
        return self.regions.pop(number)

    def add_file(self, number: int, fd: int, tuning: FileTuning) -> File:
        """ValueError: the number is taken, or the tuning cannot be."""
        if number in self.files:
            raise ValueError(f"file {number} is already registered")
        if tuning.block_bytes < PAGE_BYTES or tuning.block_bytes % PAGE_BYTES or tuning.queue_depth < 1:
            raise ValueError(f"file {number}: {tuning} is not whole pages and a depth of at least 1")
        file = File(fd, tuning)
        self.files[number] = file
        return file

    def remove_file(self, number: int) -> File:
        """ValueError: unknown, or a transfer uses it."""
        file = self.files.get(number)
        if file is None:
            raise ValueError(f"file {number} is not registered")
        if file.users:
            raise ValueError(f"file {number} is in use by {file.users} transfers")
        return self.files.pop(number)

    def refusal(self, transfer: Transfer) -> int:
        """0 if the transfer is sound, else the negative errno it completes with."""
        sound = (transfer.direction is Direction.SYNC or self._span_is_sound(transfer.span, transfer.length)) and (
            transfer.direction is Direction.CHECKSUM or self._extent_is_sound(transfer.extent, transfer)
        )
        return 0 if sound else -errno.EINVAL

    def _span_is_sound(self, span: Span, length: int) -> bool:
        region = self.regions.get(span.region)
        return (
            region is not None
            and span.offset >= 0
            and 0 <= length <= span.length <= region.length - span.offset
            and span.offset % PAGE_BYTES == 0
            and span.length % PAGE_BYTES == 0
        )

    def _extent_is_sound(self, extent: Extent | None, transfer: Transfer) -> bool:
        if extent is None or extent.file not in self.files:
            return False
        if transfer.direction is Direction.SYNC:
            return True
        return (
            extent.length == transfer.span.length
            and extent.offset % PAGE_BYTES == 0
            and 0 <= extent.offset <= FILE_OFFSET_MAX - extent.length
        )

    def hold(self, transfer: Transfer, delta: int) -> None:
        """Count a sound transfer in (+1) or out (-1) of its region and file."""
        if transfer.direction is not Direction.SYNC:
            self.regions[transfer.span.region].users += delta
        if transfer.extent is not None and transfer.direction is not Direction.CHECKSUM:
            self.files[transfer.extent.file].users += delta

    def address(self, span: Span) -> int:
        """Where a sound span starts."""
        return self.regions[span.region].address + span.offset
