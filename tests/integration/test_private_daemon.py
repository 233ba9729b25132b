"""The embedded default: a daemon for one job, which leaves nothing behind, whoever is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offloadd.client import (
    ClientSession,
    Mode,
    OffloadError,
    PrivateDaemon,
    ShardSpec,
    connect,
    start_private,
)
from tests.daemon import until

FAILING = Path(__file__).with_name("failing_daemon.py")
SETTINGS = {"io.calibrate_seconds": 0, "memory.host_bytes": "16MiB", "lifetime.grace_seconds": 0.2}


def begin(tmp_path: Path, **more: object) -> PrivateDaemon:
    return start_private([str(tmp_path)], {**SETTINGS, **more}, 30)


def gone(daemon: PrivateDaemon) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(daemon.pid, os.WNOHANG)
    return not os.path.exists(f"/proc/{daemon.pid}") and not os.path.exists(daemon.directory)


def use(daemon: PrivateDaemon) -> None:
    session = connect(daemon.endpoint, timeout_s=20)
    session.reserve(tile_bytes=256 << 10)
    shard = session.register([ShardSpec("a", "float32", 1 << 20, "param")])[0]
    session.fetch(shard, 0, Mode.OVERWRITE).wait().store()
    session.flush()
    session.close()


def test_it_ends_with_its_job_and_leaves_nothing(tmp_path: Path) -> None:
    daemon = begin(tmp_path)
    use(daemon)
    assert until(lambda: gone(daemon))
    assert not list(tmp_path.iterdir())


def test_after_a_goodbye_its_path_is_free_at_once(tmp_path: Path) -> None:
    """However long it would wait for ranks that died."""
    daemon = begin(tmp_path, **{"lifetime.grace_seconds": 60})
    use(daemon)
    assert until(lambda: gone(daemon), 5)


def test_it_ends_when_nobody_ever_comes(tmp_path: Path) -> None:
    daemon = begin(tmp_path, **{"lifetime.first_session_seconds": 0.3})
    assert until(lambda: gone(daemon))


def test_killed_itself_it_leaves_nothing(tmp_path: Path) -> None:
    daemon = begin(tmp_path)
    session = connect(daemon.endpoint, timeout_s=20)
    session.reserve(tile_bytes=256 << 10)
    shard = session.register([ShardSpec("a", "float32", 1 << 20, "param")])[0]
    session.fetch(shard, 0, Mode.OVERWRITE).wait().store()
    os.kill(daemon.pid, signal.SIGKILL)
    assert until(lambda: gone(daemon))
    assert not list(tmp_path.iterdir())
    session.close()


def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Private daemons have a bug from now on."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {FAILING} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setenv("FAIL_AT", at)
    monkeypatch.setattr(sys, "executable", str(python))


def log_named_by(daemon: PrivateDaemon, session: ClientSession) -> str:
    """What the log holds that a client's error names, of a daemon that has crashed."""
    os.waitpid(daemon.pid, 0)
    with pytest.raises(OffloadError, match=r"is gone \(killed or crashed\)") as caught:
        session.nop()
    session.close()
    assert "\n" not in caught.value.message
    found = re.search(r"if it crashed, (\S+) says why", caught.value.message)
    assert found is not None
    log = Path(found[1])
    assert log.parent == Path(daemon.directory)
    assert until(lambda: not locked(daemon.directory)), "its guardian is still there"
    return log.read_text()


def locked(directory: str) -> bool:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@pytest.mark.parametrize("at", ["serve", "step"])
def test_ended_by_a_bug_its_log_says_which_until_the_next_start(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    with monkeypatch.context() as now:
        failing(tmp_path, now, at)
        daemon = begin(tmp_path)
    session = connect(daemon.endpoint, timeout_s=20)
    session.reserve(tile_bytes=256 << 10)
    os.kill(daemon.pid, signal.SIGUSR1)
    log = log_named_by(daemon, session)
    assert "this daemon ends by a bug of its own" in log
    assert "Traceback" in log
    assert "ZeroDivisionError: a bug" in log
    other = begin(tmp_path)
    assert not os.path.exists(daemon.directory)
    use(other)
    assert until(lambda: gone(other))


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_ended_by_a_fault_its_log_says_where(tmp_path: Path, runtime: Path, number: int) -> None:
    daemon = begin(tmp_path)
    session = connect(daemon.endpoint, timeout_s=20)
    session.reserve(tile_bytes=256 << 10)
    os.kill(daemon.pid, number)
    log = log_named_by(daemon, session)
    assert "Fatal Python error" in log
    assert "in serve" in log
    use(begin(tmp_path))


def test_a_bug_before_it_is_ready_is_named_with_its_place_and_leaves_nothing(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(tmp_path, monkeypatch, "start")
    with pytest.raises(
        OffloadError, match=r"a bug of its own, ZeroDivisionError: a bug of two lines \(\S+daemon\.py, line \d+\)"
    ):
        begin(tmp_path)


def test_an_interpreter_that_ends_without_a_word_is_told_apart(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module >&2\nkill -ABRT $$\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(OffloadError, match=r"signal 6 \(Aborted\) ended it; its last words: no such module"):
        begin(tmp_path)


def test_killed_together_with_its_guardian_the_next_start_takes_its_directory_away(tmp_path: Path) -> None:
    daemon = begin(tmp_path)
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
    guardian = next(pid for pid in children if daemon.directory.encode() in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(int(guardian), signal.SIGKILL)
    os.kill(daemon.pid, signal.SIGKILL)
    os.waitpid(daemon.pid, 0)
    assert os.path.isdir(daemon.directory)
    other = begin(tmp_path)
    assert not os.path.exists(daemon.directory)
    use(other)
    assert until(lambda: gone(other))


def test_a_daemon_told_to_be_private_removes_no_directory_that_it_was_not_given(tmp_path: Path) -> None:
    """The key is everybody's; the directory of the socket may be a home."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").touch()
    command = [sys.executable, "-m", "offloadd", "serve", "--lifetime.private=true", "--telemetry.listen=none"]
    command += [f"--control.socket={home}/o.sock", f"--swap.paths={home}", "--io.calibrate_seconds=0"]
    subprocess.run([*command, "--lifetime.first-session-seconds=0.1"], check=True, timeout=60, capture_output=True)
    assert [entry.name for entry in home.iterdir()] == ["thesis.tex"]


def test_it_outlives_the_kill_of_the_rank_that_started_it_and_then_ends(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from offloadd.client import connect, start_private\n"
        f"daemon = start_private([{str(tmp_path)!r}], {SETTINGS!r})\n"
        "session = connect(daemon.endpoint)\n"
        "session.reserve(tile_bytes=256 << 10)\n"
        "print(daemon.pid, daemon.directory, flush=True)\n"
        "sys.stdin.read()\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid, directory = starter.stdout.readline().split()
    daemon = PrivateDaemon("", int(pid), directory)
    other = connect(f"unix://{directory}/offloadd.sock", timeout_s=10)
    starter.kill()
    starter.wait(10)
    assert os.path.exists(f"/proc/{pid}")
    other.close()
    assert until(lambda: gone(daemon))
    assert not list(tmp_path.iterdir())


def test_it_ends_with_whoever_started_it_and_never_came(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from offloadd.client import start_private\n"
        f"daemon = start_private([{str(tmp_path)!r}], {SETTINGS!r})\n"
        "print(daemon.pid, daemon.directory, flush=True)\n"
        "sys.stdin.read()\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid, directory = starter.stdout.readline().split()
    starter.kill()
    starter.wait(10)
    assert until(lambda: gone(PrivateDaemon("", int(pid), directory)))


def test_a_daemon_that_cannot_be_started_leaves_no_directory_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="/nowhere/python"):
        begin(tmp_path)
    assert set(os.listdir("/proc/self/fd")) == before
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_used_is_the_daemons_own_sentence(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="cannot be used: No such file") as caught:
        start_private([str(tmp_path / "missing")], SETTINGS, 30)
    assert "\n" not in caught.value.message
