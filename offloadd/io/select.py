"""Which engine runs, and why the better ones do not.

Called once by the composition root, and by tools that need an engine of their own. `auto` tries uring/liburing, then
uring/native, then threads; each io_uring driver is first tried in a child process. An explicit choice that cannot run
is a ConfigError. Decides nothing later: a running engine is never exchanged.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from offloadd.core.errors import ConfigError
from offloadd.io.engine import Engine
from offloadd.io.null import NullEngine
from offloadd.io.ringcheck import open_driver
from offloadd.io.threads import ThreadsEngine
from offloadd.io.uring import UringEngine

CHECK_SECONDS = 20.0
_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")


class Refusal(NamedTuple):
    """A better candidate that cannot run here."""

    candidate: str
    """uring/liburing | uring/native."""
    why: str


class Trial(NamedTuple):
    """What a driver's trial in a child process found."""

    ok: bool
    why: str
    """Empty when it passed."""
    flags: str = ""
    registered: bool = False
    """Shared memory could be registered; if not, transfers pin their own pages."""


def choose_engine(
    engine: str = "auto", driver: str = "auto", checksum_threads: int = 1, threads: int = 8
) -> tuple[Engine, list[Refusal]]:
    """The engine to run and what was refused on the way. ConfigError: the explicit choice cannot run here."""
    if engine == "null":
        return NullEngine(), []
    refusals: list[Refusal] = []
    if engine in ("auto", "uring"):
        for name in ("liburing", "native") if driver == "auto" else (driver,):
            trial = try_driver(name)
            if trial.ok:
                try:
                    return UringEngine(open_driver(name), checksum_threads), refusals
                except OSError as error:
                    trial = Trial(False, explain(error.errno or errno.EIO, "set-up"))
            refusals.append(Refusal(f"uring/{name}", trial.why))
    if engine in ("auto", "threads") and driver == "auto":
        return ThreadsEngine(threads), refusals
    reasons = "; ".join(f"{refusal.candidate}: {refusal.why}" for refusal in refusals)
    raise ConfigError(
        f"io.engine={engine} with io.driver={driver} cannot run here ({reasons or 'threads has no such driver'}); "
        "set both to auto to use the best engine that can"
    )


@functools.cache
def try_driver(name: str) -> Trial:
    """Run the driver once in a child process; remembered for the life of this process."""
    command = [sys.executable, "-m", "offloadd.io.ringcheck", name]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Trial(False, f"its trial did not end within {CHECK_SECONDS:.0f} s")
    if child.returncode < 0:
        name_of_signal = signal.Signals(-child.returncode).name
        hint = "; the package needs a CPU with AVX-512" if -child.returncode == signal.SIGILL else ""
        return Trial(False, f"its trial died of {name_of_signal}{hint}")
    lines = child.stdout.strip().splitlines()
    if child.returncode or not lines:
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        return Trial(False, f"its trial failed: {last}")
    answer = json.loads(lines[-1])
    if not answer["ok"]:
        return Trial(False, explain(int(answer["errno"]), str(answer["step"])))
    return Trial(True, "", str(answer["flags"]), bool(answer["registered"]))


def explain(error: int, step: str) -> str:
    """A sentence on why io_uring fails with this errno, with what decides it on this machine."""
    name = errno.errorcode.get(error, str(error)) if error else ""
    text = f"{step} ({name})" if name else step
    disabled = uring_disabled()
    if error == errno.EPERM and disabled:
        meaning = "everyone" if disabled == 2 else "processes without CAP_SYS_ADMIN or outside io_uring_group"
        return f"{text}: kernel.io_uring_disabled={disabled} switches io_uring off for {meaning}"
    if error in (errno.EPERM, errno.EACCES):
        return f"{text}: a seccomp profile or security module forbids io_uring, as container runtimes do by default"
    if error == errno.ENOSYS:
        return f"{text}: this kernel ({os.uname().release}) has no io_uring, or a seccomp profile hides it"
    if error == errno.ENOMEM:
        return f"{text}: the limit on locked memory (ulimit -l) is too low"
    return text


def uring_disabled() -> int:
    """kernel.io_uring_disabled: 0 open to all, 1 to the privileged, 2 to nobody. 0 where the kernel lacks it."""
    try:
        return int(_DISABLED.read_text())
    except (OSError, ValueError):
        return 0
