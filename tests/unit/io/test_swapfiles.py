"""Swap paths and files: claims, refusals, growth, what stays and what goes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offloadd.core.errors import Code, OffloadError
from offloadd.core.units import MIB
from offloadd.io.swapfiles import FILE_NAME, SwapFiles, SwapPath, remove_job


@pytest.fixture
def path(tmp_path: Path) -> Iterator[SwapPath]:
    claimed = SwapPath(str(tmp_path))
    yield claimed
    claimed.close()


def refused(code: Code, *args: object) -> pytest.RaisesExc[OffloadError]:
    return pytest.raises(OffloadError, check=lambda error: error.code is code)


def test_a_missing_directory_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"No such file or directory; create it"):
        SwapPath(str(tmp_path / "nowhere"))


def test_a_file_is_not_a_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match="not a directory"):
        SwapPath(str(tmp_path / "file"))


def test_a_read_only_file_system_is_refused() -> None:
    if not os.statvfs("/sys").f_flag & os.ST_RDONLY and not os.path.isdir("/proc"):
        pytest.skip("no file system here refuses writes")
    with refused(Code.PATH_UNUSABLE):
        SwapPath("/proc")


def test_a_path_belongs_to_one_daemon_and_the_refusal_names_the_other(path: SwapPath) -> None:
    program = f"from offloadd.io.swapfiles import SwapPath; SwapPath({path.directory!r})"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert f"another daemon (pid {os.getpid()}) swaps there" in other.stderr


def test_a_path_whose_daemon_is_about_to_end_is_waited_for(path: SwapPath, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, refusals = fcntl.flock, []

    def ending(fd: int, operation: int) -> None:
        try:
            flock(fd, operation)
        except BlockingIOError:
            refusals.append(fd)
            path.close()
            raise

    monkeypatch.setattr(fcntl, "flock", ending)
    SwapPath(path.directory, patience_s=30.0).close()
    assert len(refusals) == 1


def test_a_closed_path_can_be_claimed_again(path: SwapPath) -> None:
    path.close()
    SwapPath(path.directory).close()


def test_a_memory_file_system_is_flagged() -> None:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    directory = f"/dev/shm/offloadd-test-{os.getpid()}"
    os.mkdir(directory)
    try:
        claimed = SwapPath(directory)
        claimed.close()
    finally:
        subprocess.run(["rm", "-r", directory], check=True, timeout=10)
    assert claimed.volatile


def test_an_unnamed_job_leaves_nothing(path: SwapPath) -> None:
    files = SwapFiles([path], None)
    files.grow(0, 3 * MIB)
    assert os.listdir(path.directory) == []
    files.close()


def test_growing_allocates_and_never_shrinks(path: SwapPath) -> None:
    files = SwapFiles([path], None)
    files.grow(0, 3 * MIB + 1)
    files.grow(0, MIB)
    facts = os.fstat(files.files[0].fd)
    assert facts.st_size == files.files[0].length == 3 * MIB + 4096
    assert facts.st_blocks * 512 >= facts.st_size
    files.close()


def test_a_full_path_gives_both_figures_and_keeps_the_old_length(path: SwapPath) -> None:
    files = SwapFiles([path], None)
    files.grow(0, MIB)
    with pytest.raises(OffloadError, match=r"needs .* more, available .*(ENOSPC|EFBIG)") as caught:
        files.grow(0, path.free_bytes() * 4 + (1 << 40))
    assert caught.value.code is Code.NO_SPACE
    assert os.fstat(files.files[0].fd).st_size == MIB
    files.close()


def test_a_named_job_finds_its_bytes_again(path: SwapPath) -> None:
    files = SwapFiles([path], "bert.large")
    files.grow(0, MIB)
    files.close()
    again = SwapFiles([path], "bert.large")
    assert again.files[0].length == MIB
    assert path.jobs() == ["bert.large"]
    again.remove()
    assert path.jobs() == []


def test_a_named_file_is_private(path: SwapPath) -> None:
    files = SwapFiles([path], "job")
    directory = Path(path.directory, "offloadd", "job")
    modes = [stat.S_IMODE(os.stat(place).st_mode) for place in (directory, directory / FILE_NAME)]
    files.remove()
    assert modes == [0o700, 0o600]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", ".hidden", "a\0b", "x" * 200])
def test_a_name_that_leaves_the_directory_is_refused(path: SwapPath, name: str) -> None:
    with refused(Code.BAD_REQUEST):
        SwapFiles([path], name)


def test_a_link_in_place_of_the_file_is_not_followed(path: SwapPath, tmp_path: Path) -> None:
    directory = tmp_path / "offloadd" / "job"
    directory.mkdir(parents=True)
    (directory / FILE_NAME).symlink_to("/etc/passwd")
    with pytest.raises(OffloadError, match=os.strerror(errno.ELOOP)):
        SwapFiles([path], "job")


def test_removing_a_job_that_is_not_there_is_fine(path: SwapPath) -> None:
    remove_job(path, "nobody")
