"""Sessions and daemons that come, go, die and collide. Nothing leaks, nobody hangs, each error is one sentence."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offloadd.client import Code, Mode, OffloadError, ShardSpec, connect
from offloadd.client.control import ControlClient
from offloadd.core.units import KIB, MIB
from offloadd.wire import attach
from tests.daemon import Daemon, running, start, until

RANK = """
import os, signal, sys
from offloadd.client import connect, ShardSpec, Mode
session = connect(sys.argv[1], job="doomed", timeout_s=20)
session.reserve(host_bytes=4 << 20, tile_bytes=256 << 10)
shard = session.register([ShardSpec("a", "float32", 8 << 20, "param")])[0]
held = [session.fetch(shard, i, Mode.OVERWRITE).wait() for i in range(3)]
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    print(child, flush=True)
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running() as started:
        yield started


def rank(daemon: Daemon, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RANK, daemon.endpoint, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def granted(daemon: Daemon) -> int:
    memory = daemon.status()["memory"]
    assert isinstance(memory, dict)
    return int(memory["granted_bytes"])


def shared_kib(pid: int) -> int:
    for text in Path(f"/proc/{pid}/status").read_text().splitlines():
        if text.startswith("RssShmem:"):
            return int(text.split()[1])
    return 0


def test_a_killed_rank_gives_everything_back(daemon: Daemon) -> None:
    doomed = rank(daemon)
    assert line(doomed) == "holding"
    assert granted(daemon) == 4 * MIB
    descriptors = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
    doomed.kill()
    doomed.wait(10)
    assert until(lambda: granted(daemon) == 0)
    assert len(os.listdir(f"/proc/{daemon.process.pid}/fd")) < descriptors
    assert shared_kib(daemon.process.pid) < 3 * 1024


def test_a_forked_child_does_not_keep_its_dead_rank_alive(daemon: Daemon) -> None:
    doomed = rank(daemon, "fork")
    child = int(line(doomed))
    try:
        assert line(doomed) == "holding"
        doomed.kill()
        doomed.wait(10)
        assert until(lambda: granted(daemon) == 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_new_session_of_a_rank_fences_the_old_one(daemon: Daemon) -> None:
    old = daemon.session(job="a", host_bytes=4 * MIB, tile_bytes=256 * KIB)
    new = connect(daemon.endpoint, job="a", timeout_s=10)
    with pytest.raises(OffloadError) as caught:
        old.register([ShardSpec("a", "float32", 1000, "param")])
    assert caught.value.code is Code.STALE_SESSION
    new.close()
    old.close()


def test_a_killed_daemon_is_an_error_not_a_hang(daemon: Daemon) -> None:
    session = daemon.session(host_bytes=4 * MIB, tile_bytes=256 * KIB)
    shard = session.register([ShardSpec("a", "float32", 1000, "param")])[0]
    daemon.kill()
    started = time.monotonic()
    with pytest.raises(OffloadError, match="is gone") as caught:
        session.fetch(shard, 0, Mode.OVERWRITE).wait()
    assert caught.value.code is Code.UNAVAILABLE
    assert time.monotonic() - started < 5
    session.close()


CALLS = ["close", "flush", "fetch", "drop", "reserve", "register", "plan", "statistics"]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def noting(real: Callable[..., object], entered: threading.Event) -> Callable[..., object]:
    def call(*arguments: object) -> object:
        entered.set()
        return real(*arguments)

    return call


@pytest.mark.parametrize("channel", ["ring", "stream"])
@pytest.mark.parametrize("call", CALLS)
def test_a_daemon_killed_within_a_call_ends_it_soon_with_one_sentence_and_no_leak(
    channel: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(control__listen="127.0.0.1:0") as daemon:
        daemon.session(channel).close()  # what gRPC makes once and keeps
        files, threads = open_files(), set(threading.enumerate())
        session = daemon.session(channel, host_bytes=4 * MIB, tile_bytes=256 * KIB)
        shard = session.register([ShardSpec("a", "float32", 1000, "param")])[0]
        session.fetch(shard, 0, Mode.OVERWRITE).wait().store()
        calls: dict[str, Callable[[], object]] = {
            "close": session.close,
            "flush": session.flush,
            "fetch": lambda: session.fetch(shard, 0, Mode.READ).wait(),
            "drop": lambda: session.drop(shard, 0),
            "reserve": session.reserve,
            "register": lambda: session.register([ShardSpec("b", "float32", 1000, "param")]),
            "plan": lambda: session.plan([(shard.number, 0, Mode.READ)]),
            "statistics": session.statistics,
        }
        under_way = threading.Event()
        for owner, name in ((session.control, "call"), (session._channel, "wait")):
            monkeypatch.setattr(owner, name, noting(getattr(owner, name), under_way))
        said: list[OffloadError] = []

        def run() -> None:
            try:
                calls[call]()
            except OffloadError as error:
                said.append(error)

        caller = threading.Thread(target=run)
        daemon.process.send_signal(signal.SIGSTOP)  # so that nothing is answered before it is killed
        caller.start()
        assert under_way.wait(20)
        assert caller.is_alive()
        started = time.monotonic()
        daemon.kill()
        caller.join(20)
        assert not caller.is_alive()
        assert time.monotonic() - started < 4
        # Closing gives back what the daemon's end has given back already.
        assert [error.code for error in said] == ([] if call == "close" else [Code.UNAVAILABLE])
        assert all(re.fullmatch(r"the daemon at \S+ is gone .*; look at its log, .*", error.message) for error in said)
        session.close()
        assert until(lambda: set(threading.enumerate()) <= threads)
        # Even while somebody keeps the error, and with its traceback everything that the call saw.
        assert until(lambda: open_files() <= files)


@pytest.mark.parametrize("channel", ["ring", "stream"])
def test_a_daemon_killed_while_a_client_connects_is_one_sentence_and_leaves_nothing(
    channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(control__listen="127.0.0.1:0") as daemon:
        daemon.session(channel).close()
        files = open_files()
        where, token = (daemon.endpoint, None) if channel == "ring" else (daemon.stream_endpoint(), daemon.token_file)
        daemon.process.send_signal(signal.SIGSTOP)
        killer = threading.Thread(target=daemon.kill)
        name = "_attach_call" if channel == "ring" else "call"  # the first to wait for an answer
        real = getattr(ControlClient, name)
        monkeypatch.setattr(ControlClient, name, lambda *arguments: (killer.start(), real(*arguments))[1])
        with pytest.raises(OffloadError) as caught:
            connect(where, token_file=token, timeout_s=20)
        killer.join(20)
        assert caught.value.code is Code.UNAVAILABLE
        assert where in caught.value.message
        assert "\n" not in caught.value.message
        assert until(lambda: open_files() <= files)


def test_sigterm_with_a_session_open_ends_within_the_drain_time(daemon: Daemon) -> None:
    session = daemon.session(host_bytes=4 * MIB, tile_bytes=256 * KIB)
    assert daemon.stop(timeout_s=10) == 0
    assert "Traceback" not in daemon.log()
    assert sorted(path.name for path in daemon.directory.iterdir()) == ["log", "swap"]
    session.close()


def test_ctrl_c_ends_it_as_well(daemon: Daemon) -> None:
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(10) == 0


def test_a_second_daemon_on_the_socket_is_refused_and_the_first_goes_on(daemon: Daemon) -> None:
    with pytest.raises(RuntimeError, match=f"another daemon .pid {daemon.process.pid}. serves"):
        start(daemon.directory)
    assert daemon.status()["ready"]


def test_two_daemons_never_share_a_path(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"another daemon .pid {daemon.process.pid}. swaps there"):
        start(tmp_path, swap__paths=daemon.directory / "swap")


def test_a_stale_socket_file_is_no_obstacle(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(f"{tmp_path}/o.sock")
    daemon = start(tmp_path)
    assert daemon.status()["ready"]
    daemon.stop()


def test_a_client_that_scribbles_over_its_ring_ends_alone(daemon: Daemon) -> None:
    mad = daemon.session(job="mad", host_bytes=4 * MIB, tile_bytes=256 * KIB)
    sane = daemon.session(job="sane", host_bytes=4 * MIB, tile_bytes=256 * KIB)
    ring = mad._channel._ring  # type: ignore[union-attr]
    ring[:] = os.urandom(len(ring))
    os.eventfd_write(mad._channel._submission_doorbell, 1)  # type: ignore[union-attr]
    assert until(lambda: granted(daemon) == 4 * MIB)
    sane.nop()
    sane.close()
    mad.close()


def test_a_hundred_sessions_leave_descriptors_and_memory_as_they_were(daemon: Daemon) -> None:
    def once() -> None:
        session = daemon.session(host_bytes=4 * MIB, tile_bytes=256 * KIB)
        session.nop()
        session.close()

    once()
    before = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
    for _ in range(100):
        once()
    assert until(lambda: len(os.listdir(f"/proc/{daemon.process.pid}/fd")) <= before + 2)
    assert granted(daemon) == 0


def test_a_stranger_is_refused_by_the_socket(daemon: Daemon) -> None:
    os.chmod(daemon.directory, 0o755)
    code = (
        # email.parser: what connect imports late, while the interpreter may still be read.
        "import os, email.parser\nfrom offloadd.client import OffloadError, connect\nos.setuid(65534)\n"
        f"try:\n    connect({daemon.endpoint!r}, timeout_s=5)\nexcept OffloadError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "user 65534 may not connect" in done.stdout


def test_another_version_is_told_so(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"{daemon.directory}/o.sock.attach")
        connection.sendall(attach.ATTACH_MAGIC + bytes([1]) + (99).to_bytes(4, "little"))
        with pytest.raises(OffloadError, match="API version 99") as caught:
            attach.unpack_response(connection.recv(1024), "here")
    assert caught.value.code is Code.WRONG_VERSION


@pytest.mark.parametrize("garbage", [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000)])
def test_garbage_on_the_attach_socket_hurts_nobody(daemon: Daemon, garbage: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"{daemon.directory}/o.sock.attach")
        with contextlib.suppress(OSError):
            connection.send(garbage)
        connection.settimeout(5)
        with contextlib.suppress(OSError):
            connection.recv(1024)
    assert daemon.status()["ready"]


def test_a_socket_that_is_not_a_daemon_is_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{tmp_path}/o.sock")
        other.listen()
        with pytest.raises(OffloadError, match=r"o\.sock") as caught:
            connect(f"unix://{tmp_path}/o.sock", timeout_s=2)
    assert caught.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"swap__paths": "/nowhere/at/all"}, "swap path /nowhere/at/all cannot be used: No such file"),
        ({"swap__paths": "/etc/passwd"}, "/etc/passwd cannot be used: it is not a directory"),
        ({"swap__paths": "/proc"}, "swap path /proc cannot be used"),
        ({"memory__host_bytes": "lots"}, "memory.host_bytes = 'lots'"),
        ({"memory__host_bytes": "900TiB"}, "this machine has .* in all; lower it"),
        ({"io__engine": "aio"}, "io.engine = 'aio'"),
        ({"control__listen": "10.1.2.3:9000"}, "not a loopback address"),
        ({"telemetry__listen": "127.0.0.1:99999"}, "telemetry.listen"),
    ],
)
def test_a_daemon_that_cannot_start_says_why_in_one_sentence(
    tmp_path: Path, settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(RuntimeError, match=sentence) as caught:
        start(tmp_path, **settings)
    assert "Traceback" not in str(caught.value)


def test_a_wrong_token_opens_nothing(tmp_path: Path) -> None:
    with running(control__listen="127.0.0.1:0") as daemon:
        wrong = tmp_path / "token"
        wrong.write_text("0" * 64)
        wrong.chmod(0o600)
        with pytest.raises(OffloadError, match="token") as caught:
            connect(daemon.stream_endpoint(), token_file=str(wrong), timeout_s=5)
        assert caught.value.code is Code.BAD_TOKEN


def test_a_token_file_open_to_others_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o644)
    with pytest.raises(OffloadError, match="chmod it 600"):
        connect("grpc://127.0.0.1:1", token_file=str(token), timeout_s=5)
