"""Facts about the file system under a directory: its type, free bytes, whether O_DIRECT works.

Used by swap files, calibration and the probe. Keeps nothing.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from offloadd.core.units import PAGE_BYTES

VOLATILE = ("tmpfs", "ramfs")
"""File systems whose bytes are memory: swapping to them frees none."""


def filesystem(directory: str) -> str:
    """Type of the file system that holds the directory: the mount with the longest matching mount point."""
    real = os.path.realpath(directory)
    best, kind = "", "unknown"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            before, _, after = line.partition(" - ")
            point = before.split()[4].encode().decode("unicode_escape")  # spaces stand there as \040
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, after.split()[0]
    return kind


def free_bytes(directory: str) -> int:
    """Bytes that this user may still allocate there."""
    facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize


@contextmanager
def scratch_file(directory: str, direct: bool) -> Iterator[int]:
    """A file that leaves no trace, even of a killed process where the file system has O_TMPFILE. OSError."""
    extra = os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | extra, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT) or not os.path.isdir(directory):
            raise
        named, path = tempfile.mkstemp(prefix=".offloadd-", dir=directory)
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | extra)
        finally:
            os.close(named)
            os.unlink(path)
    try:
        yield fd
    finally:
        os.close(fd)


def direct_works(directory: str) -> bool:
    """Whether an aligned page can be written and read past the page cache; some file systems refuse only then."""
    with mmap.mmap(-1, 2 * PAGE_BYTES) as pages, memoryview(pages) as view:
        try:
            with scratch_file(directory, direct=True) as fd, view[:PAGE_BYTES] as out, view[PAGE_BYTES:] as back:
                out[:4] = b"page"
                return os.pwritev(fd, [out], 0) == os.preadv(fd, [back], 0) == PAGE_BYTES and out == back
        except OSError:
            return False
