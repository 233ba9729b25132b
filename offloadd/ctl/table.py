"""The status document as a box for people: paths with bandwidth, memory, sessions with bytes and stalls."""

from __future__ import annotations

from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from offloadd.core.units import human


def show(document: dict[str, Any], to: TextIO) -> None:
    """Print the document. Colour and box only where `to` is a terminal, as rich decides."""
    console = Console(file=to, highlight=False)
    engine = document["engine"]
    state = "ready" if document["ready"] else "not ready"
    console.print(
        f"offloadd {document['version']}  pid {document['pid']}  {state}  up {document['uptime_seconds']:.0f} s  "
        f"engine {engine['name']}/{engine['driver']}  checksums {'on' if engine['checksums'] else 'off'}"
    )
    for note in engine["notes"]:
        console.print(f"  {note}")
    for what in ("memory", "swap"):
        figures = document[what]
        console.print(f"{what}: {human(figures['granted_bytes'])} of {human(figures['limit_bytes'])} granted")
    console.print(_paths(document["paths"]))
    console.print(_sessions(document["sessions"]))


def _paths(paths: list[dict[str, Any]]) -> Table:
    table = Table(title="swap paths", title_justify="left")
    for name in ("path", "fs", "direct", "block x depth", "read/write/mixed GB/s", "read", "written", "in flight"):
        table.add_column(name)
    for path in paths:
        rates = path["calibrated"]
        table.add_row(
            path["directory"],
            path["filesystem"],
            "yes" if path["direct"] else "no",
            f"{human(path['block_bytes'])} x {path['queue_depth']}",
            "/".join(f"{rates[key] / 1e9:.2f}" for key in ("read_bps", "write_bps", "mixed_bps")),
            human(path["bytes_read"]),
            human(path["bytes_written"]),
            human(path["inflight_bytes"]),
        )
    return table


def _sessions(sessions: list[dict[str, Any]]) -> Table:
    table = Table(title="sessions", title_justify="left")
    for name in ("job", "rank", "pid", "channel", "memory", "swap", "read", "written", "MB/s", "hit", "stalled"):
        table.add_column(name, justify="left" if name in ("job", "channel") else "right")
    for one in sessions:
        read, written = one.get("disk_read_bytes", 0), one.get("disk_written_bytes", 0)
        fetches = one.get("hits", 0) + one.get("late", 0) + one.get("misses", 0)
        table.add_row(
            one["job"],
            str(one["rank"]),
            str(one["pid"] or "-"),
            one["channel"],
            human(one["host_bytes"]),
            human(one.get("swap_allocated_bytes", 0)),
            human(read),
            human(written),
            f"{(read + written) / one['age_seconds'] / 1e6:.0f}",
            f"{one.get('hits', 0) / fetches:.0%}" if fetches else "-",
            f"{one.get('stall_share', 0.0):.1%}",
        )
    return table
