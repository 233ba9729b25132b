"""Device requests of the uring engine: cut from transfers, queued per file, numbered while in flight. All in arrays.

Owned by `offloadd.io.uring`. Does no I/O and looks at no result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import offloadd_native
from offloadd.core.records import Direction, Transfer
from offloadd.core.units import REGISTRATION_CHUNK_BYTES
from offloadd.io.lent import File, Region

_OPCODES = {Direction.READ: 0, Direction.WRITE: 1, Direction.SYNC: 2}


@dataclass(slots=True)
class Job:
    """A transfer under way."""

    transfer: Transfer
    started_ns: int
    unfinished: int = 0
    """Device requests not yet completed, sent or not."""
    error: int = 0
    """First errno."""
    checksums: bytes = b""


def cut(transfer: Transfer, region: Region | None, file: File) -> NDArray[np.void]:
    """Device requests of a sound transfer, in file order: neighbours sent in one batch are merged below us."""
    if transfer.direction is Direction.SYNC or transfer.extent is None or region is None:
        operations = np.zeros(1, dtype=offloadd_native.URING_OP)
        operations["op"], operations["fd"], operations["buffer"] = _OPCODES[Direction.SYNC], file.fd, -1
        return operations
    block, total = file.tuning.block_bytes, transfer.span.length
    starts = np.arange(0, total, block, dtype=np.uint64)
    operations = np.zeros(len(starts), dtype=offloadd_native.URING_OP)
    operations["op"] = _OPCODES[transfer.direction]
    operations["fd"] = file.fd
    operations["file_offset"] = starts + np.uint64(transfer.extent.offset)
    operations["address"] = starts + np.uint64(region.address + transfer.span.offset)
    operations["length"] = block
    operations["length"][-1] = total - int(starts[-1])
    operations["buffer"] = _buffers(region, transfer.span.offset, starts, operations["length"])
    return operations


def _buffers(
    region: Region, offset: int, starts: NDArray[np.uint64], lengths: NDArray[np.uint32]
) -> NDArray[np.int32] | int:
    """Registered-buffer slot of each request; -1 for one that straddles two registered chunks or lies in none."""
    first_chunk = offset // REGISTRATION_CHUNK_BYTES
    if first_chunk == (offset + int(starts[-1]) + int(lengths[-1]) - 1) // REGISTRATION_CHUNK_BYTES:
        return region.buffers[first_chunk] if region.buffers else -1
    begins = starts.astype(np.int64) + offset
    first = begins // REGISTRATION_CHUNK_BYTES
    last = (begins + lengths - 1) // REGISTRATION_CHUNK_BYTES
    slots = np.array(region.buffers, dtype=np.int32)[first]
    return np.where(first == last, slots, np.int32(-1)).astype(np.int32)


class Lane:
    """One file's queue of requests and its depth."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.inflight = 0
        self._waiting: deque[tuple[int, NDArray[np.void]]] = deque()

    def has_waiting(self) -> bool:
        """Something is queued and the depth allows to send it."""
        return bool(self._waiting) and self.inflight < self.depth

    def add(self, slot: int, operations: NDArray[np.void]) -> None:
        """Queue the requests of the transfer in `slot`."""
        self._waiting.append((slot, operations))

    def take(self, limit: int) -> list[tuple[int, NDArray[np.void]]]:
        """The next requests that the depth allows, at most `limit`, as (slot, requests); they count as in flight."""
        parts = []
        room = min(limit, self.depth - self.inflight)
        while room > 0 and self._waiting:
            slot, operations = self._waiting.popleft()
            part = operations[:room]
            if len(part) < len(operations):
                self._waiting.appendleft((slot, operations[room:]))
            parts.append((slot, part))
            room -= len(part)
            self.inflight += len(part)
        return parts

    def forget(self, slot: int) -> int:
        """Drop what is queued for a transfer that has failed; returns how many requests that was."""
        dropped = sum(len(operations) for owner, operations in self._waiting if owner == slot)
        if dropped:
            self._waiting = deque(item for item in self._waiting if item[0] != slot)
        return dropped


class Requests:
    """The requests in flight: a number for each, which the driver brings back."""

    def __init__(self, capacity: int) -> None:
        self.table: NDArray[np.void] = np.zeros(capacity, dtype=offloadd_native.URING_OP)
        self.table["user"] = np.arange(capacity)
        self.attempts: NDArray[np.uint8] = np.zeros(capacity, dtype=np.uint8)
        self._slots: NDArray[np.int64] = np.zeros(capacity, dtype=np.int64)
        self._lane: list[Lane | None] = [None] * capacity
        self._free: NDArray[np.int64] = np.arange(capacity, dtype=np.int64)
        self._free_count = capacity

    def used(self) -> int:
        """Numbers given out."""
        return len(self.table) - self._free_count

    def free(self) -> int:
        """Numbers left."""
        return self._free_count

    def assign(self, taken: Sequence[tuple[Lane, int, NDArray[np.void]]]) -> NDArray[np.int64]:
        """Number the requests; returns the numbers, in order."""
        total = sum(len(part) for _, _, part in taken)
        self._free_count -= total
        numbers = self._free[self._free_count : self._free_count + total].copy()
        at = 0
        for lane, slot, part in taken:
            mine = numbers[at : at + len(part)]
            part["user"] = mine
            self.table[mine] = part
            self._slots[mine] = slot
            for number in mine.tolist():
                self._lane[number] = lane
            at += len(part)
        self.attempts[numbers] = 0
        return numbers

    def release(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[Lane]]:
        """Take numbers back; returns the transfer slot and the lane of each."""
        lanes = [lane for number in numbers.tolist() if (lane := self._lane[number]) is not None]
        self._free[self._free_count : self._free_count + len(numbers)] = numbers
        self._free_count += len(numbers)
        return self._slots[numbers], lanes
