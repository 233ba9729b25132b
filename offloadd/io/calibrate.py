"""How fast a swap path is, and with which block size and queue depth: measured through the real engine.

Called at daemon start for paths without a stored measurement, and by `offloadctl tune`. Bounded in time and bytes;
writes one scratch file that leaves no trace. The caller stores the result.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import Direction, Extent, Span, TileKey, TrafficClass, Transfer
from offloadd.core.units import GIB, KIB, MIB
from offloadd.io.engine import Engine, FileTuning
from offloadd.io.mounts import direct_works, free_bytes, scratch_file

CANDIDATES = (
    FileTuning(128 * KIB, 32),
    FileTuning(128 * KIB, 128),
    FileTuning(512 * KIB, 32),
    FileTuning(MIB, 16),
    FileTuning(MIB, 32),
    FileTuning(4 * MIB, 8),
)
TRANSFER_BYTES = 4 * MIB
"""Size of the transfers measured with: that of a tile. Small enough that measuring stays within what the daemon may
use beside its arenas."""
WINDOW = 8
"""Transfers in flight."""
REGION, FILE = 2**31 - 1, 2**31 - 1
"""Numbers lent for the measurement only; the daemon counts up from 0."""
WAIT_SECONDS = 20.0
NEARLY = 0.93
"""Of the fastest: closer than what a short measurement can tell apart."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The figures of one path. Bandwidths in bytes per second; `when` in seconds since the epoch."""

    block_bytes: int
    queue_depth: int
    read_bps: float
    write_bps: float
    mixed_bps: float
    """Reads and writes together, half of each."""
    direct: bool
    when: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Calibration:
        """ValueError: not such a record."""
        try:
            return cls(
                int(fields["block_bytes"]),
                int(fields["queue_depth"]),
                float(fields["read_bps"]),
                float(fields["write_bps"]),
                float(fields["mixed_bps"]),
                bool(fields["direct"]),
                float(fields["when"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a calibration: {error}") from error

    def tuning(self) -> FileTuning:
        return FileTuning(self.block_bytes, self.queue_depth)


def calibrate(engine: Engine, directory: str, seconds: float = 2.0, bytes_max: int = 512 * MIB) -> Calibration:
    """Measure one path with an engine that nothing else uses. OffloadError NO_SPACE, IO_ERROR."""
    span = min(bytes_max, GIB, free_bytes(directory) // 2) // TRANSFER_BYTES * TRANSFER_BYTES
    if span < 2 * TRANSFER_BYTES:
        raise OffloadError(
            Code.NO_SPACE,
            f"swap path {directory} has too little room to be measured; it needs {4 * TRANSFER_BYTES} bytes",
        )
    direct = direct_works(directory)
    # Half for choosing, the rest for the three figures; one warm-up write lays the file out.
    choosing, each = seconds / 4 / len(CANDIDATES), seconds / 8
    with _bench(engine, directory, direct, span) as bench:
        bench.lay_out(each)
        rates = dict.fromkeys(CANDIDATES, 0.0)
        # There and back, so that a device which slows down meanwhile is unfair to none.
        for tuning in (*CANDIDATES, *reversed(CANDIDATES)):
            rates[tuning] += bench.rate(tuning, (Direction.READ, Direction.WRITE), choosing)
        best = choose(rates)
        return Calibration(
            best.block_bytes,
            best.queue_depth,
            bench.rate(best, (Direction.READ,), each),
            bench.rate(best, (Direction.WRITE,), each),
            bench.rate(best, (Direction.READ, Direction.WRITE), each),
            direct,
            time.time(),
        )


def choose(rates: Mapping[FileTuning, float]) -> FileTuning:
    """The largest block among those that are nearly as fast as the fastest: each block costs processor time."""
    limit = NEARLY * max(rates.values())
    return max((t for t, rate in rates.items() if rate >= limit), key=lambda t: (t.block_bytes, rates[t]))


@contextlib.contextmanager
def _bench(engine: Engine, directory: str, direct: bool, span: int) -> Iterator[_Bench]:
    memory = mmap.mmap(-1, WINDOW * TRANSFER_BYTES)
    view = memoryview(memory)
    content = os.urandom(TRANSFER_BYTES)  # some devices compress
    for start in range(0, len(view), TRANSFER_BYTES):
        view[start : start + TRANSFER_BYTES] = content
    try:
        with scratch_file(directory, direct) as fd:
            engine.register_region(REGION, view)
            try:
                yield _Bench(engine, directory, fd, span)
            finally:
                engine.unregister_region(REGION)
    finally:
        view.release()
        # BufferError: an engine's view still lives; it dies with the next garbage collection, and the mapping with it.
        with contextlib.suppress(BufferError):
            memory.close()


class _Bench:
    """One scratch file and one window of memory."""

    def __init__(self, engine: Engine, directory: str, fd: int, span: int) -> None:
        self._engine = engine
        self._directory = directory
        self._fd = fd
        self._length = span
        self._next = 0
        self._poller = select.poll()
        self._poller.register(engine.fileno(), select.POLLIN)

    def lay_out(self, seconds: float) -> None:
        """Allocate the file and write as much of it as the time allows; what was not written is not measured."""
        try:
            os.posix_fallocate(self._fd, 0, self._length)
        except OSError as error:
            raise self._error(error.errno or errno.EIO) from error
        self._next = 0
        self.rate(FileTuning(MIB, 32), (Direction.WRITE,), seconds, bytes_max=self._length)
        self._length = max(2 * TRANSFER_BYTES, min(self._length, self._next * TRANSFER_BYTES))

    def rate(
        self, tuning: FileTuning, directions: tuple[Direction, ...], seconds: float, bytes_max: int = 1 << 62
    ) -> float:
        """Bytes per second at this tuning, directions taken in turn."""
        engine, moved, issued = self._engine, 0, 0
        engine.register_file(FILE, self._fd, tuning)
        started = time.perf_counter()
        free = list(range(WINDOW))
        try:
            while True:
                running = time.perf_counter() - started < seconds and issued * TRANSFER_BYTES < bytes_max
                while running and free:
                    window = free.pop()
                    engine.submit([self._transfer(window, directions[issued % len(directions)])])
                    issued += 1
                if not running and len(free) == WINDOW:
                    break
                for window, result in self._reap():
                    free.append(window)
                    moved += result
        finally:
            while engine.inflight():
                self._reap_any()
            engine.unregister_file(FILE)
        return moved / max(time.perf_counter() - started, 1e-9)

    def _transfer(self, window: int, direction: Direction) -> Transfer:
        at = self._next * TRANSFER_BYTES % self._length
        self._next += 1
        return Transfer(
            id=window,
            direction=direction,
            klass=TrafficClass.EXPORT,
            session=0,
            tile=TileKey(0, 0),
            span=Span(REGION, window * TRANSFER_BYTES, TRANSFER_BYTES),
            extent=Extent(FILE, at, TRANSFER_BYTES),
            length=TRANSFER_BYTES,
            checksum=False,
        )

    def _reap(self) -> Iterator[tuple[int, int]]:
        for window, result in self._reap_any():
            if result < 0:
                raise self._error(-result)
            yield window, result

    def _reap_any(self) -> list[tuple[int, int]]:
        if not self._poller.poll(WAIT_SECONDS * 1000):
            raise self._error(errno.ETIMEDOUT)
        return [(outcome.id, outcome.result) for outcome in self._engine.reap()]

    def _error(self, error: int) -> OffloadError:
        code = Code.NO_SPACE if error in (errno.ENOSPC, errno.EDQUOT) else Code.IO_ERROR
        name = errno.errorcode.get(error, str(error))
        return OffloadError(code, f"measuring swap path {self._directory} failed ({name}); check the device")


def assumed(direct: bool, block_bytes: int = MIB, queue_depth: int = 32) -> Calibration:
    """Figures for a path that is not measured: a modest NVMe device."""
    return Calibration(block_bytes, queue_depth, 1e9, 1e9, 1e9, direct, 0.0)


def overridden(measured: Calibration, block_bytes: int, queue_depth: int) -> Calibration:
    """The configuration's figures where it gives any (not 0), the measured ones elsewhere."""
    return replace(
        measured,
        block_bytes=block_bytes or measured.block_bytes,
        queue_depth=queue_depth or measured.queue_depth,
    )
