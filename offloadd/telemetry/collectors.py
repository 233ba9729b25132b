"""Metrics: one frozen snapshot of the data path turned into Prometheus metric families.

Called by the telemetry thread (or whoever renders for it), never by the loop. It reads the snapshot and the daemon's
facts and nothing else; it keeps no counters of its own. Names: `offloadd_` prefix, base units, `_total` for counters.
"""

from __future__ import annotations

import errno as errno_names
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from offloadd.core.stats import HISTOGRAM_BOUNDS_NS, Cause, HistogramSnapshot, PathSnapshot, SessionSnapshot, Snapshot

SESSION_LIMIT: Final = 256
"""Sessions with series of their own; the rest share the label `other`."""

_PATH: Final = ["device"]
_PATH_OP: Final = ["device", "op"]
_SESSION: Final = ["session", "job", "rank"]
_BOUNDS: Final = [str(bound / 1e9) for bound in HISTOGRAM_BOUNDS_NS] + ["+Inf"]

_CAUSES: Final = {
    Cause.NOT_PREFETCHED: "not_prefetched",
    Cause.DEVICE_BUSY: "device_busy",
    Cause.SLOTS_EXHAUSTED: "slots_exhausted",
    Cause.WRITEBACK: "writeback",
    Cause.CHECKSUM: "checksum",
}

_COUNTERS: Final[tuple[tuple[str, str, Callable[[SessionSnapshot], float]], ...]] = (
    ("requests", "Requests accepted.", lambda s: s.requests),
    ("replies", "Requests answered.", lambda s: s.replies),
    ("stores", "Tiles handed back with new bytes.", lambda s: s.stores),
    ("flushes", "Flushes asked for.", lambda s: s.flushes),
    ("fetched_bytes", "Bytes lent to the rank.", lambda s: s.bytes_fetched),
    ("stored_bytes", "Bytes handed back changed.", lambda s: s.bytes_stored),
    ("mispredictions", "Fetches that the access plan did not see coming.", lambda s: s.mispredictions),
    ("prefetch_issued", "Tiles loaded ahead of use.", lambda s: s.prefetch_issued),
    ("prefetch_useful", "Prefetched tiles that were fetched.", lambda s: s.prefetch_useful),
    ("prefetch_wasted", "Prefetched tiles evicted before use.", lambda s: s.prefetch_wasted),
    ("spill_errors", "Spills that failed; the tile stayed in memory.", lambda s: s.spill_errors),
    ("plan_cycles", "Times the access plan came round: training steps, as a rule.", lambda s: s.cycles),
)

_GAUGES: Final[tuple[tuple[str, str, Callable[[SessionSnapshot], float]], ...]] = (
    ("parameters", "Parameters whose state the session keeps here.", lambda s: s.parameters),
    (
        "bytes_per_parameter",
        "Bytes read and written per parameter in the last cycle of the plan.",
        lambda s: s.bytes_per_parameter,
    ),
    (
        "io_utilisation",
        "Bytes of the last cycle / (calibrated mixed bandwidth x its duration).",
        lambda s: s.io_utilisation,
    ),
    ("swap_allocated_bytes", "Swap that registered shards take.", lambda s: s.region.swap_allocated),
    ("swap_limit_bytes", "Swap the session was granted.", lambda s: s.region.swap_limit),
)


class Facts(Protocol):
    """What the collector wants to know about the daemon itself."""

    @property
    def version(self) -> str: ...

    @property
    def started_ns(self) -> int:
        """On the snapshot's clock."""


class DaemonCollector(Collector):
    """One collector over one snapshot source."""

    def __init__(self, snapshot: Callable[[], Snapshot], facts: Facts) -> None:
        self._snapshot = snapshot
        self._facts = facts

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering collects nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families, from one snapshot."""
        now = self._snapshot()
        yield from _daemon(now, self._facts)
        yield from _paths(now.paths)
        yield from _sessions(now.sessions)


def render(snapshot: Snapshot, facts: Facts) -> bytes:
    """The text exposition of one snapshot."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(DaemonCollector(lambda: snapshot, facts))
    return generate_latest(registry)


def _daemon(now: Snapshot, facts: Facts) -> Iterator[Metric]:
    info = GaugeMetricFamily("offloadd_build_info", "Always 1.", labels=["version", "io_engine", "io_driver", "kernel"])
    info.add_metric([facts.version, now.engine, now.driver, platform.release()], 1)
    yield info
    active = GaugeMetricFamily("offloadd_io_engine_active", "1 for the engine in use.", labels=["engine"])
    active.add_metric([now.engine], 1)
    yield active
    yield GaugeMetricFamily(
        "offloadd_uptime_seconds", "Since the daemon was ready.", (now.taken_ns - facts.started_ns) / 1e9
    )
    yield GaugeMetricFamily("offloadd_sessions", "Sessions being served.", len(now.sessions))
    yield CounterMetricFamily(
        "offloadd_checksum_failures", "Loads whose bytes differed from what was stored.", now.checksum_failures
    )
    yield CounterMetricFamily(
        "offloadd_pool_alloc_failures", "Fetches given up because no slot came free.", now.slots_exhausted
    )
    yield CounterMetricFamily("offloadd_pump_steps", "Rounds of the data path.", now.steps)
    evictions = CounterMetricFamily("offloadd_evictions", "Tiles that lost their slot.", labels=["reason"])
    for reason, count in now.evictions:
        evictions.add_metric([reason], count)
    yield evictions
    engine = dict(now.engine_counters)
    for name, key, text in (
        ("short_reads", "short_continued", "Device requests that came back short and were continued."),
        ("io_retries", "retried", "Device requests tried again."),
        ("submit_batches", "batches", "Batches submitted to the kernel."),
        ("device_requests", "device_requests", "Requests made of devices."),
        ("checksummed_bytes", "bytes_checksummed", "Bytes checksummed."),
    ):
        yield CounterMetricFamily(f"offloadd_{name}", text, engine.get(key, 0))


def _paths(paths: Sequence[PathSnapshot]) -> Iterator[Metric]:
    moved = CounterMetricFamily("offloadd_transfer_bytes", "Bytes moved to and from a swap path.", labels=_PATH_OP)
    count = CounterMetricFamily("offloadd_transfers", "Transfers that succeeded.", labels=_PATH_OP)
    errors = CounterMetricFamily("offloadd_transfer_errors", "Transfers that failed.", labels=["device", "errno"])
    worn = CounterMetricFamily("offloadd_nvme_written_bytes", "Bytes written: wear.", labels=_PATH)
    inflight = GaugeMetricFamily("offloadd_io_inflight_bytes", "Bytes in flight.", labels=_PATH)
    window = GaugeMetricFamily("offloadd_io_window_bytes", "Bytes that may be in flight.", labels=_PATH)
    duration = HistogramMetricFamily("offloadd_io_duration_seconds", "From submission to completion.", labels=_PATH_OP)
    waiting = HistogramMetricFamily("offloadd_queue_wait_seconds", "From being wanted to submission.", labels=_PATH_OP)
    for path in paths:
        device = str(path.path)
        for op, data, transfers, took, waited in (
            ("read", path.bytes_read, path.reads, path.read_duration, path.read_queue_wait),
            ("write", path.bytes_written, path.writes, path.write_duration, path.write_queue_wait),
        ):
            moved.add_metric([device, op], data)
            count.add_metric([device, op], transfers)
            _add_histogram(duration, [device, op], took)
            _add_histogram(waiting, [device, op], waited)
        for number, failed in path.errors:
            errors.add_metric([device, errno_names.errorcode.get(number, str(number))], failed)
        worn.add_metric([device], path.bytes_written)
        inflight.add_metric([device], path.inflight_bytes)
        window.add_metric([device], path.window_bytes)
    yield from (moved, count, errors, worn, inflight, window, duration, waiting)


def _sessions(sessions: Sequence[SessionSnapshot]) -> Iterator[Metric]:
    groups = [([str(s.session), s.job, str(s.rank)], [s]) for s in sessions[:SESSION_LIMIT]]
    if len(sessions) > SESSION_LIMIT:
        groups.append((["other", "other", "other"], list(sessions[SESSION_LIMIT:])))
    for name, text, value in _COUNTERS:
        counter = CounterMetricFamily(_full(name), text, labels=_SESSION)
        for labels, members in groups:
            counter.add_metric(labels, sum(map(value, members)))
        yield counter
    for name, text, value in _GAUGES:
        gauge = GaugeMetricFamily(f"offloadd_session_{name}", text, labels=_SESSION)
        for labels, members in groups:
            gauge.add_metric(labels, sum(map(value, members)))
        yield gauge
    stall = CounterMetricFamily(
        "offloadd_client_stall_seconds", "Fetches waiting, by cause.", labels=[*_SESSION, "cause"]
    )
    cache = CounterMetricFamily("offloadd_cache_requests", "Fetches of stored tiles.", labels=[*_SESSION, "result"])
    moved = CounterMetricFamily("offloadd_session_transfer_bytes", "Bytes moved for it.", labels=[*_SESSION, "op"])
    pool = GaugeMetricFamily("offloadd_pool_bytes", "Pinned memory by state.", labels=[*_SESSION, "state"])
    for labels, members in groups:
        for cause, word in _CAUSES.items():
            stall.add_metric([*labels, word], sum(s.stall_ns[cause] for s in members) / 1e9)
        for word in ("hits", "late", "misses"):
            result = {"hits": "hit", "late": "late", "misses": "miss"}[word]
            cache.add_metric([*labels, result], sum(getattr(s, word) for s in members))
        moved.add_metric([*labels, "read"], sum(s.bytes_read for s in members))
        moved.add_metric([*labels, "write"], sum(s.bytes_written for s in members))
        for state in ("free", "clean", "dirty", "pinned"):
            pool.add_metric([*labels, state], sum(getattr(s.region, state) for s in members))
    yield from (stall, cache, moved, pool)


def _full(name: str) -> str:
    """Prefetch counters are known without the word session."""
    return f"offloadd_{name}" if name.startswith("prefetch_") else f"offloadd_session_{name}"


def _add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: HistogramSnapshot) -> None:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip(_BOUNDS, histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    family.add_metric(labels, buckets, histogram.total_ns / 1e9)
