"""The `uring` engine: transfers in, device requests through a driver, outcomes out.

Called by the pump, from one thread. It keeps each file's queue depth, checks every completion, continues what was
short, retries what the kernel asks to retry, and has native threads checksum the bytes: after a read, before a write.
Python's cost is per transfer and per batch, never per device request: those live in arrays. It never waits, except in
`close`.

An fdatasync covers the writes that completed before it was submitted, as the system call does; it is not ordered after
writes still in flight.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import offloadd_native
from offloadd.core.records import Direction, Outcome, Transfer
from offloadd.core.units import GRANULE_BYTES, PAGE_BYTES, REGISTRATION_CHUNK_BYTES
from offloadd.io.counters import Counters, wants_checksum
from offloadd.io.drivers import Driver
from offloadd.io.engine import FileTuning
from offloadd.io.lanes import Job, Lane, Requests, cut
from offloadd.io.lent import Lent, Region

log = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
ATTEMPTS_MAX = 16
"""Times one device request is sent, when the kernel keeps answering EAGAIN or EINTR."""
STALLS_MAX = 64
"""Calls in a row in which an idle ring accepts nothing, before the requests fail with EAGAIN."""


class UringEngine:
    """An `Engine` over one io_uring."""

    name = "uring"

    def __init__(self, driver: Driver, checksum_threads: int = 1, transfers_max: int = 1024) -> None:
        self.driver = driver.name
        self._driver = driver
        self._transfers_max = transfers_max
        self._lent = Lent()
        self._lanes: dict[int, Lane] = {}
        self._requests = Requests(driver.entries)
        self._completions = np.zeros(driver.entries, dtype=offloadd_native.URING_COMPLETION)
        self._free_buffers = list(range(driver.buffer_slots - 1, -1, -1))
        self._jobs: list[Job | None] = [None] * transfers_max
        self._free_jobs = list(range(transfers_max - 1, -1, -1))
        self._again: list[int] = []
        """Requests to send once more: refused for lack of room, short, or interrupted. They keep their number."""
        self._stalls = 0
        self._done: list[Outcome] = []
        self._inflight = 0
        self._counters = Counters()
        self._closed = False
        self._pool = offloadd_native.ChecksumPool(checksum_threads, GRANULE_BYTES)
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when there are outcomes that no device or checksum thread will announce."""
        self._epoll = select.epoll()
        for fd in (driver.fileno(), self._pool.fileno(), self._ready):
            self._epoll.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    # ---- what is lent ------------------------------------------------------------------------------------------

    def register_region(self, region: int, memory: memoryview) -> None:
        lent = self._lent.add_region(region, memory)
        for start in range(0, lent.length, REGISTRATION_CHUNK_BYTES):
            length = min(REGISTRATION_CHUNK_BYTES, lent.length - start)
            lent.buffers.append(self._register_chunk(lent.address + start, length))
        if -1 in lent.buffers:
            self._counters.unregistered_regions += 1
            log.info("region %d is not registered with the kernel in full; transfers pin their own pages", region)

    def _register_chunk(self, address: int, length: int) -> int:
        if not self._free_buffers:
            return -1
        slot = self._free_buffers.pop()
        try:
            self._driver.set_buffer(slot, address, length)
        except OSError as error:  # ENOMEM: memlock. EOPNOTSUPP, EFAULT: memory of a kind that cannot be pinned.
            log.debug("registering %d bytes with io_uring failed: %s", length, error)
            self._free_buffers.append(slot)
            return -1
        return slot

    def unregister_region(self, region: int) -> None:
        self._release_buffers(self._lent.remove_region(region))

    def _release_buffers(self, region: Region) -> None:
        for slot in region.buffers:
            if slot >= 0:
                self._driver.set_buffer(slot, 0, 0)
                self._free_buffers.append(slot)

    def register_file(self, file: int, fd: int, tuning: FileTuning) -> None:
        self._lanes[file] = Lane(self._lent.add_file(file, fd, tuning).tuning.queue_depth)

    def unregister_file(self, file: int) -> None:
        self._lent.remove_file(file)
        del self._lanes[file]

    # ---- in ----------------------------------------------------------------------------------------------------

    def free_slots(self) -> int:
        return 0 if self._closed else self._transfers_max - self._inflight

    def inflight(self) -> int:
        return self._inflight

    def submit(self, transfers: Sequence[Transfer]) -> int:
        accepted = transfers[: self.free_slots()]
        for transfer in accepted:
            self._accept(transfer)
        self._issue()
        if self._done:
            os.eventfd_write(self._ready, 1)
        return len(accepted)

    def _accept(self, transfer: Transfer) -> None:
        self._inflight += 1
        self._counters.submitted += 1
        refusal = self._lent.refusal(transfer)
        if refusal:
            self._counters.count_completion(transfer, refusal)
            self._done.append(Outcome(transfer.id, refusal))
            return
        self._lent.hold(transfer, +1)
        slot = self._free_jobs.pop()
        self._jobs[slot] = job = Job(transfer, time.monotonic_ns())
        if wants_checksum(transfer) and transfer.direction is not Direction.READ:
            self._pool.submit(slot, self._lent.address(transfer.span), transfer.length)
        else:
            self._start_io(slot, job)

    def _start_io(self, slot: int, job: Job) -> None:
        transfer = job.transfer
        if transfer.extent is None or (transfer.direction is not Direction.SYNC and not transfer.span.length):
            self._io_ended(slot, job)
            return
        file = self._lent.files[transfer.extent.file]
        operations = cut(transfer, self._lent.regions.get(transfer.span.region), file)
        job.unfinished = len(operations)
        self._lanes[transfer.extent.file].add(slot, operations)

    def _issue(self) -> None:
        """Send what lanes and the retry list hold, as far as depths and the ring allow, in one batch."""
        numbers = np.array(self._again, dtype=np.int64)
        self._again = []
        if fresh := self._take():
            numbers = np.concatenate([numbers, self._requests.assign(fresh)])
        if not len(numbers):
            return
        try:
            sent = self._driver.submit(self._requests.table[numbers])
        except OSError as error:
            for number in numbers.tolist():
                self._fail(number, error.errno or errno.EIO)
            os.eventfd_write(self._ready, 1)
            return
        self._counters.batches += 1
        self._counters.device_requests += sent
        self._again.extend(numbers[sent:].tolist())
        self._stalls = 0 if sent else self._stalls + 1
        if self._again and self._requests.used() == len(self._again):
            self._idle_ring_refused()

    def _take(self) -> list[tuple[Lane, int, NDArray[np.void]]]:
        """What the lanes may send now. Each gets a share of the free numbers: a busy file does not starve others."""
        waiting = [lane for lane in self._lanes.values() if lane.has_waiting()]
        taken: list[tuple[Lane, int, NDArray[np.void]]] = []
        left = self._requests.free()
        share = max(1, left // max(1, len(waiting)))
        for lane in waiting:
            for slot, part in lane.take(min(share, left)):
                taken.append((lane, slot, part))
                left -= len(part)
        return taken

    def _idle_ring_refused(self) -> None:
        """Nothing is in flight whose completion would bring us back here, so ask to be called again, for a while."""
        if self._stalls > STALLS_MAX:
            numbers, self._again, self._stalls = self._again, [], 0
            for number in numbers:
                self._fail(number, errno.EAGAIN)
        os.eventfd_write(self._ready, 1)

    # ---- out ---------------------------------------------------------------------------------------------------

    def reap(self) -> list[Outcome]:
        if not self._closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._ready)
            self._reap_device()
            for slot, checksums in self._pool.reap():
                self._checksummed(slot, checksums)
            self._issue()
        outcomes, self._done = self._done, []
        self._inflight -= len(outcomes)
        return outcomes

    def _reap_device(self) -> None:
        count = len(self._completions)
        while count == len(self._completions):
            count = self._driver.reap(self._completions)
            if count:
                arrived = self._completions[:count]
                self._look_at(arrived["user"].astype(np.int64), arrived["result"].astype(np.int64))

    def _look_at(self, numbers: NDArray[np.int64], results: NDArray[np.int64]) -> None:
        whole = results == self._requests.table["length"][numbers]
        if not whole.all():
            for number, result in zip(numbers[~whole].tolist(), results[~whole].tolist(), strict=True):
                self._look_at_odd(number, result)
            numbers = numbers[whole]
        slots, lane_of = self._requests.release(numbers)
        for slot, count in zip(*np.unique(slots, return_counts=True), strict=True):
            self._finish_requests(int(slot), int(count))
        for lane in lane_of:
            lane.inflight -= 1

    def _look_at_odd(self, number: int, result: int) -> None:
        """One request that did not move all its bytes: continue, retry or fail it."""
        request = self._requests.table[number]
        progress = result // PAGE_BYTES * PAGE_BYTES if result > 0 else 0  # O_DIRECT cannot continue inside a page
        if progress:
            request["file_offset"] += progress
            request["address"] += progress
            request["length"] -= progress
            self._counters.short_continued += 1
            self._again.append(number)
        elif result in (-errno.EAGAIN, -errno.EINTR) and self._requests.attempts[number] < ATTEMPTS_MAX:
            self._requests.attempts[number] += 1
            self._counters.retried += 1
            self._again.append(number)
        elif result < 0:
            self._fail(number, -result)
        else:
            # No progress without an error: a read met the end of the file, a write a device that takes no more.
            self._fail(number, errno.ENOSPC if request["op"] == Direction.WRITE else errno.ENODATA)

    def _fail(self, number: int, error: int) -> None:
        (slot,), (lane,) = self._requests.release(np.array([number], dtype=np.int64))
        lane.inflight -= 1
        job = self._job(int(slot))
        job.error = job.error or error  # the first one is the cause; later ones may be its consequence
        self._finish_requests(int(slot), 1 + lane.forget(int(slot)))

    def _finish_requests(self, slot: int, count: int) -> None:
        job = self._job(slot)
        job.unfinished -= count
        if job.unfinished == 0:
            self._io_ended(slot, job)

    def _io_ended(self, slot: int, job: Job) -> None:
        transfer = job.transfer
        if not job.error and transfer.direction is Direction.READ and transfer.checksum:
            self._pool.submit(slot, self._lent.address(transfer.span), transfer.length)
        else:
            self._complete(slot, job)

    def _checksummed(self, slot: int, checksums: bytes) -> None:
        job = self._job(slot)
        job.checksums = checksums
        if job.transfer.direction is Direction.WRITE:
            self._start_io(slot, job)
        else:
            self._complete(slot, job)

    def _complete(self, slot: int, job: Job) -> None:
        transfer = job.transfer
        moved = 0 if transfer.direction is Direction.SYNC else transfer.span.length
        result = -job.error if job.error else moved
        self._jobs[slot] = None
        self._free_jobs.append(slot)
        self._lent.hold(transfer, -1)
        self._counters.count_completion(transfer, result)
        checksums = b"" if job.error else job.checksums
        self._done.append(Outcome(transfer.id, result, checksums, time.monotonic_ns() - job.started_ns))

    def _job(self, slot: int) -> Job:
        job = self._jobs[slot]
        if job is None:
            raise RuntimeError(f"a completion arrived for transfer slot {slot}, which is empty")
        return job

    # ---- end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._closed:
            return
        kept: list[Outcome] = []
        deadline = time.monotonic() + CLOSE_SECONDS
        while len(self._free_jobs) < self._transfers_max and time.monotonic() < deadline:
            self._epoll.poll(1.0)
            kept += self.reap()
        left = self._transfers_max - len(self._free_jobs)
        if left:
            log.error("closing the io_uring with %d transfers still in flight after %.0f s", left, CLOSE_SECONDS)
        self._closed = True
        self._inflight += len(kept)  # they were not handed out: a last `reap` gives them
        self._done = kept + self._done
        self._epoll.close()
        self._pool.close()
        self._driver.close()
        os.close(self._ready)

    def statistics(self) -> dict[str, int]:
        return self._counters.snapshot(self._inflight)
