"""A private daemon and its load processes, started for one measurement and gone after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from offloadd.client import OffloadError, start_private
from offloadd.core.errors import Code
from offloadd.ctl.bench.client import JOB

TICKS = os.sysconf("SC_CLK_TCK")
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. Rates in bytes per second over the slowest client's time; `cpu` in cores."""

    mode: str
    rate: float
    read_bytes: int
    written_bytes: int
    seconds: float
    cpu: float

    def cpu_per_gbps(self) -> float:
        """Share of a core per GB/s moved."""
        return self.cpu / max(self.rate / 1e9, 1e-9)


class Load:
    """Daemon plus clients on one path."""

    def __init__(
        self, path: str, clients: int, total_bytes: int, host_bytes: int, settings: Mapping[str, object]
    ) -> None:
        self.daemon = start_private([path], {"memory.host_bytes": host_bytes, **settings})
        self._clients = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "offloadd.ctl.bench.client", self.daemon.endpoint),
                    *(str(rank), str(clients), str(total_bytes // clients), str(host_bytes // clients)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(clients)
        ]
        self.facts = [self._answer(client) for client in self._clients]
        self.file = str(Path(path) / "offloadd" / JOB / "tiles.swap")

    def __enter__(self) -> Load:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients:
            if client.stdin is not None:
                client.stdin.close()
        for client in self._clients:
            try:
                client.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                client.kill()
                client.wait()

    def run(self, mode: str, seconds: float) -> Sample:
        """All clients at once."""
        cpu = _cpu_seconds(self.daemon.pid)
        for client in self._clients:
            if client.stdin is not None:
                client.stdin.write(json.dumps({"mode": mode, "seconds": seconds}) + "\n")
                client.stdin.flush()
        answers = [self._answer(client) for client in self._clients]
        used = _cpu_seconds(self.daemon.pid) - cpu
        read, written = (int(sum(a[k] for a in answers)) for k in ("disk_read_bytes", "disk_written_bytes"))
        elapsed = max(a["seconds"] for a in answers)
        return Sample(mode, (read + written) / elapsed, read, written, elapsed, used / elapsed)

    @staticmethod
    def _answer(client: subprocess.Popen[str]) -> Any:
        line = client.stdout.readline() if client.stdout is not None else ""
        if not line:
            raise OffloadError(Code.UNAVAILABLE, "a load process of the benchmark ended early; see its message above")
        return json.loads(line)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
