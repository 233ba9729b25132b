"""Engines to run the conformance suite on, and the small harness that drives one."""

from __future__ import annotations

import mmap
import os
import select
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from offloadd.core.records import Direction, Extent, Outcome, Span, TileKey, TrafficClass, Transfer
from offloadd.core.units import PAGE_BYTES, align_up
from offloadd.io.engine import Engine, FileTuning
from offloadd.io.null import NullEngine
from offloadd.io.ringcheck import open_driver
from offloadd.io.select import try_driver
from offloadd.io.threads import ThreadsEngine
from offloadd.io.uring import UringEngine
from tests.faults.faulty_engine import FaultyEngine

MOVING = [
    pytest.param("uring-native", marks=pytest.mark.uring),
    pytest.param("uring-liburing", marks=pytest.mark.uring),
    "threads",
    "faulty-threads",
]
ALL = [*MOVING, "null"]
WAIT_SECONDS = 20.0
REGION, FILE = 7, 3


def make_engine(kind: str) -> Engine:
    """A fresh engine; skips with the reason where its driver cannot run."""
    if kind.startswith("uring-"):
        name = kind.removeprefix("uring-")
        trial = try_driver(name)
        if not trial.ok:
            pytest.skip(f"{kind}: {trial.why}")
        return UringEngine(open_driver(name, entries=128), checksum_threads=2, transfers_max=256)
    if kind == "null":
        return NullEngine(transfers_max=256)
    threads = ThreadsEngine(threads=4, transfers_max=256)
    return threads if kind == "threads" else FaultyEngine(threads)


class Rig:
    """One engine with one region and one file lent to it."""

    def __init__(self, engine: Engine, directory: Path, region_bytes: int = 8 << 20, direct: bool = True) -> None:
        self.engine = engine
        self._map = mmap.mmap(-1, region_bytes)
        self.memory = memoryview(self._map)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.fd = open_unnamed(directory, direct)
        self._next_id = 1
        engine.register_region(REGION, self.memory)
        engine.register_file(FILE, self.fd, FileTuning(block_bytes=128 << 10, queue_depth=8))

    def transfer(
        self,
        direction: Direction,
        at: int = 0,
        length: int = PAGE_BYTES,
        *,
        file_at: int | None = None,
        checksum: bool = False,
        region: int = REGION,
        file: int = FILE,
    ) -> Transfer:
        padded = align_up(length, PAGE_BYTES)
        has_file = direction is not Direction.CHECKSUM
        self._next_id += 1
        return Transfer(
            id=self._next_id,
            direction=direction,
            klass=TrafficClass.DEMAND,
            session=0,
            tile=TileKey(0, 0),
            span=Span(region, at, padded),
            extent=Extent(file, at if file_at is None else file_at, padded) if has_file else None,
            length=length,
            checksum=checksum,
        )

    def run(self, *transfers: Transfer) -> dict[int, Outcome]:
        """Submit as slots allow and reap until all have completed; fails on a duplicate or a time-out."""
        waiting, outcomes = list(transfers), {}
        while len(outcomes) < len(transfers):
            del waiting[: self.engine.submit(waiting)]
            for outcome in self.reap():
                assert outcome.id not in outcomes
                outcomes[outcome.id] = outcome
        assert self.engine.inflight() == 0
        return outcomes

    def reap(self) -> list[Outcome]:
        """Wait until the engine's descriptor is readable, then reap."""
        assert readable(self.engine.fileno(), WAIT_SECONDS), "the engine announced nothing in time"
        return self.engine.reap()

    def one(self, transfer: Transfer) -> Outcome:
        return self.run(transfer)[transfer.id]

    def close(self) -> None:
        self.engine.close()
        os.close(self.fd)


@contextmanager
def rig_for(kind: str, directory: Path, **options: object) -> Iterator[Rig]:
    rig = Rig(make_engine(kind), directory, **options)  # type: ignore[arg-type]
    try:
        yield rig
    finally:
        rig.close()


def readable(fd: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def open_unnamed(directory: Path, direct: bool = True) -> int:
    """A file without a name, O_DIRECT where the file system has it."""
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | (os.O_DIRECT if direct else 0), 0o600)
    except OSError:
        fd, path = tempfile.mkstemp(dir=directory)
        os.unlink(path)
        return fd
