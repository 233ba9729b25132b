"""What this machine can do, for `offloadctl doctor`: one small finding per fact, with what to do about it.

Works without a daemon and without privileges; changes nothing. Every check answers, whatever it meets.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from offloadd.core.units import GIB, human
from offloadd.io.mounts import VOLATILE, direct_works, filesystem, free_bytes
from offloadd.io.select import try_driver, uring_disabled

KERNEL_MIN = (5, 19)
CAP_IPC_LOCK = 14
SHM = "/dev/shm"
FREE_BYTES_LOW = 16 * GIB


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact."""

    name: str
    status: str
    """ok | warn | fail."""
    detail: str
    fix: str = ""
    """What to do; empty when all is well."""


def probe(paths: Iterable[str] = ()) -> list[Finding]:
    """Findings on kernel, io_uring, memory limits, and each path meant for swap files."""
    findings = [_kernel(), *_io_uring(), _memlock(), _shm()]
    for path in paths:
        findings += _path(path)
    return findings


def _kernel() -> Finding:
    release = os.uname().release
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if numbers >= KERNEL_MIN:
        return Finding("kernel", "ok", release)
    wanted = ".".join(map(str, KERNEL_MIN))
    return Finding(
        "kernel", "warn", f"{release}: io_uring here lacks what {wanted} added", f"run Linux {wanted} or newer"
    )


def _io_uring() -> Iterator[Finding]:
    trials = {name: try_driver(name) for name in ("liburing", "native")}
    works = any(trial.ok for trial in trials.values())
    for name, trial in trials.items():
        if trial.ok:
            pinned = "registers shared memory" if trial.registered else "cannot register shared memory"
            yield Finding(f"io_uring/{name}", "ok", f"works ({trial.flags}; {pinned})")
        else:
            fix = "" if works else _io_uring_fix()
            yield Finding(f"io_uring/{name}", "warn", trial.why, fix)
    if not works:
        yield Finding("engine", "warn", "the threads engine will run: more CPU per byte, less depth", _io_uring_fix())


def _io_uring_fix() -> str:
    if uring_disabled():
        return "sysctl kernel.io_uring_disabled=0"
    return "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile"


def has_capability(number: int) -> bool:
    """Whether this process has an effective capability."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else human(soft)
    if has_capability(CAP_IPC_LOCK):
        return Finding("locked memory", "ok", f"limit {limit}, not applied: CAP_IPC_LOCK")
    if soft == resource.RLIM_INFINITY or soft >= GIB:
        return Finding("locked memory", "ok", f"limit {limit}")
    return Finding(
        "locked memory",
        "warn",
        f"limit {limit}: arenas are not registered with io_uring, about 40 % more CPU per request",
        "LimitMEMLOCK=infinity in the unit, ulimit -l unlimited, or CAP_IPC_LOCK",
    )


def _shm() -> Finding:
    try:
        facts = os.statvfs(SHM)
    except OSError as error:
        return Finding(SHM, "warn", str(error.strerror), "mount a tmpfs there; data loaders of PyTorch need it")
    size = facts.f_blocks * facts.f_frsize
    if size < GIB:
        return Finding(SHM, "warn", f"{human(size)}: data loaders may run out", "mount it larger (docker: --shm-size)")
    return Finding(SHM, "ok", human(size))


def _path(path: str) -> Iterator[Finding]:
    if not os.path.isdir(path):
        yield Finding(path, "fail", "is not a directory", f"mkdir -p {path}")
        return
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        yield Finding(path, "fail", f"user {os.geteuid()} may not write there", f"chown {os.geteuid()} {path}")
        return
    kind = filesystem(path)
    if kind in VOLATILE:
        yield Finding(f"{path} file system", "warn", f"{kind}: swapping there frees no memory", "use an NVMe device")
    else:
        yield Finding(f"{path} file system", "ok", kind)
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        yield Finding(f"{path} mount", "fail", "mounted read-only", f"mount -o remount,rw {path}")
        return
    if direct_works(path):
        yield Finding(f"{path} O_DIRECT", "ok", "works")
    else:
        yield Finding(f"{path} O_DIRECT", "warn", "refused: bytes pass through the page cache", "use ext4 or xfs")
    free = free_bytes(path)
    low = free < FREE_BYTES_LOW
    fix = "free space, or name another path" if low else ""
    yield Finding(f"{path} free", "warn" if low else "ok", human(free), fix)
