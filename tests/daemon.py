"""A real daemon for tests: its own process, sockets and swap directory under a temporary directory."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offloadd.client import ClientSession, connect

ROOT = Path(__file__).resolve().parent.parent
FAST = {"io.calibrate_seconds": "0", "telemetry.listen": "127.0.0.1:0", "lifetime.drain_seconds": "1"}
"""No measuring: tests need figures that never change."""


@dataclass
class Daemon:
    """One running daemon."""

    process: subprocess.Popen[bytes]
    directory: Path
    listen: bool

    @property
    def endpoint(self) -> str:
        return f"unix://{self.directory}/o.sock"

    @property
    def token_file(self) -> str:
        return f"{self.directory}/o.sock.token"

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def status(self) -> dict[str, object]:
        command = [sys.executable, "-m", "offloadd.ctl.main", "status", "--endpoint", self.endpoint, "-o", "json"]
        return dict(json.loads(subprocess.run(command, capture_output=True, timeout=30, check=True).stdout))

    def stream_endpoint(self) -> str:
        return str(self.status()["listen"])

    def session(self, channel: str = "ring", **options: object) -> ClientSession:
        """Connect over the ring or the stream, and reserve with the options that belong there."""
        reserve = {key: options.pop(key) for key in list(options) if key in RESERVE_OPTIONS}
        options.setdefault("timeout_s", 20.0)
        where, token = (self.endpoint, None) if channel == "ring" else (self.stream_endpoint(), self.token_file)
        session = connect(where, token_file=token, **options)  # type: ignore[arg-type]
        session.reserve(**reserve)  # type: ignore[arg-type]
        return session

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def stop(self, timeout_s: float = 20) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


RESERVE_OPTIONS = frozenset({"host_bytes", "swap_bytes", "tile_bytes", "pinned_tiles", "fingerprint"})


def start(
    directory: Path, restrictions: tuple[str, ...] = (), *, module: str = "offloadd", **settings: object
) -> Daemon:
    """Start a daemon and return when it is ready, or raise with its log. Settings are 'section__field'; restrictions
    are those of tests.restrict; `module` is what python runs."""
    swap = directory / "swap"
    swap.mkdir(exist_ok=True)
    flags = {"control.socket": f"{directory}/o.sock", "swap.paths": str(swap), "memory.host_bytes": "64MiB", **FAST}
    flags |= {key.replace("__", "."): value for key, value in settings.items()}
    ready_read, ready_write = os.pipe()
    log = directory / "log"
    command = [sys.executable, "-m", "tests.restrict", *restrictions, "--"] if restrictions else []
    command += [sys.executable, "-m", module, "serve", f"--ready-fd={ready_write}", f"--log-file={log}"]
    command += [f"--{key}={value}" for key, value in flags.items()]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OFFLOADD_")}
    process = subprocess.Popen(command, pass_fds=(ready_write,), env=environment, cwd=ROOT)
    os.close(ready_write)
    try:
        readable, _, _ = select.select([ready_read], [], [], 30)
        if not readable or os.read(ready_read, 4096) != b"READY\n":
            process.kill()
            process.wait(10)
            raise RuntimeError(f"the daemon did not start: {log.read_text() if log.exists() else 'no log'}")
    finally:
        os.close(ready_read)
    return Daemon(process, directory, "control.listen" in flags)


@contextlib.contextmanager
def running(restrictions: tuple[str, ...] = (), *, module: str = "offloadd", **settings: object) -> Iterator[Daemon]:
    """A daemon in a fresh directory (short enough for a socket's name), ended with the block."""
    with tempfile.TemporaryDirectory(prefix="od-", ignore_cleanup_errors=True) as name:
        daemon = start(Path(name), restrictions, module=module, **settings)
        try:
            yield daemon
        finally:
            if daemon.process.poll() is None:
                daemon.stop()


def until(condition: object, timeout_s: float = 10.0) -> bool:
    """Poll a condition, bounded; for what only the operating system can tell (a process or a file is gone)."""
    deadline = time.monotonic() + timeout_s
    pause = select.poll()
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        pause.poll(10)
    return False
