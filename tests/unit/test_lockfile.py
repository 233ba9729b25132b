"""The lock beside the socket: removed at the end, and never held by two."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from offloadd.core.errors import ConfigError
from offloadd.lockfile import LockFile


def test_it_leaves_no_file_and_can_be_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "o.sock.lock"
    for _ in range(2):
        lock = LockFile(str(path), "o.sock")
        assert path.exists()
        with pytest.raises(ConfigError, match=r"another daemon .pid \d+. serves o.sock"):
            LockFile(str(path), "o.sock")
        lock.release()
        assert not list(tmp_path.iterdir())


def test_whoever_opened_the_file_of_a_daemon_that_ends_does_not_get_a_lock_beside_its_successors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its open and its flock the old daemon ends and a new one starts: the lock it gets is on no name."""
    path = str(tmp_path / "o.sock.lock")
    old = LockFile(path, "o.sock")
    flock = fcntl.flock
    successors: list[LockFile] = []

    def in_between(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        old.release()
        successors.append(LockFile(path, "o.sock"))
        flock(descriptor, operation)  # succeeds: nobody else has that file any more

    monkeypatch.setattr(fcntl, "flock", in_between)
    with pytest.raises(ConfigError, match="another daemon"):
        LockFile(path, "o.sock")
    successors[0].release()
    assert not list(tmp_path.iterdir())


def test_a_file_removed_by_a_stranger_is_not_removed_from_its_next_owner(tmp_path: Path) -> None:
    path = tmp_path / "o.sock.lock"
    robbed = LockFile(str(path), "o.sock")
    path.unlink()
    heir = LockFile(str(path), "o.sock")
    robbed.release()
    assert path.exists()
    heir.release()


def test_many_at_once_never_hold_it_together(tmp_path: Path) -> None:
    path = str(tmp_path / "o.sock.lock")
    inside, won, collisions = threading.Lock(), [0], [0]

    def come_and_go() -> None:
        for _ in range(200):
            try:
                lock = LockFile(path, "o.sock")
            except ConfigError:
                continue
            if inside.acquire(blocking=False):
                won[0] += 1
                inside.release()
            else:
                collisions[0] += 1
            lock.release()

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert collisions == [0]
    assert won[0] > 0
