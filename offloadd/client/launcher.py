"""Start a private daemon for one job, where no endpoint was given.

The daemon gets a session of its own (setsid) and no parent-death signal: it ends by itself a grace period after its
last session, so it outlives the rank that started it exactly as long as other ranks need it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offloadd import jobdir
from offloadd.client.endpoint import check_timeout
from offloadd.core.errors import Code, ConfigError, OffloadError
from offloadd.jobdir import JobDirectory

_LOG_TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True)
class PrivateDaemon:
    """A daemon that this process started."""

    endpoint: str
    pid: int
    directory: str

    def stop(self, timeout_s: float) -> bool:
        """Ask it to end as soon as its last session has, and wait at most `timeout_s` for that, so that its paths are
        free for the next one. False: it still runs, and will end by itself."""
        check_timeout(timeout_s, "timeout_s of the daemon's end")
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            # A child that has ended keeps its number until it is waited for, so this cannot reach a stranger.
            signal.pidfd_send_signal(process, signal.SIGTERM)
            return _readable(process, timeout_s)
        except ProcessLookupError:
            return True
        finally:
            os.close(process)


def start_private(paths: Sequence[str], settings: Mapping[str, object], timeout_s: float = 60.0) -> PrivateDaemon:
    """Start a daemon and wait until it is ready. `paths` may be relative. `settings` maps 'section.field' to a value.
    OffloadError with the daemon's own sentence if it refuses to start."""
    check_timeout(timeout_s, "timeout_s of the daemon's start")
    # The daemon works in '/', so that it keeps no file system busy.
    paths = [os.path.abspath(path) for path in paths if path]
    if not paths:
        raise ConfigError("a private daemon needs a directory for its swap files, and none was given; set nvme_path")
    directory = _make_directory()
    try:
        return _start_in(directory, paths, settings, timeout_s)
    except BaseException:
        # Ctrl-C too.
        directory.remove()
        raise
    finally:
        directory.close()


def _start_in(
    directory: JobDirectory, paths: Sequence[str], settings: Mapping[str, object], timeout_s: float
) -> PrivateDaemon:
    socket_path = os.path.join(directory.path, jobdir.SOCKET)
    log_path = os.path.join(directory.path, jobdir.LOG)
    flags = {
        "control.socket": socket_path,
        "lifetime.private": "true",
        "swap.paths": ":".join(paths),
        "telemetry.listen": "none",
        **settings,
    }
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OFFLOADD_")}
    with contextlib.ExitStack() as ours:
        ready_read, ready_write = os.pipe()
        ours.callback(os.close, ready_read)
        with contextlib.ExitStack() as inherited:
            inherited.callback(os.close, ready_write)
            # The daemon ends with this process, until it has served somebody.
            starter = os.pidfd_open(os.getpid())
            inherited.callback(os.close, starter)
            command = [sys.executable, "-m", "offloadd", "serve", f"--log-file={log_path}"]
            command += [f"--ready-fd={ready_write}", f"--starter-fd={starter}"]
            command.append(f"--directory-fd={directory.descriptor}")
            command += [f"--{key}={value}" for key, value in flags.items()]
            # What it cannot log, an interpreter that does not start or a library that aborts, is found there too.
            errors = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            inherited.callback(os.close, errors)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                pass_fds=(ready_write, starter, directory.descriptor),
                env=environment,
                cwd="/",
            )
        try:
            _await_ready(process, ready_read, timeout_s, log_path)
        except BaseException:
            process.kill()
            process.wait(10)
            raise
    return PrivateDaemon(f"unix://{socket_path}", process.pid, directory.path)


def _make_directory() -> JobDirectory:
    """Private to this user, with a name that leaves room for a socket's."""
    tried = [os.environ.get("XDG_RUNTIME_DIR") or "", tempfile.gettempdir(), "/tmp"]
    for parent in tried:
        if parent and len(os.fsencode(parent)) <= jobdir.PARENT_LENGTH_MAX:
            with contextlib.suppress(OSError):
                return JobDirectory(parent)
    raise OffloadError(
        Code.UNAVAILABLE,
        f"none of {', '.join(filter(None, tried))} can hold the private daemon's socket; set TMPDIR to a directory "
        f"with a name of at most {jobdir.PARENT_LENGTH_MAX} bytes that user {os.getuid()} may write",
    )


def _await_ready(process: subprocess.Popen[bytes], descriptor: int, timeout_s: float, log_path: str) -> None:
    """The daemon writes one line: READY, or why it does not start. It closes the pipe without a word if it crashes."""
    deadline = time.monotonic() + timeout_s
    said = b""
    while not said.endswith(b"\n"):
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not _readable(descriptor, remaining):
            process.kill()
            process.wait(10)
            raise OffloadError(
                Code.TIMED_OUT, f"the private daemon was not ready within {timeout_s:g} s: {_last_line(log_path)}"
            )
        data = os.read(descriptor, 4096)
        if not data:
            break
        said += data
    if said == b"READY\n":
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    reason = said.decode("utf-8", "replace").strip()
    if not reason and process.returncode is not None and process.returncode < 0:
        reason = f"signal {-process.returncode} ({signal.strsignal(-process.returncode)}) ended it; its last words: "
        reason += _last_line(log_path)
    raise OffloadError(Code.UNAVAILABLE, f"the private daemon did not start: {reason or _last_line(log_path)}")


def _readable(descriptor: int, timeout_s: float) -> bool:
    """Not select(2), which knows no descriptor above 1023."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def _last_line(log_path: str) -> str:
    """The daemon's last word: its error is one sentence, logged last."""
    try:
        text = Path(log_path).read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
    except OSError:
        text = ""
    return text.splitlines()[-1] if text else "it left no message"
