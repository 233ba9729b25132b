"""A deterministic engine for tests: completes transfers on a manual clock and really moves bytes.

Files are bytearrays. Latency, order and faults come from a seed; every accepted transfer completes exactly once.
"""

from __future__ import annotations

import errno
import heapq
import os
import random
from collections.abc import Callable, Sequence

from offloadd.core.clock import ManualClock
from offloadd.core.records import Direction, Outcome, Transfer
from offloadd.core.units import GRANULE_BYTES
from offloadd.io.engine import FileTuning
from offloadd_native import crc32c

Fault = Callable[[Transfer], int]
"""0: no fault; otherwise the negative errno (or short count) that the transfer ends with."""


def checksums_of(data: memoryview) -> bytes:
    """Little-endian crc32c per granule."""
    return b"".join(
        crc32c(data[at : at + GRANULE_BYTES]).to_bytes(4, "little") for at in range(0, len(data), GRANULE_BYTES)
    )


class SimEngine:
    """See offloadd/io/engine.py for the contract."""

    name = "sim"
    driver = "none"

    def __init__(
        self,
        clock: ManualClock,
        slots: int = 64,
        latency_ns: tuple[int, int] = (100_000, 100_000),
        seed: int = 0,
        move_bytes: bool = True,
    ) -> None:
        self.clock = clock
        self.files: dict[int, bytearray] = {}
        self.regions: dict[int, memoryview] = {}
        self.fault: Fault = lambda transfer: 0
        self.log: list[Transfer] = []
        self.inflight_peak: dict[int, int] = {}
        self._slots = slots
        self._latency = latency_ns
        self._random = random.Random(seed)
        self._move = move_bytes
        self._queue: list[tuple[int, int, Transfer]] = []
        self._order = 0
        self._counters = {"submitted": 0, "completed": 0, "errors": 0}
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def register_region(self, region: int, memory: memoryview) -> None:
        self.regions[region] = memory

    def unregister_region(self, region: int) -> None:
        if any(t.span.region == region for _, _, t in self._queue):
            raise ValueError(f"region {region} is in use")
        del self.regions[region]

    def register_file(self, file: int, fd: int, tuning: FileTuning) -> None:
        self.files.setdefault(file, bytearray())

    def unregister_file(self, file: int) -> None:
        if any(t.extent is not None and t.extent.file == file for _, _, t in self._queue):
            raise ValueError(f"file {file} is in use")
        del self.files[file]

    def free_slots(self) -> int:
        return self._slots - len(self._queue)

    def submit(self, transfers: Sequence[Transfer]) -> int:
        accepted = transfers[: self.free_slots()]
        for transfer in accepted:
            self._order += 1
            due = self.clock.now_ns() + self._random.randint(*self._latency)
            heapq.heappush(self._queue, (due, self._order, transfer))
            self._counters["submitted"] += 1
            if self._move:
                self.log.append(transfer)
        return len(accepted)

    def reap(self) -> list[Outcome]:
        done = []
        while self._queue and self._queue[0][0] <= self.clock.now_ns():
            _, _, transfer = heapq.heappop(self._queue)
            done.append(self._complete(transfer))
            self._counters["completed"] += 1
        return done

    def inflight(self) -> int:
        return len(self._queue)

    def next_due_ns(self) -> int | None:
        return self._queue[0][0] if self._queue else None

    def close(self) -> None:
        os.close(self._fd)

    def statistics(self) -> dict[str, int]:
        return {**self._counters, "inflight": len(self._queue)}

    def grow(self, file: int, length: int) -> None:
        """What fallocate would do."""
        data = self.files.setdefault(file, bytearray())
        if self._move:
            data.extend(bytes(max(0, length - len(data))))

    def _complete(self, transfer: Transfer) -> Outcome:
        fault = self.fault(transfer)
        if fault:
            self._counters["errors"] += 1
            return Outcome(transfer.id, fault)
        if not self._move:
            return Outcome(transfer.id, transfer.span.length)
        memory = self.regions.get(transfer.span.region)
        if memory is None:
            return Outcome(transfer.id, -errno.EINVAL)
        span = memory[transfer.span.offset : transfer.span.offset + transfer.span.length]
        if transfer.extent is not None and transfer.direction is not Direction.SYNC:
            data = self.files[transfer.extent.file]
            start, end = transfer.extent.offset, transfer.extent.offset + transfer.extent.length
            if end > len(data) or transfer.extent.length != transfer.span.length:
                return Outcome(transfer.id, -errno.EINVAL)
            if transfer.direction is Direction.READ:
                span[:] = data[start:end]
            else:
                data[start:end] = span
        sums = checksums_of(span[: transfer.length]) if transfer.checksum else b""
        return Outcome(transfer.id, transfer.span.length, sums, 1000)
