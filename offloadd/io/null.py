"""The `null` engine: every transfer succeeds at once and no byte moves.

Measures everything around the I/O, as a benchmark of the daemon itself. Never use it for data: what is read back is
whatever lies in the slot. Checksums are zeros, so that what was "written" verifies when it is "read", unless real ones
are asked for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from offloadd.core.records import Direction, Outcome, Transfer
from offloadd.core.units import granules
from offloadd.io.counters import Counters, wants_checksum
from offloadd.io.engine import FileTuning
from offloadd.io.lent import Lent
from offloadd.io.threads import span_checksums


class NullEngine:
    """An `Engine` that moves nothing."""

    name = "null"
    driver = "none"

    def __init__(self, real_checksums: bool = False, transfers_max: int = 1024) -> None:
        self._real_checksums = real_checksums
        self._transfers_max = transfers_max
        self._lent = Lent()
        self._counters = Counters()
        self._done: list[tuple[Transfer, int, bytes]] = []
        self._closed = False
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._eventfd

    def register_region(self, region: int, memory: memoryview) -> None:
        self._lent.add_region(region, memory)

    def unregister_region(self, region: int) -> None:
        self._lent.remove_region(region)

    def register_file(self, file: int, fd: int, tuning: FileTuning) -> None:
        self._lent.add_file(file, fd, tuning)

    def unregister_file(self, file: int) -> None:
        self._lent.remove_file(file)

    def free_slots(self) -> int:
        return 0 if self._closed else self._transfers_max - len(self._done)

    def inflight(self) -> int:
        return len(self._done)

    def submit(self, transfers: Sequence[Transfer]) -> int:
        accepted = transfers[: self.free_slots()]
        for transfer in accepted:
            self._counters.submitted += 1
            refusal = self._lent.refusal(transfer)
            if refusal:
                self._done.append((transfer, refusal, b""))
                continue
            self._lent.hold(transfer, +1)
            moved = 0 if transfer.direction is Direction.SYNC else transfer.span.length
            self._done.append((transfer, moved, self._checksums(transfer)))
        if accepted:
            self._counters.batches += 1
            os.eventfd_write(self._eventfd, 1)
        return len(accepted)

    def _checksums(self, transfer: Transfer) -> bytes:
        if not wants_checksum(transfer):
            return b""
        if not self._real_checksums:
            return bytes(4 * granules(transfer.length))
        span = transfer.span
        return span_checksums(self._lent.regions[span.region].memory[span.offset :], transfer.length)

    def reap(self) -> list[Outcome]:
        if not self._closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._eventfd)
        done, self._done = self._done, []
        for transfer, result, _ in done:
            if result >= 0:
                self._lent.hold(transfer, -1)
            self._counters.count_completion(transfer, result)
        return [Outcome(transfer.id, result, checksums) for transfer, result, checksums in done]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._eventfd)

    def statistics(self) -> dict[str, int]:
        return self._counters.snapshot(len(self._done))
