"""The counters that every engine keeps; one name for each, so that telemetry need not know which engine runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from offloadd.core.records import Direction, Transfer


@dataclass(slots=True)
class Counters:
    """Since start; see `Engine.statistics`."""

    submitted: int = 0
    completed: int = 0
    errors: int = 0
    short_continued: int = 0
    retried: int = 0
    batches: int = 0
    device_requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_checksummed: int = 0
    unregistered_regions: int = 0

    def count_completion(self, transfer: Transfer, result: int) -> None:
        """One transfer has ended."""
        self.completed += 1
        if result < 0:
            self.errors += 1
            return
        if transfer.direction is Direction.READ:
            self.bytes_read += result
        elif transfer.direction is Direction.WRITE:
            self.bytes_written += result
        if wants_checksum(transfer):
            self.bytes_checksummed += transfer.length

    def snapshot(self, inflight: int) -> dict[str, int]:
        """For `Engine.statistics`."""
        return {**asdict(self), "inflight": inflight}


def wants_checksum(transfer: Transfer) -> bool:
    """A CHECKSUM transfer has no other purpose, whatever its flag says; a SYNC has no bytes."""
    return transfer.direction is Direction.CHECKSUM or (transfer.checksum and transfer.direction is not Direction.SYNC)
