"""Counters and histograms that the rooms keep, and the frozen snapshot that telemetry and control read.

Owned by `offloadd.pump`, written from the loop's thread only. Plain integers and lists: counting costs tens of
nanoseconds. It never formats, never locks, and never talks to an exporter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

HISTOGRAM_BOUNDS_NS: Final = (*(20_000 << i for i in range(18)), 5_000_000_000)
"""Upper bounds, doubling from 20 us; the last finite one is 5 s."""


class Cause(IntEnum):
    """What a fetch waited for."""

    NOT_PREFETCHED = 0
    """Cold and nobody had asked for it before: the load itself."""
    DEVICE_BUSY = 1
    """Its load was already under way."""
    SLOTS_EXHAUSTED = 2
    """Memory was leased out or being filled."""
    WRITEBACK = 3
    """A spill had to end first."""
    CHECKSUM = 4
    """The store before it was still being checksummed."""


class Histogram:
    """Fixed buckets; `record` is one bisect."""

    __slots__ = ("counts", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(HISTOGRAM_BOUNDS_NS) + 1)
        self.total_ns = 0

    def record(self, value_ns: int) -> None:
        self.counts[bisect_left(HISTOGRAM_BOUNDS_NS, value_ns)] += 1
        self.total_ns += value_ns

    def freeze(self) -> HistogramSnapshot:
        return HistogramSnapshot(tuple(self.counts), self.total_ns)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Counts per bucket (not cumulative; the last one is above every bound) and the sum."""

    counts: tuple[int, ...]
    total_ns: int


@dataclass(slots=True)
class PathStats:
    """One swap path (or one session): what moved. Index 0 is read, 1 is write."""

    bytes_moved: list[int] = field(default_factory=lambda: [0, 0])
    transfers: list[int] = field(default_factory=lambda: [0, 0])
    errors: dict[int, int] = field(default_factory=dict)
    durations: tuple[Histogram, Histogram] = field(default_factory=lambda: (Histogram(), Histogram()))
    queue_wait: tuple[Histogram, Histogram] = field(default_factory=lambda: (Histogram(), Histogram()))
    bandwidth: float = 0.0
    """Calibrated mixed bandwidth in B/s; 0 while unknown."""


@dataclass(slots=True)
class SessionStats:
    """One session's account."""

    job: str = ""
    rank: int = 0
    parameters: int = 0
    requests: int = 0
    replies: int = 0
    hits: int = 0
    late: int = 0
    misses: int = 0
    stores: int = 0
    flushes: int = 0
    bytes_fetched: int = 0
    bytes_stored: int = 0
    bytes_moved: list[int] = field(default_factory=lambda: [0, 0])
    stall_ns: list[int] = field(default_factory=lambda: [0] * len(Cause))
    mispredictions: int = 0
    prefetch_issued: int = 0
    prefetch_useful: int = 0
    prefetch_wasted: int = 0
    spill_errors: int = 0
    cycles: int = 0
    """Times the access plan came round: one training step, as a rule."""
    cycle_started_ns: int = 0
    cycle_base_bytes: int = 0
    cycle_bytes: int = 0
    """Read and written during the last whole cycle."""
    cycle_ns: int = 0
    cycle_steps: int = 1
    """Training steps that a cycle covers."""

    def turn(self, cycles: int, steps: int, now_ns: int) -> None:
        """The plan came round: close the books of one cycle."""
        moved = self.bytes_moved[0] + self.bytes_moved[1]
        self.cycle_bytes = moved - self.cycle_base_bytes
        self.cycle_ns = now_ns - self.cycle_started_ns
        self.cycle_base_bytes, self.cycle_started_ns = moved, now_ns
        self.cycles = cycles
        self.cycle_steps = steps


@dataclass(frozen=True, slots=True)
class RegionSnapshot:
    """Bytes of one session's memory and swap, by state."""

    free: int
    clean: int
    dirty: int
    pinned: int
    swap_allocated: int
    swap_limit: int


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """`SessionStats` and its region at one instant."""

    session: int
    job: str
    rank: int
    parameters: int
    requests: int
    replies: int
    hits: int
    late: int
    misses: int
    stores: int
    flushes: int
    bytes_fetched: int
    bytes_stored: int
    bytes_read: int
    bytes_written: int
    stall_ns: tuple[int, ...]
    mispredictions: int
    prefetch_issued: int
    prefetch_useful: int
    prefetch_wasted: int
    spill_errors: int
    cycles: int
    bytes_per_parameter: float
    """Bytes read and written per parameter and training step in the last cycle."""
    io_utilisation: float
    """Bytes of the last cycle / (calibrated mixed bandwidth of all paths x its duration); 0 while unknown."""
    region: RegionSnapshot


@dataclass(frozen=True, slots=True)
class PathSnapshot:
    """`PathStats` at one instant."""

    path: int
    bytes_read: int
    bytes_written: int
    reads: int
    writes: int
    errors: tuple[tuple[int, int], ...]
    read_duration: HistogramSnapshot
    write_duration: HistogramSnapshot
    read_queue_wait: HistogramSnapshot
    write_queue_wait: HistogramSnapshot
    inflight_bytes: int
    window_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything, at one instant."""

    taken_ns: int
    engine: str
    driver: str
    engine_counters: tuple[tuple[str, int], ...]
    sessions: tuple[SessionSnapshot, ...]
    paths: tuple[PathSnapshot, ...]
    evictions: tuple[tuple[str, int], ...]
    checksum_failures: int
    slots_exhausted: int
    steps: int


class Stats:
    """All counters of the daemon's data path."""

    def __init__(self) -> None:
        self.sessions: dict[int, SessionStats] = {}
        self.paths: dict[int, PathStats] = {}
        self.evictions: dict[str, int] = {"demand": 0, "prefetch": 0, "window": 0, "drop": 0}
        self.checksum_failures = 0
        self.slots_exhausted = 0
        self.steps = 0

    def session(self, session: int) -> SessionStats:
        """The session's counters, made on first use."""
        found = self.sessions.get(session)
        if found is None:
            found = self.sessions[session] = SessionStats()
        return found

    def path(self, path: int) -> PathStats:
        """The path's counters, made on first use."""
        found = self.paths.get(path)
        if found is None:
            found = self.paths[path] = PathStats()
        return found

    def set_bandwidth(self, path: int, bytes_per_second: float) -> None:
        """Tell the calibrated mixed bandwidth of a path, for `io_utilisation`."""
        self.path(path).bandwidth = bytes_per_second

    def snapshot(
        self,
        now_ns: int,
        engine: tuple[str, str, Mapping[str, int]],
        regions: Mapping[int, RegionSnapshot],
        windows: Mapping[int, tuple[int, int]],
    ) -> Snapshot:
        """Freeze. `windows` maps a path to (bytes in flight, limit)."""
        bandwidth = sum(p.bandwidth for p in self.paths.values())
        return Snapshot(
            taken_ns=now_ns,
            engine=engine[0],
            driver=engine[1],
            engine_counters=tuple(sorted(engine[2].items())),
            sessions=tuple(
                _freeze_session(number, stats, regions[number], bandwidth)
                for number, stats in self.sessions.items()
                if number in regions
            ),
            paths=tuple(_freeze_path(n, p, windows.get(n, (0, 0))) for n, p in sorted(self.paths.items())),
            evictions=tuple(sorted(self.evictions.items())),
            checksum_failures=self.checksum_failures,
            slots_exhausted=self.slots_exhausted,
            steps=self.steps,
        )


def _freeze_session(number: int, stats: SessionStats, region: RegionSnapshot, bandwidth: float) -> SessionSnapshot:
    busy = bandwidth * stats.cycle_ns / 1e9
    return SessionSnapshot(
        session=number,
        job=stats.job,
        rank=stats.rank,
        parameters=stats.parameters,
        requests=stats.requests,
        replies=stats.replies,
        hits=stats.hits,
        late=stats.late,
        misses=stats.misses,
        stores=stats.stores,
        flushes=stats.flushes,
        bytes_fetched=stats.bytes_fetched,
        bytes_stored=stats.bytes_stored,
        bytes_read=stats.bytes_moved[0],
        bytes_written=stats.bytes_moved[1],
        stall_ns=tuple(stats.stall_ns),
        mispredictions=stats.mispredictions,
        prefetch_issued=stats.prefetch_issued,
        prefetch_useful=stats.prefetch_useful,
        prefetch_wasted=stats.prefetch_wasted,
        spill_errors=stats.spill_errors,
        cycles=stats.cycles,
        bytes_per_parameter=stats.cycle_bytes / stats.cycle_steps / stats.parameters if stats.parameters else 0.0,
        io_utilisation=stats.cycle_bytes / busy if busy else 0.0,
        region=region,
    )


def _freeze_path(number: int, path: PathStats, window: Sequence[int]) -> PathSnapshot:
    return PathSnapshot(
        path=number,
        bytes_read=path.bytes_moved[0],
        bytes_written=path.bytes_moved[1],
        reads=path.transfers[0],
        writes=path.transfers[1],
        errors=tuple(sorted(path.errors.items())),
        read_duration=path.durations[0].freeze(),
        write_duration=path.durations[1].freeze(),
        read_queue_wait=path.queue_wait[0].freeze(),
        write_queue_wait=path.queue_wait[1].freeze(),
        inflight_bytes=window[0],
        window_bytes=window[1],
    )
