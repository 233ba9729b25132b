"""What survives the daemon: jobs, shards, where their bytes lie and the checksums of those bytes.

SQLite (WAL, synchronous=FULL) on one worker thread of its own, because a commit beside heavy writes takes 140 ms.
Memory is authoritative; rows are written at register, flush and close only. The loop polls the futures; control
awaits them. An ordinary tool can open the file. It is never asked on the data path. Whatever SQLite reports becomes one
sentence that names the file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeVar

from offloadd.core.errors import Code, ConfigError, OffloadError
from offloadd.core.records import Extent, ShardSpec

log = logging.getLogger("offloadd.catalog")

T = TypeVar("T")

SCHEMA_VERSION: Final = 1
QUEUE_LIMIT: Final = 1024
CLOSE_TIMEOUT_S: Final = 30.0

_SCHEMA = """
CREATE TABLE jobs (
    job TEXT PRIMARY KEY, opened_at INTEGER NOT NULL DEFAULT (CAST(strftime('%s','now') AS INTEGER)));
CREATE TABLE shards (
    job TEXT NOT NULL REFERENCES jobs(job) ON DELETE CASCADE, rank INTEGER NOT NULL, name TEXT NOT NULL,
    dtype TEXT NOT NULL, kind TEXT NOT NULL, length INTEGER NOT NULL, tile_bytes INTEGER NOT NULL,
    on_disk INTEGER NOT NULL, PRIMARY KEY (job, rank, name)) WITHOUT ROWID;
CREATE TABLE shard_versions (
    job TEXT NOT NULL, rank INTEGER NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL,
    extents BLOB NOT NULL, checksums BLOB NOT NULL, PRIMARY KEY (job, rank, name, version),
    FOREIGN KEY (job, rank, name) REFERENCES shards(job, rank, name) ON DELETE CASCADE) WITHOUT ROWID;
CREATE TABLE calibrations (path TEXT PRIMARY KEY, json TEXT NOT NULL) WITHOUT ROWID;
"""

_TILE = struct.Struct("<iIQQB")
"""One tile of an extents blob: file (-1: memory only), path, offset, length, 1 if the extent holds whole bytes."""


@dataclass(frozen=True, slots=True)
class TileRow:
    """Where one tile lies; `checksums` is None when nothing whole lies there."""

    extent: Extent | None
    path: int
    length: int
    checksums: bytes | None


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One version of one shard."""

    spec: ShardSpec
    tile_bytes: int
    version: int
    tiles: Sequence[TileRow]


def pack_tiles(tiles: Sequence[TileRow]) -> tuple[bytes, bytes]:
    """(extents blob, checksums blob): the checksums of the tiles that have any, one after the other."""
    extents = b"".join(
        _TILE.pack(
            t.extent.file if t.extent else -1,
            t.path,
            t.extent.offset if t.extent else 0,
            t.length,
            t.checksums is not None,
        )
        for t in tiles
    )
    return extents, b"".join(t.checksums or b"" for t in tiles)


def unpack_extents(blob: bytes) -> list[tuple[int, int, int, int, bool]]:
    """(file, path, offset, length, whole) per tile."""
    return [(f, p, o, n, bool(w)) for f, p, o, n, w in _TILE.iter_unpack(blob)]


class Catalog:
    """The database and its worker."""

    def __init__(self, path: str, wake: Callable[[], None] | None = None) -> None:
        """`path` or ":memory:". `wake` is called on the worker's thread after each piece of work, so that a loop can
        be told to look. Raises ConfigError if this is no file of ours or cannot be used."""
        self._path = path
        self._wake = wake
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_LIMIT)
        self._closed = False
        try:
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        except (sqlite3.Error, ValueError) as error:
            raise _unusable(path, error) from error
        try:
            for pragma in ("busy_timeout=5000", "foreign_keys=ON"):
                self._database.execute(f"PRAGMA {pragma}").fetchall()
            _check_schema(self._database)
            for pragma in ("journal_mode=WAL", "synchronous=FULL"):
                self._database.execute(f"PRAGMA {pragma}").fetchall()
            with _transaction(self._database):
                _make_schema(self._database)
        except sqlite3.Error as error:
            self._database.close()
            raise _unusable(path, error) from error
        except BaseException:
            self._database.close()
            raise
        self._thread = threading.Thread(target=self._run, name="offloadd-catalog", daemon=True)
        self._thread.start()

    def register(self, job: str, rank: int, rows: Iterable[ShardRow]) -> Future[None]:
        """Write new shards (replacing rows of the same name) in one transaction. `rows` is gone through once, on the
        worker's thread."""

        def write(database: sqlite3.Connection) -> None:
            database.execute("INSERT INTO jobs(job) VALUES (?) ON CONFLICT DO NOTHING", (job,))
            for row in rows:
                spec = row.spec
                values = (job, rank, spec.name, spec.dtype, spec.kind, spec.length, row.tile_bytes, int(spec.on_disk))
                database.execute("DELETE FROM shards WHERE job=? AND rank=? AND name=?", values[:3])
                database.execute("INSERT INTO shards VALUES (?,?,?,?,?,?,?,?)", values)
                _put_version(database, job, rank, row)

        return _logged(self.submit(write))

    def flush(self, job: str, rank: int, rows: Iterable[ShardRow]) -> Future[None]:
        """Write where shards lie now, with their checksums, in one transaction. `rows`: see `register`."""

        def write(database: sqlite3.Connection) -> None:
            for row in rows:
                _put_version(database, job, rank, row)

        return _logged(self.submit(write))

    def forget(self, job: str, rank: int) -> Future[None]:
        """A rank's shards are gone; the job goes with its last rank."""

        def write(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM shards WHERE job=? AND rank=?", (job, rank))
            database.execute(
                "DELETE FROM jobs WHERE job=? AND NOT EXISTS (SELECT 1 FROM shards WHERE job=?)", (job, job)
            )

        return _logged(self.submit(write))

    def version(self, job: str, rank: int, name: str, version: int = 0) -> Future[tuple[bytes, bytes] | None]:
        """(extents blob, checksums blob), or None."""

        def read(database: sqlite3.Connection) -> tuple[bytes, bytes] | None:
            found = database.execute(
                "SELECT extents, checksums FROM shard_versions WHERE job=? AND rank=? AND name=? AND version=?",
                (job, rank, name, version),
            ).fetchone()
            return None if found is None else (bytes(found[0]), bytes(found[1]))

        return self.submit(read)

    def put_calibration(self, path: str, json: str) -> Future[None]:
        """Keep a path's calibration."""

        def write(database: sqlite3.Connection) -> None:
            database.execute("INSERT OR REPLACE INTO calibrations VALUES (?,?)", (path, json))

        return self.submit(write)

    def calibration(self, path: str) -> Future[str | None]:
        """A path's calibration as it was put, or None."""

        def read(database: sqlite3.Connection) -> str | None:
            found = database.execute("SELECT json FROM calibrations WHERE path=?", (path,)).fetchone()
            return None if found is None else str(found[0])

        return self.submit(read)

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Run `work` inside one transaction on the worker. An error of SQLite's, a full queue and a closed catalog make
        the future fail with OffloadError: NO_SPACE or IO_ERROR."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                with _transaction(self._database):
                    result = work(self._database)
            except sqlite3.Error as error:
                future.set_exception(self._failure(error))
            except Exception as error:  # whatever it was, somebody waits for this future
                future.set_exception(error)
            else:
                future.set_result(result)

        if self._closed:
            future.set_exception(OffloadError(Code.DRAINING, f"the catalog {self._path} is closed; the daemon stops"))
            return future
        try:
            self._work.put_nowait(run)
        except queue.Full:
            future.set_exception(
                OffloadError(
                    Code.IO_ERROR,
                    f"the catalog {self._path} is {QUEUE_LIMIT} transactions behind; the disk under it is too slow, "
                    "set session.state_dir to a faster one",
                )
            )
        return future

    def poll(self) -> int:
        """Transactions queued and not begun."""
        return self._work.qsize()

    def close(self) -> None:
        """Finish what is queued (30 s at most) and close. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._work.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            log.error("the catalog %s did not take its end in %g s and is left", self._path, CLOSE_TIMEOUT_S)
            return
        self._thread.join(CLOSE_TIMEOUT_S)

    def _failure(self, error: sqlite3.Error) -> OffloadError:
        full = "is full" in str(error)  # the code of an error is known to Python 3.11 and later only
        remedy = "free space there" if full else "check the device's log (dmesg)"
        return OffloadError(
            Code.NO_SPACE if full else Code.IO_ERROR,
            f"the catalog {self._path} could not be read or written: {error}; {remedy}, move a broken file "
            "away, or set session.state_dir to another directory",
        )

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            if self._wake is not None:
                self._wake()
        self._database.close()


def _logged(future: Future[T]) -> Future[T]:
    """The operator reads of it too, whoever else does."""

    def say(done: Future[T]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("%s", error)

    future.add_done_callback(say)
    return future


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All or nothing, also when it is the commit that fails."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # some errors have rolled back already
            database.execute("ROLLBACK")
        raise


def _check_schema(database: sqlite3.Connection) -> None:
    """Nothing is written to a file that is not ours."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version == SCHEMA_VERSION:
        return
    if version:
        raise sqlite3.DatabaseError(
            f"it has schema version {version} and this offloadd writes version {SCHEMA_VERSION}"
        )
    if database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise sqlite3.DatabaseError("it is another program's database")


def _make_schema(database: sqlite3.Connection) -> None:
    if database.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION:
        return
    for statement in _SCHEMA.split(";"):
        database.execute(statement)
    database.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def _unusable(path: str, error: Exception) -> ConfigError:
    if path == ":memory:":
        return ConfigError(f"the catalog in memory cannot be used: {error}; free memory on this node")
    return ConfigError(
        f"the catalog {path} cannot be used: {error}; make the directory writable for user {os.getuid()}, "
        "move a broken file away, or set session.state_dir to another directory"
    )


def _put_version(database: sqlite3.Connection, job: str, rank: int, row: ShardRow) -> None:
    extents, checksums = pack_tiles(row.tiles)
    database.execute(
        "INSERT OR REPLACE INTO shard_versions VALUES (?,?,?,?,?,?)",
        (job, rank, row.spec.name, row.version, extents, checksums),
    )
