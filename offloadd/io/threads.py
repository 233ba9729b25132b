"""The `threads` engine: a fixed team of Python threads in preadv and pwritev, which release the GIL.

For machines where io_uring is switched off or forbidden by a container's seccomp profile. Called by the pump, from one
thread; each transfer runs from start to end on one thread of the team, in requests of the file's block size, so the
depth of a device queue is the number of threads, whatever the tuning says.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import offloadd_native
from offloadd.core.records import Direction, Outcome, Transfer
from offloadd.core.units import GRANULE_BYTES, PAGE_BYTES
from offloadd.io.counters import Counters, wants_checksum
from offloadd.io.engine import FileTuning
from offloadd.io.lent import File, Lent

log = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
ATTEMPTS_MAX = 16


def span_checksums(memory: memoryview, length: int) -> bytes:
    """Little-endian u32 of each granule of the first `length` bytes."""
    sums = (
        offloadd_native.crc32c(memory[start : min(start + GRANULE_BYTES, length)])
        for start in range(0, length, GRANULE_BYTES)
    )
    return b"".join(struct.pack("<I", value) for value in sums)


@dataclass(slots=True)
class _Job:
    """One transfer with what a thread needs to run it without looking at the engine."""

    transfer: Transfer
    memory: memoryview
    file: File | None
    started_ns: int
    requests: int = 0
    short: int = 0
    retried: int = 0


class ThreadsEngine:
    """An `Engine` over blocking system calls."""

    name = "threads"
    driver = "preadv"

    def __init__(self, threads: int = 8, transfers_max: int = 1024) -> None:
        self._transfers_max = transfers_max
        self._lent = Lent()
        self._counters = Counters()
        self._inflight = 0
        self._closed = False
        self._work: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ended: deque[tuple[_Job, int, bytes]] = deque()  # appended by threads, taken by `reap`; both are atomic
        self._refused: list[Outcome] = []
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads = [
            threading.Thread(target=self._serve, name=f"offloadd-io-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

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
        return 0 if self._closed else self._transfers_max - self._inflight

    def inflight(self) -> int:
        return self._inflight

    def submit(self, transfers: Sequence[Transfer]) -> int:
        accepted = transfers[: self.free_slots()]
        for transfer in accepted:
            self._counters.submitted += 1
            refusal = self._lent.refusal(transfer)
            if refusal:
                self._counters.count_completion(transfer, refusal)
                self._refused.append(Outcome(transfer.id, refusal))
                continue
            self._lent.hold(transfer, +1)
            self._work.put(self._job(transfer))
        self._inflight += len(accepted)
        self._counters.batches += bool(accepted)
        if self._refused:
            os.eventfd_write(self._eventfd, 1)
        return len(accepted)

    def _job(self, transfer: Transfer) -> _Job:
        memory = memoryview(b"")
        if transfer.direction is not Direction.SYNC:
            span = transfer.span
            memory = self._lent.regions[span.region].memory[span.offset : span.offset + span.length]
        uses_file = transfer.extent is not None and transfer.direction is not Direction.CHECKSUM
        file = self._lent.files[transfer.extent.file] if uses_file and transfer.extent is not None else None
        return _Job(transfer, memory, file, time.monotonic_ns())

    def reap(self) -> list[Outcome]:
        if not self._closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._eventfd)
        outcomes, self._refused = self._refused, []
        while self._ended:
            job, result, checksums = self._ended.popleft()
            transfer = job.transfer
            self._lent.hold(transfer, -1)
            self._counters.count_completion(transfer, result)
            self._counters.device_requests += job.requests
            self._counters.short_continued += job.short
            self._counters.retried += job.retried
            outcomes.append(Outcome(transfer.id, result, checksums, time.monotonic_ns() - job.started_ns))
        self._inflight -= len(outcomes)
        return outcomes

    def close(self) -> None:
        if self._closed:
            return
        for _ in self._threads:
            self._work.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._closed = True
        stuck = sum(thread.is_alive() for thread in self._threads)
        if stuck:
            # Its eventfd stays open: a thread that comes back must not write to a number used by someone else.
            log.error("closing the threads engine with %d threads still in a system call", stuck)
        else:
            os.close(self._eventfd)

    def statistics(self) -> dict[str, int]:
        return self._counters.snapshot(self._inflight)

    # ---- on the team's threads ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (job := self._work.get()) is not None:
            self._ended.append((job, *_run(job)))
            os.eventfd_write(self._eventfd, 1)


def _run(job: _Job) -> tuple[int, bytes]:
    """The whole of one transfer: (bytes or negative errno, checksums)."""
    transfer = job.transfer
    wanted = wants_checksum(transfer)
    try:
        before = wanted and transfer.direction is not Direction.READ
        checksums = span_checksums(job.memory, transfer.length) if before else b""
        if job.file is not None and transfer.extent is not None:
            if transfer.direction is Direction.SYNC:
                os.fdatasync(job.file.fd)
                return 0, b""
            _move(job, job.file, transfer.extent.offset)
        if wanted and not before:
            checksums = span_checksums(job.memory, transfer.length)
    except OSError as error:
        return -(error.errno or errno.EIO), b""
    return transfer.span.length, checksums


def _move(job: _Job, file: File, offset: int) -> None:
    """Read or write the job's memory at `offset`, block by block; OSError says what went wrong."""
    call = os.preadv if job.transfer.direction is Direction.READ else os.pwritev
    at, attempts = 0, 0
    while at < len(job.memory):
        block = job.memory[at : at + file.tuning.block_bytes]
        job.requests += 1
        try:
            moved = call(file.fd, [block], offset + at)
        except BlockingIOError:
            attempts += 1
            if attempts >= ATTEMPTS_MAX:
                raise
            job.retried += 1
            continue
        if moved < len(block):
            job.short += 1
            moved = moved // PAGE_BYTES * PAGE_BYTES  # O_DIRECT cannot continue inside a page
            if moved == 0:
                raise OSError(errno.ENODATA if call is os.preadv else errno.ENOSPC, "no progress")
        at += moved
