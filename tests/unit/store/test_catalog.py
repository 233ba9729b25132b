"""The catalog's own failures: each is one sentence that names the file, and none leaves a transaction open."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import ShardSpec
from offloadd.store.catalog import QUEUE_LIMIT, SCHEMA_VERSION, Catalog
from offloadd.store.placement import SwapTarget
from offloadd.store.store import Store
from tests.pump_world import to_the_end

PAGE = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.sqlite"


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    catalog = Catalog(str(path))
    yield catalog
    catalog.close()


def fill(catalog: Catalog) -> None:
    """From now on the database may not grow."""

    def freeze(database: sqlite3.Connection) -> None:
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count={pages}").fetchall()

    catalog.submit(freeze).result(10)


def refused_open(path: Path) -> str:
    with pytest.raises(OffloadError) as caught:
        Catalog(str(path))
    assert caught.value.code is Code.BAD_CONFIG
    assert str(path) in caught.value.message
    return caught.value.message


def test_a_new_catalog_has_this_versions_schema(catalog: Catalog) -> None:
    assert catalog.submit(lambda d: d.execute("PRAGMA user_version").fetchone()[0]).result(10) == SCHEMA_VERSION


def test_what_was_written_is_there_when_it_is_opened_again(path: Path) -> None:
    for expected in (None, "figures"):
        catalog = Catalog(str(path))
        assert catalog.calibration("nvme0").result(10) == expected
        catalog.put_calibration("nvme0", "figures").result(10)
        catalog.close()


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, -1])
def test_a_catalog_of_another_version_is_refused_and_left_as_it_is(path: Path, version: int) -> None:
    Catalog(str(path)).close()
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version={version}")
    said = refused_open(path)
    assert f"schema version {version}" in said
    assert f"this offloadd writes version {SCHEMA_VERSION}" in said
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA user_version").fetchone()[0] == version


def test_another_programs_database_is_refused_and_left_as_it_is(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE theirs (x)")
    assert "another program" in refused_open(path)
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]


def test_a_full_disk_is_a_typed_sentence_and_later_work_goes_on(catalog: Catalog, path: Path) -> None:
    catalog.put_calibration("small", "x").result(10)
    fill(catalog)
    with pytest.raises(OffloadError) as caught:
        catalog.put_calibration("large", "x" * 100_000).result(10)
    assert caught.value.code is Code.NO_SPACE
    assert str(path) in caught.value.message
    assert "free space" in caught.value.message
    assert catalog.calibration("large").result(10) is None
    catalog.put_calibration("small", "y").result(10)
    assert catalog.calibration("small").result(10) == "y"


def test_a_commit_that_fails_leaves_no_transaction_open(catalog: Catalog) -> None:
    def leave_an_orphan(database: sqlite3.Connection) -> None:
        database.execute("PRAGMA defer_foreign_keys=ON")
        database.execute("INSERT INTO shards VALUES ('no job', 0, 'a', 'float32', 'master', 1, 1, 1)")

    with pytest.raises(OffloadError) as caught:
        catalog.submit(leave_an_orphan).result(10)
    assert caught.value.code is Code.IO_ERROR
    assert catalog.submit(lambda d: d.execute("SELECT count(*) FROM shards").fetchone()[0]).result(10) == 0


def test_more_transactions_than_the_queue_holds_are_refused_at_once(catalog: Catalog) -> None:
    go_on = threading.Event()
    begun = threading.Event()

    def wait(database: sqlite3.Connection) -> None:
        begun.set()
        go_on.wait(30)

    catalog.submit(wait)
    assert begun.wait(10)
    queued = [catalog.submit(lambda d: None) for _ in range(QUEUE_LIMIT)]
    with pytest.raises(OffloadError, match="behind"):
        catalog.submit(lambda d: None).result(0)
    go_on.set()
    assert queued[-1].result(10) is None


def test_a_closed_catalog_refuses_at_once(path: Path) -> None:
    catalog = Catalog(str(path))
    catalog.close()
    with pytest.raises(OffloadError, match="closed"):
        catalog.calibration("x").result(0)


def test_shards_that_the_catalog_could_not_record_do_not_exist(catalog: Catalog) -> None:
    store = Store(catalog)
    store.open_session(1, "job", 0, 1, 8 * PAGE, 2 * PAGE, 1000 * PAGE, [SwapTarget(5, 0, 1.0)])
    fill(catalog)
    specs = [ShardSpec(f"{i:0200d}", "float32", PAGE, "master") for i in range(100)]
    registration = to_the_end(store.prepare_registration(1, specs))
    with pytest.raises(OffloadError):
        store.record_registration(registration).result(10)
    to_the_end(store.abort_registration(registration))
    assert store.resolve(1, 0, 0) is None
    assert store.holdings(1).swap_used == 0
