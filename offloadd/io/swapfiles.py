"""Swap paths and the swap files on them: claimed, opened, grown, removed.

A `SwapPath` is claimed once per daemon and path, and its lock keeps every other daemon off. `SwapFiles` are one job's
files, one on each path: without names for unnamed jobs, so that nothing is left even after kill -9; under
`offloadd/<job>/` for named ones, so that they can be resumed. The application lends the descriptors to the engine; no
byte of content passes through here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from offloadd.core.errors import Code, OffloadError
from offloadd.core.units import PAGE_BYTES, align_up, human
from offloadd.io.mounts import VOLATILE, direct_works, filesystem, free_bytes, scratch_file

log = logging.getLogger(__name__)

ROOT_NAME = "offloadd"
FILE_NAME = "tiles.swap"
LOCK_RETRY_SECONDS = 0.05
_JOB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def _unusable(directory: str, why: str) -> OffloadError:
    return OffloadError(Code.PATH_UNUSABLE, f"swap path {directory} cannot be used: {why}")


class SwapPath:
    """A directory that this daemon alone swaps to."""

    def __init__(self, directory: str, patience_s: float = 0.0) -> None:
        """Check and lock the directory. Blocks for up to `patience_s`, in seconds, while another daemon has it: the
        last job's private one ends a moment after the job. OffloadError PATH_UNUSABLE, in one sentence."""
        self.directory = directory
        _check_directory(directory)
        self._lock = _lock(directory, patience_s)
        try:
            self.filesystem = filesystem(directory)
            self.volatile = self.filesystem in VOLATILE
            """Its bytes are memory: swapping there frees none."""
            with scratch_file(directory, direct=False):
                pass  # a file can be made here at all
            self.direct = direct_works(directory)
        except OSError as error:
            os.close(self._lock)
            raise _unusable(directory, str(error.strerror)) from error
        if self.volatile:
            log.warning(
                "swap path %s is on %s: its bytes are memory, so swapping frees none", directory, self.filesystem
            )
        if not self.direct:
            log.warning("swap path %s (%s) has no O_DIRECT: going through the page cache", directory, self.filesystem)

    def free_bytes(self) -> int:
        """What can still be allocated here."""
        return free_bytes(self.directory)

    def jobs(self) -> list[str]:
        """Names of jobs with files on this path."""
        root = os.path.join(self.directory, ROOT_NAME)
        try:
            return sorted(entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def close(self) -> None:
        """Give the path up. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)  # which also drops the lock
            self._lock = -1


def _check_directory(directory: str) -> None:
    try:
        facts = os.stat(directory)
    except OSError as error:
        hint = "; create it, or change swap.paths" if error.errno == errno.ENOENT else ""
        raise _unusable(directory, f"{error.strerror}{hint}") from error
    if not stat.S_ISDIR(facts.st_mode):
        raise _unusable(directory, "it is not a directory")
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        raise _unusable(directory, "its file system is mounted read-only")
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        raise _unusable(directory, f"user {os.geteuid()} may not write there")


def _lock(directory: str, patience_s: float) -> int:
    """Lock the directory itself, so that nothing is left behind; the kernel drops the lock at our death."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(directory, f"it cannot be opened ({error.strerror})") from error
    deadline = time.monotonic() + patience_s
    try:
        while not _try_lock(fd):
            if time.monotonic() >= deadline:
                owner = _owner(os.fstat(fd))
                raise _unusable(directory, f"another daemon (pid {owner}) swaps there; give each a path of its own")
            time.sleep(LOCK_RETRY_SECONDS)
    except OSError as error:
        os.close(fd)
        raise _unusable(directory, f"its file system has no locks ({error.strerror})") from error
    except OffloadError:
        os.close(fd)
        raise
    return fd


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _owner(facts: os.stat_result) -> str:
    """Who holds the lock, for the message; /proc/locks names it unless it is in another pid namespace."""
    inode = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks") as locks:
        for line in locks:
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == inode:
                return fields[4]
    return "unknown"


@dataclass(slots=True)
class SwapFile:
    """One open swap file."""

    path: SwapPath
    fd: int
    direct: bool
    length: int
    """Allocated bytes."""


class SwapFiles:
    """One job's files, one on each path, in the order of the paths."""

    def __init__(self, paths: Sequence[SwapPath], job: str | None) -> None:
        """`job` None: files without names. OffloadError PATH_UNUSABLE, BAD_REQUEST for a name that cannot be."""
        if job is not None and not _JOB_NAME.fullmatch(job):
            raise OffloadError(
                Code.BAD_REQUEST, f"job name {job!r} cannot name a directory; use letters, digits, '.', '_' and '-'"
            )
        self.job = job
        self.files: list[SwapFile] = []
        self._lock = threading.Lock()
        """A job's ranks grow its files at the same time, each from a thread of its own."""
        try:
            for path in paths:
                fd = _open_unnamed(path) if job is None else _open_named(path, job)
                self.files.append(SwapFile(path, fd, path.direct, os.fstat(fd).st_size))
        except OSError as error:
            self.close()
            raise _unusable(error.filename or path.directory, f"opening a file: {error.strerror}") from error
        except OffloadError:
            self.close()
            raise

    def grow(self, index: int, length: int) -> None:
        """Allocate the file on path `index` up to `length` bytes. Blocking. OffloadError NO_SPACE with both figures;
        the file then keeps its old length."""
        with self._lock:
            self._grow(index, align_up(length, PAGE_BYTES))

    def _grow(self, index: int, length: int) -> None:
        if index >= len(self.files):
            raise OffloadError(Code.STALE_SESSION, "the job ended while its swap file was allocated")
        file = self.files[index]
        if length <= file.length:
            return
        try:
            os.posix_fallocate(file.fd, file.length, length - file.length)
        except OSError as error:
            os.ftruncate(file.fd, file.length)  # a refused allocation may have got part of the way
            directory = file.path.directory
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _unusable(directory, f"allocating {human(length - file.length)}: {error.strerror}") from error
            raise OffloadError(
                Code.NO_SPACE,
                f"swap path {directory} has no room: needs {human(length - file.length)} more, available "
                f"{human(free_bytes(directory))} ({errno.errorcode[error.errno]}); free space there, raise the quota, "
                "or add a path to swap.paths",
            ) from error
        file.length = length

    def close(self) -> None:
        """Close the descriptors: unnamed files are gone, named ones stay. Idempotent."""
        with self._lock:
            for file in self.files:
                os.close(file.fd)
            self.files = []

    def remove(self) -> None:
        """Close, and delete what has a name."""
        paths = [file.path for file in self.files]
        self.close()
        if self.job is not None:
            for path in paths:
                remove_job(path, self.job)


def remove_job(path: SwapPath, job: str) -> None:
    """Delete a named job's file and directory on a path; nothing there is fine."""
    directory = os.path.join(path.directory, ROOT_NAME, job)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, FILE_NAME))
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(directory)


def _open_unnamed(path: SwapPath) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if path.direct else 0)
    try:
        return os.open(path.directory, os.O_TMPFILE | flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    # File systems without O_TMPFILE: a name for an instant.
    name = os.path.join(path.directory, f".offloadd-{os.getpid()}-{os.urandom(8).hex()}")
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flags, 0o600)
    try:
        os.unlink(name)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_named(path: SwapPath, job: str) -> int:
    """Step by step through descriptors, so that no link put there by someone else is followed."""
    with contextlib.ExitStack() as opened:
        parent = os.open(path.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, parent)
        for name in (ROOT_NAME, job):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=parent)
            parent = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            opened.callback(os.close, parent)
            if os.fstat(parent).st_uid != os.geteuid():
                raise _unusable(path.directory, f"its directory {name} belongs to user {os.fstat(parent).st_uid}")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if path.direct else 0)
        fd = os.open(FILE_NAME, flags, 0o600, dir_fd=parent)
        try:
            os.fsync(parent)  # the name must survive what the file is meant to survive
        except BaseException:
            os.close(fd)
            raise
        return fd
