"""The engine protocol: the one seam through which bytes move between memory and swap files.

Called by `offloadd.pump` only. An engine owns nothing but its ring or threads: memory regions and file descriptors
are lent to it. Every transfer that `submit` accepts completes exactly once, with every device result looked at:
short transfers are continued, errors are per transfer, never per batch. Implementations: uring (two drivers),
threads, null; tests add a faulty one. All pass tests/conformance/test_engine.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from offloadd.core.records import Outcome, Transfer


@dataclass(frozen=True, slots=True)
class FileTuning:
    """How requests to one file are cut and batched: the calibrated figures of its path."""

    block_bytes: int = 1 << 20
    """Device request size; a transfer is cut into requests of this many bytes."""
    queue_depth: int = 32
    """Device requests in flight per file, at most."""


class Engine(Protocol):
    """Moves bytes. All methods are called from one thread and never block (except `close`)."""

    name: str
    """uring | threads | null."""
    driver: str
    """liburing | native | preadv | none: what does the work underneath."""

    def fileno(self) -> int:
        """A descriptor that polls readable when `reap` has something (an eventfd; `reap` clears it)."""

    def register_region(self, region: int, memory: memoryview) -> None:
        """Lend memory under a number. `memory` is writable, contiguous, page-aligned, and stays mapped until
        `unregister_region`. Failing to pin or register it with the kernel degrades silently to unregistered
        transfers, counted in `statistics()["unregistered_regions"]`. Slow, about 50 ms per GiB: this and
        `unregister_region` may be called in another thread than everything else, one at a time."""

    def unregister_region(self, region: int) -> None:
        """Take memory back. ValueError while a transfer uses it."""

    def register_file(self, file: int, fd: int, tuning: FileTuning) -> None:
        """Lend a descriptor under a number; it stays open until `unregister_file`."""

    def unregister_file(self, file: int) -> None:
        """Take a descriptor back. ValueError while a transfer uses it."""

    def free_slots(self) -> int:
        """How many more transfers `submit` would accept now."""

    def submit(self, transfers: Sequence[Transfer]) -> int:
        """Accept a prefix of `transfers` and start it; returns how many. The rest was not touched: backpressure.
        A transfer that names an unknown region or file, or bytes outside them, is accepted and completes with
        -EINVAL."""

    def reap(self) -> list[Outcome]:
        """Outcomes that have arrived since the last call; never waits."""

    def inflight(self) -> int:
        """Transfers accepted and not yet reaped."""

    def close(self) -> None:
        """Wait for what is in flight (bounded, 30 s), then let go of everything. Idempotent."""

    def statistics(self) -> dict[str, int]:
        """Counters since start: submitted, completed, errors, short_continued, retried, batches, device_requests,
        bytes_read, bytes_written, bytes_checksummed, unregistered_regions, inflight."""
