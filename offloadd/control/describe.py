"""The status document: what `offloadctl status` shows, as plain data with a schema_version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offloadd.core.stats import Cause, PathSnapshot, SessionSnapshot, Snapshot
from offloadd.session.registry import Registry, Session

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What does not change about a swap path while the daemon runs."""

    directory: str
    direct: bool
    filesystem: str
    block_bytes: int
    queue_depth: int
    read_bps: float
    write_bps: float
    mixed_bps: float


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """What does not change about the daemon while it runs."""

    version: str
    pid: int
    endpoint: str
    listen: str
    metrics: str
    engine: str
    driver: str
    engine_notes: tuple[str, ...]
    checksums: bool
    paths: tuple[PathFacts, ...]
    started_ns: int


def describe(facts: DaemonFacts, registry: Registry, snapshot: Snapshot, ready: bool) -> dict[str, Any]:
    """JSON-ready; sizes in bytes, times in seconds."""
    by_session = {s.session: s for s in snapshot.sessions}
    by_path = {p.path: p for p in snapshot.paths}
    return {
        "schema_version": SCHEMA_VERSION,
        "version": facts.version,
        "pid": facts.pid,
        "endpoint": facts.endpoint,
        "listen": facts.listen,
        "metrics": facts.metrics,
        "ready": ready,
        "uptime_seconds": (snapshot.taken_ns - facts.started_ns) / 1e9,
        "engine": {
            "name": facts.engine,
            "driver": facts.driver,
            "notes": list(facts.engine_notes),
            "checksums": facts.checksums,
            "counters": dict(snapshot.engine_counters),
        },
        "memory": {"limit_bytes": registry.host.total, "granted_bytes": registry.host.used},
        "swap": {"limit_bytes": registry.swap.total, "granted_bytes": registry.swap.used},
        "paths": [_path(index, path, by_path.get(index)) for index, path in enumerate(facts.paths)],
        "sessions": [_session(s, by_session.get(s.id), snapshot.taken_ns) for s in registry.sessions()],
        "checksum_failures": snapshot.checksum_failures,
    }


def _path(index: int, facts: PathFacts, now: PathSnapshot | None) -> dict[str, Any]:
    return {
        "index": index,
        "directory": facts.directory,
        "direct": facts.direct,
        "filesystem": facts.filesystem,
        "block_bytes": facts.block_bytes,
        "queue_depth": facts.queue_depth,
        "calibrated": {"read_bps": facts.read_bps, "write_bps": facts.write_bps, "mixed_bps": facts.mixed_bps},
        "bytes_read": now.bytes_read if now else 0,
        "bytes_written": now.bytes_written if now else 0,
        "inflight_bytes": now.inflight_bytes if now else 0,
        "errors": {str(number): count for number, count in now.errors} if now else {},
    }


def _session(session: Session, now: SessionSnapshot | None, taken_ns: int) -> dict[str, Any]:
    age = max(1e-9, (taken_ns - session.opened_ns) / 1e9)
    out: dict[str, Any] = {
        "session": session.id,
        "job": session.job.name,
        "rank": session.rank,
        "pid": session.peer.pid if session.peer else 0,
        "uid": session.job.uid,
        "channel": "ring" if session.peer else "stream",
        "host_bytes": session.host_bytes,
        "swap_bytes": session.swap_bytes,
        "tile_bytes": session.tile_bytes,
        "age_seconds": age,
    }
    if now is not None:
        out |= counters(now)
        out["stall_share"] = sum(now.stall_ns) / 1e9 / age
    return out


def counters(now: SessionSnapshot) -> dict[str, float]:
    """One session's counters, flat, for `SessionStatistics` and the status document."""
    stalls = {f"stall_seconds_{cause.name.lower()}": now.stall_ns[cause] / 1e9 for cause in Cause}
    region = now.region
    return stalls | {
        "disk_read_bytes": now.bytes_read,
        "disk_written_bytes": now.bytes_written,
        "bytes_fetched": now.bytes_fetched,
        "bytes_stored": now.bytes_stored,
        "hits": now.hits,
        "late": now.late,
        "misses": now.misses,
        "mispredictions": now.mispredictions,
        "prefetch_issued": now.prefetch_issued,
        "prefetch_useful": now.prefetch_useful,
        "prefetch_wasted": now.prefetch_wasted,
        "spill_errors": now.spill_errors,
        "cycles": now.cycles,
        "bytes_per_parameter": now.bytes_per_parameter,
        "io_utilisation": now.io_utilisation,
        "region_free_bytes": region.free,
        "region_clean_bytes": region.clean,
        "region_dirty_bytes": region.dirty,
        "region_pinned_bytes": region.pinned,
        "swap_allocated_bytes": region.swap_allocated,
    }
