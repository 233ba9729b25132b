"""A private daemon's directory: locked while somebody needs it, swept when nobody does, and no stranger's touched."""

from __future__ import annotations

import os
from pathlib import Path

from offloadd import jobdir
from offloadd.jobdir import JobDirectory


def test_a_directory_left_behind_is_taken_away_by_the_next_start(tmp_path: Path) -> None:
    left = JobDirectory(str(tmp_path))
    (Path(left.path) / jobdir.SOCKET).touch()
    left.close()
    new = JobDirectory(str(tmp_path))
    assert [entry.name for entry in tmp_path.iterdir()] == [os.path.basename(new.path)]
    new.close()


def test_a_directory_in_use_stays(tmp_path: Path) -> None:
    first, second = JobDirectory(str(tmp_path)), JobDirectory(str(tmp_path))
    assert os.path.isdir(first.path)
    first.close()
    second.close()


def test_a_lock_that_was_passed_on_keeps_it(tmp_path: Path) -> None:
    given = JobDirectory(str(tmp_path))
    passed_on = os.dup(given.descriptor)
    given.close()
    jobdir.sweep(str(tmp_path))
    assert os.path.isdir(given.path)
    os.close(passed_on)


def test_other_directories_files_and_links_stay(tmp_path: Path) -> None:
    (tmp_path / "offloadd-data").mkdir(mode=0o700)
    (tmp_path / "offloadd-job-shared").mkdir(mode=0o755)
    (tmp_path / "offloadd-job-file").touch()
    (tmp_path / "offloadd-job-link").symlink_to(tmp_path / "offloadd-data")
    jobdir.sweep(str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 4


def test_a_directory_that_took_the_place_of_the_locked_one_stays(tmp_path: Path) -> None:
    mine = JobDirectory(str(tmp_path))
    os.rename(mine.path, tmp_path / "moved")
    os.mkdir(mine.path)
    mine.remove()
    assert os.path.isdir(mine.path)
    mine.close()


def test_last_words_are_added_to_the_log_and_nowhere_else(tmp_path: Path) -> None:
    mine = JobDirectory(str(tmp_path))
    log, other = Path(mine.path) / jobdir.LOG, tmp_path / "other"
    jobdir.add_to_log(mine.descriptor, b"nobody has logged here")
    assert not log.exists()
    log.write_text("first\n")
    jobdir.add_to_log(mine.descriptor, b"last\n")
    assert log.read_text() == "first\nlast\n"
    log.unlink()
    other.touch()
    log.symlink_to(other)
    jobdir.add_to_log(mine.descriptor, b"last\n")
    assert other.read_text() == ""
    mine.close()


def test_the_longest_parent_leaves_room_for_the_attach_socket() -> None:
    name = f"/offloadd-job-12345678/{jobdir.SOCKET}.attach"
    assert jobdir.PARENT_LENGTH_MAX + len(name) == 107
