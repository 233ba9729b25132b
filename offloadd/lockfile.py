"""The lock beside a daemon's socket: one daemon per socket, and no file left when it ends.

A lock is on a file, and a file can be removed and made anew under the same name. So whoever has locked looks whether
what the name means now is what it locked, and begins again if not: two daemons can never both hold "the" lock.
Owned by `offloadd.node`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os

from offloadd.core.errors import ConfigError

ATTEMPTS_MAX = 100
"""Each is lost to a daemon that ended in the same instant."""


class LockFile:
    """Held from the making to `release`, or to the end of the process."""

    def __init__(self, path: str, what: str) -> None:
        """ConfigError, one sentence, if another daemon serves `what`, or if the file cannot be made."""
        self._path = path
        for _ in range(ATTEMPTS_MAX):
            self._descriptor = _lock(path, what)
            if self._is_named():
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)
                return
            os.close(self._descriptor)
        raise ConfigError(
            f"{path} vanishes whenever it is locked; look who removes it, or choose another control.socket"
        )

    def release(self) -> None:
        """Remove the file while it is still ours, then let go of it."""
        if self._is_named():
            with contextlib.suppress(OSError):  # a file that cannot be removed is in nobody's way
                os.unlink(self._path)
        os.close(self._descriptor)

    def _is_named(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        except OSError:
            return False


def _lock(path: str, what: str) -> int:
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), mode=0o755, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot create {path}: {error.strerror}; set control.socket to a path that user {os.getuid()} may write"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        if error.errno != errno.EWOULDBLOCK:
            raise ConfigError(f"cannot lock {path}: {error.strerror}; choose another control.socket") from error
        raise ConfigError(
            f"another daemon (pid {owner}) serves {what}; stop it or choose another control.socket"
        ) from error
    return descriptor
