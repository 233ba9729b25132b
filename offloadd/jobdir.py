"""The directory of a private daemon: its sockets and its log, made for one job by whoever starts that daemon.

Its makers hold a lock on it, which passes on to the daemon and its guardian with the descriptor and ends with the last
of them, however they end. So a directory of this name that nobody has locked was left behind, and the next start takes
it away.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile

_PREFIX = "offloadd-job-"
SOCKET = "offloadd.sock"
LOG = "log"
_SOCKET_NAME_MAX = 107
PARENT_LENGTH_MAX = _SOCKET_NAME_MAX - len(f"/{_PREFIX}12345678/{SOCKET}.attach")
"""Bytes of a directory's name that leave room for the attach socket's, the longest here."""
_ATTEMPTS_MAX = 100
"""Each is lost to a start that took a fresh directory for one left behind."""


class JobDirectory:
    """A fresh one, locked by `descriptor`. The maker removes it, or passes the descriptor on and closes its own."""

    def __init__(self, parent: str) -> None:
        """OSError if `parent` cannot hold it. Takes away what earlier jobs of this user left in `parent`."""
        sweep(parent)
        for _ in range(_ATTEMPTS_MAX):
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            with contextlib.suppress(FileNotFoundError):
                self.descriptor = _open(self.path)
                fcntl.flock(self.descriptor, fcntl.LOCK_EX)
                if is_same(self.descriptor, self.path):
                    return
                os.close(self.descriptor)
        raise FileExistsError(f"directories in {parent} vanish as soon as they are made")

    def remove(self) -> None:
        remove(self.descriptor, self.path)

    def close(self) -> None:
        os.close(self.descriptor)


def is_same(descriptor: int, path: str) -> bool:
    """Whether `descriptor` is of the directory that `path` names."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def remove(descriptor: int, path: str) -> None:
    """Remove what `descriptor` has locked, and nothing else that may lie at `path` by now."""
    if os.path.basename(path).startswith(_PREFIX) and is_same(descriptor, path):
        shutil.rmtree(path, ignore_errors=True)


def add_to_log(descriptor: int, words: bytes) -> None:
    """Append to the log in the directory that `descriptor` has locked; nothing if it has gone."""
    with contextlib.suppress(OSError):
        file = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
        try:
            os.write(file, words)
        finally:
            os.close(file)


def sweep(parent: str) -> None:
    """Remove what daemons of this user left in `parent` when they crashed, or were killed at once with their
    guardians."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with contextlib.suppress(OSError):
                    _remove_if_left(entry.path)


def _remove_if_left(path: str) -> None:
    descriptor = _open(path)
    try:
        known = os.fstat(descriptor)
        if known.st_uid == os.geteuid() and stat.S_IMODE(known.st_mode) == 0o700:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(descriptor, path)
    finally:
        os.close(descriptor)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
