"""Bad input, hostile surroundings and sudden ends, end to end. What goes wrong is said in one sentence, nobody hangs,
and nothing is left behind.

Covered where the thing lives, and not repeated here:

| what | where |
| --- | --- |
| unknown and mistyped keys of the trainer | unit/trainer/test_config.py: an_unknown_key_names_the_nearest_known_one |
| unknown and mistyped keys of the daemon | unit/test_config.py: a_bad_file_gets_one_sentence |
| device nvme without path and endpoint | unit/trainer/test_config.py: an_offload_block_that_cannot_work_is_refused |
| endpoint of another version or user, path that is a file, shared by two daemons; second daemon, stale socket | \
integration/test_lifecycle.py |
| ranks that disagree on model or configuration | numerics/parity/test_ranks.py |
| budget below one working set, model above the quota | integration/test_cases.py |
| another world size than the job's | unit/session/test_registry.py: a_rank_with_another_world_size_is_refused |
| non-finite gradients | unit/trainer/test_engine.py: a_non_finite_gradient_is_counted_and_named_once |
| a parameter touched outside forward | unit/trainer/test_stub.py: values_are_refused_with_name_shape_and_remedy |
| what the author of a script sees of a mistake | unit/trainer/test_boundary.py |
| access plans at their bounds | conformance/test_channel.py |
| times and rates that are not finite | unit/trainer/test_config.py: numbers_are_finite |
| constructors that zero.Init cannot follow | unit/trainer/test_constructors.py |
| 64 KiB of locked memory, io_uring forbidden | integration/test_restricted.py, integration/test_cases.py |
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer
from offloadd.client import Code, Mode, OffloadError, ShardSpec, connect
from offloadd.core.units import KIB, MIB
from offloadd.store.catalog import Catalog
from offloadd.wire.pb import control_pb2
from tests.daemon import ROOT, running, start, until
from tests.integration.test_restricted import round_trip
from tests.numerics.parity.world import spawn
from trainer.zero.errors import CollectiveError

TIMEOUT_S = 3
DAEMON_STARTS_S = 20
"""On a busy machine."""


def config_of(side: dict[str, Any], **ours: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", **side},
            "offload_optimizer": {"device": "nvme", **side},
            "stage3_param_persistence_threshold": 0,
        },
        "offloadd": {"host_bytes": 4 * MIB, "timeout_s": TIMEOUT_S, **ours},
    }


def one_sentence(text: str) -> None:
    assert "\n" not in text
    assert "Traceback" not in text


# ---- places that cannot be used ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "said"),
    [
        ({"nvme_path": "/nowhere/at/all"}, "swap path /nowhere/at/all cannot be used: No such file"),
        ({"nvme_path": "/etc/passwd"}, "swap path /etc/passwd cannot be used: it is not a directory"),
        ({"nvme_path": "/proc"}, "swap path /proc cannot be used"),
        ({"endpoint": "unix:///nowhere/o.sock"}, "there is no socket /nowhere/o.sock; start the daemon"),
        ({"endpoint": "unix:///etc/passwd"}, "/etc/passwd is not a socket"),
    ],
)
def test_a_place_that_cannot_be_used_is_named_before_anything_starts(
    runtime: Path, side: dict[str, Any], said: str
) -> None:
    with pytest.raises(trainer.SwapError, match=re.escape(said)) as caught:
        trainer.initialize(model=nn.Linear(4, 4), config=config_of(side))
    one_sentence(str(caught.value))


def test_a_grpc_endpoint_without_a_token_says_which_key_is_missing() -> None:
    with pytest.raises(trainer.SwapError, match="token_file"):
        trainer.initialize(model=nn.Linear(4, 4), config=config_of({"endpoint": "grpc://127.0.0.1:1"}))


def test_a_port_where_nobody_listens_is_named(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    started = time.monotonic()
    config = config_of({"endpoint": "grpc://127.0.0.1:1"}, token_file=str(token))
    with pytest.raises(trainer.SwapError, match=r"127\.0\.0\.1:1\b") as caught:
        trainer.initialize(model=nn.Linear(4, 4), config=config)
    one_sentence(str(caught.value))
    assert time.monotonic() - started < 3 * TIMEOUT_S


def test_a_program_that_takes_connections_and_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as control, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as attach:
        control.bind(f"{tmp_path}/o.sock")
        attach.bind(f"{tmp_path}/o.sock.attach")
        control.listen()
        attach.listen()
        with pytest.raises(OffloadError, match="did not answer in time") as caught:
            connect(f"unix://{tmp_path}/o.sock", timeout_s=0.5)
    assert caught.value.code is Code.TIMED_OUT


def test_a_read_only_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    with pytest.raises(RuntimeError, match="its file system is mounted read-only"):
        start(tmp_path, (f"tmpfs=ro:{tmp_path}/swap",))


def test_a_path_in_memory_works_and_is_flagged(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    daemon = start(tmp_path, (f"tmpfs=size=256m:{tmp_path}/swap",))
    try:
        session = daemon.session(host_bytes=4 * MIB, tile_bytes=256 * KIB)
        assert round_trip(session)
        session.close()
        assert daemon.status()["paths"][0]["filesystem"] == "tmpfs"  # type: ignore[index]
        assert "its bytes are memory, so swapping frees none" in daemon.log()
    finally:
        daemon.stop()


def test_a_path_that_filled_up_meanwhile_is_refused_before_step_one_with_both_figures(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    daemon = start(tmp_path, (f"tmpfs=size=100m:{tmp_path}/swap",))
    try:
        session = daemon.session(host_bytes=4 * MIB, swap_bytes=32 * MIB, tile_bytes=256 * KIB)
        (Path(f"/proc/{daemon.process.pid}/root{tmp_path}/swap") / "ballast").write_bytes(bytes(90 * MIB))
        with pytest.raises(OffloadError, match=r"has no room: needs 32 MiB more, available 10 MiB") as caught:
            session.register([ShardSpec("a", "float32", 32 * MIB, "param")])
        assert caught.value.code is Code.NO_SPACE
        one_sentence(caught.value.message)
        session.close()
    finally:
        daemon.stop()


def test_a_small_dev_shm_is_no_limit() -> None:
    with running(("tmpfs=size=64m:/dev/shm",), memory__host_bytes="256MiB") as daemon:
        session = daemon.session(host_bytes=160 * MIB, tile_bytes=4 * MIB)
        shard = session.register([ShardSpec("a", "float32", 128 * MIB, "param")])[0]
        for tile in range(len(shard.tiles)):
            session.fetch(shard, tile, Mode.OVERWRITE).wait().store()
        session.nop()
        session.close()


def test_a_runtime_directory_that_is_not_there_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere/at/all")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    engine = trainer.initialize(model=nn.Linear(4, 4), config=config_of({"nvme_path": str(tmp_path)})).engine
    engine.close()


def test_a_relative_path_is_relative_to_the_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime: Path
) -> None:
    (tmp_path / "swap").mkdir()
    monkeypatch.chdir(tmp_path)
    engine = trainer.initialize(model=nn.Linear(4, 4), config=config_of({"nvme_path": "./swap"})).engine
    assert os.path.samefile(engine.backends.param.daemon["paths"][0], tmp_path / "swap")  # type: ignore[attr-defined]
    engine.close()


def test_a_path_is_free_again_after_a_refusal_and_after_an_end(tmp_path: Path, runtime: Path) -> None:
    side = {"nvme_path": str(tmp_path)}
    with pytest.raises(trainer.SwapError, match="'a/b' cannot name a job"):
        trainer.initialize(model=nn.Linear(4, 4), config=config_of(side, job="a/b"))
    for _ in range(2):
        trainer.initialize(model=nn.Linear(4, 4), config=config_of(side)).engine.close()


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(trainer.SwapError, match=r"none was given; set nvme_path"):
        trainer.initialize(model=nn.Linear(4, 4), config=config_of({"nvme_path": ""}))


@pytest.mark.parametrize("module", ["trainer", "offloadd.client", "offloadd.node"])
def test_without_the_native_module_one_sentence_says_how_to_build_it(module: str) -> None:
    code = f"import sys; sys.modules['offloadd_native._ext'] = None; import {module}; import trainer.swap.daemon"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1
    assert re.search(r"native module is not built .*pip install", done.stderr.splitlines()[-1])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_without_an_end_is_refused_by_the_daemon_too(number: float) -> None:
    """Whatever another client may send."""
    with running() as daemon:
        with pytest.raises(OffloadError, match=rf"weight is {number}; give a finite number"):
            connect(daemon.endpoint, weight=number, timeout_s=10)
        session = connect(daemon.endpoint, timeout_s=10)
        reserve = control_pb2.ReserveRequest(session=session._ref, host_bytes=4 * MIB, timeout_s=number)
        with pytest.raises(OffloadError, match=rf"timeout_s is {number}; give a finite number") as caught:
            session.control.call(session.control.stub.Reserve, reserve, 10)
        assert caught.value.code is Code.BAD_REQUEST
        session.close()


# ---- a daemon that cannot start --------------------------------------------------------------------------------------


def _state(directory: Path, kind: str) -> Path:
    """A state_dir of which no catalog can be made."""
    state = directory / "state"
    if kind == "a file":
        state.write_text("mine")
    elif kind != "missing":
        state.mkdir()
        if kind == "corrupted":
            (state / "catalog.sqlite").write_bytes(b"not a database" * 1000)
        elif kind == "damaged inside":
            catalog = Catalog(str(state / "catalog.sqlite"))
            catalog.put_calibration("x", "y" * 100_000).result(10)
            catalog.close()
            with (state / "catalog.sqlite").open("r+b") as file:
                file.seek(4096)
                file.write(b"\xff" * 40_000)
        elif kind == "a directory in its place":
            (state / "catalog.sqlite").mkdir()
    return state


def refused_start(directory: Path, restrictions: tuple[str, ...] = (), **settings: object) -> str:
    """Start a daemon that must refuse; returns its sentence."""
    (directory / "log").unlink(missing_ok=True)
    with pytest.raises(RuntimeError) as caught:
        start(directory, restrictions, **settings)
    text = str(caught.value)
    assert "Traceback" not in text
    errors = [line for line in text.splitlines() if " ERROR " in line]
    assert len(errors) == 1, text
    return errors[0]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("a file", "is not a directory; create it"),
        ("missing", "is not a directory; create it"),
        ("read-only", "make the directory writable"),
        ("corrupted", "file is not a database; .* move a broken file away"),
        ("damaged inside", "malformed.* move a broken file away"),
        ("a directory in its place", "unable to open database file"),
    ],
)
def test_a_state_directory_that_cannot_be_used_is_one_sentence(tmp_path: Path, kind: str, said: str) -> None:
    state = _state(tmp_path, kind)
    restrictions = (f"tmpfs=ro:{state}",) if kind == "read-only" else ()
    more = {"io__calibrate_seconds": 0.1} if kind == "damaged inside" else {}
    assert re.search(said, refused_start(tmp_path, restrictions, session__state_dir=state, **more))


def test_a_socket_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    long, folder, file = f"/tmp/{'x' * 100}", tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.write_text("mine")
    (tmp_path / "beside.attach").mkdir()
    for path, said in (
        (long, "of 105 bytes; give a path of 1 to 100 bytes"),
        ("", "of 0 bytes; give a path"),
        (folder, f"{folder} is there and is not a socket"),
        (file, f"{file} is there and is not a socket"),
        (tmp_path / "beside", f"{tmp_path}/beside.attach is there and is not a socket"),
        (file / "o.sock", "cannot create .*: (Not a directory|File exists)"),
    ):
        assert re.search(said, refused_start(tmp_path, control__socket=path))
    assert file.read_text() == "mine"
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.parametrize("key", ["telemetry", "control"])
def test_a_port_in_use_is_one_sentence(tmp_path: Path, key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refused_start(tmp_path, **{f"{key}__listen": address})
        assert re.search(rf"cannot listen on {address}.*{key}.listen", said)


def test_a_token_file_that_is_not_text_is_one_sentence(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(b"\xff\xfe" * 20)
    token.chmod(0o600)
    said = refused_start(tmp_path, control__listen="127.0.0.1:0", control__token_file=token)
    assert f"cannot use the token file {token}: it is not text" in said


# ---- ranks together --------------------------------------------------------------------------------------------------


def say(folder: Path, rank: int, what: object) -> None:
    (folder / f"said{rank}.json").write_text(json.dumps([what, time.time()]))


def said(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"said{rank}.json").read_text())


def _one_rank_finds_no_room(rank: int, world: int, folder: Path, endpoint: str) -> None:
    try:
        # The sum fits, and rank 1's part does not.
        config = config_of({"endpoint": endpoint}, swap_bytes=64 * MIB)
        trainer.initialize(model=nn.Linear(2000, 2000), config=config)
    except trainer.SwapError as error:
        say(folder, rank, str(error))


def test_where_one_rank_finds_no_room_all_say_the_same(tmp_path: Path) -> None:
    directory = Path(tempfile.mkdtemp(prefix="od-"))
    (directory / "swap").mkdir()
    daemon = start(directory, (f"tmpfs=size=200m:{directory}/swap",))
    try:
        # 16 MB of parameters and 32 MB of states: less than fits into what is left.
        ballast = Path(f"/proc/{daemon.process.pid}/root{directory}/swap") / "ballast"
        ballast.write_bytes(bytes(170 * MIB))
        assert spawn(2, _one_rank_finds_no_room, (daemon.endpoint,), tmp_path) == [0, 0]
    finally:
        daemon.stop()
        shutil.rmtree(directory)
    first, second = said(tmp_path, 0)[0], said(tmp_path, 1)[0]
    assert first == second
    assert re.search(r"(needs .* available|has no room)", first)
    one_sentence(first)


def _steps(engine: trainer.Engine, count: int, width: int = 64) -> None:
    for _ in range(count):
        engine.backward(engine(torch.ones(1, width)).square().mean())
        engine.step()


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def _one_is_killed(rank: int, world: int, folder: Path, endpoint: str) -> None:
    engine = trainer.initialize(model=_model(), config=config_of({"endpoint": endpoint})).engine
    _steps(engine, 2)
    if rank == 1:
        say(folder, rank, "killed")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        _steps(engine, 50)
    except CollectiveError as error:
        say(folder, rank, str(error))
        os._exit(0)


def test_a_killed_rank_ends_the_others_within_the_bound(tmp_path: Path) -> None:
    with running() as daemon:
        codes = spawn(3, _one_is_killed, (daemon.endpoint,), tmp_path)
        assert codes == [0, -signal.SIGKILL, 0]
        assert until(lambda: daemon.status()["memory"]["granted_bytes"] == 0)  # type: ignore[index]
    died = said(tmp_path, 1)[1]
    for rank in (0, 2):
        text, when = said(tmp_path, rank)
        one_sentence(text)
        assert re.search(r"waited up to 3 s for the other ranks in \S", text)
        assert when - died < 3 * TIMEOUT_S


def _one_dies_early(rank: int, world: int, folder: Path) -> None:
    if rank == 0:
        say(folder, 9, "in the group")
    if rank == 1:
        # The group is whole for this rank a moment before it is for the other, which would fail in torch if this one
        # went at once.
        assert until((folder / "said9.json").exists, 60)
        say(folder, rank, "gone")
        os._exit(0)
    try:
        trainer.initialize(model=_model(), config=config_of({"nvme_path": str(folder / "swap")}))
    except (trainer.SwapError, CollectiveError) as error:
        say(folder, rank, str(error))
        os._exit(0)


def test_a_rank_that_dies_before_it_has_joined_is_waited_for_only_so_long(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "swap").mkdir()
    assert spawn(2, _one_dies_early, (), tmp_path) == [0, 0]
    text, when = said(tmp_path, 0)
    one_sentence(text)
    assert f"waited up to {TIMEOUT_S} s" in text
    # Before it waits it starts a daemon, which measures the disk.
    assert when - said(tmp_path, 1)[1] < 3 * TIMEOUT_S + DAEMON_STARTS_S


def _worlds_differ(rank: int, world: int, folder: Path, endpoint: str) -> None:
    """Two groups of one rank each that both call themselves the same job; the second says that it has two ranks."""
    config = config_of({"endpoint": endpoint}, job="shared", swap_bytes=16 * MIB)
    engine = trainer.initialize(model=nn.Linear(8, 8), config=config).engine
    with pytest.raises(OffloadError) as caught:
        connect(endpoint, job="shared", rank=1, world_size=2, local_world_size=2, timeout_s=5)
    say(folder, rank, [caught.value.code, caught.value.message])
    engine.close()


def test_another_world_size_than_the_jobs_is_refused_with_both(tmp_path: Path) -> None:
    with running() as daemon:
        assert spawn(1, _worlds_differ, (daemon.endpoint,), tmp_path) == [0]
    (code, text), _ = said(tmp_path, 0)
    assert code == Code.WRONG_WORLD
    assert re.search(r"shared.*\b1\b.*\b2\b|shared.*\b2\b.*\b1\b", text)
    one_sentence(text)


def _daemon_is_killed(rank: int, world: int, folder: Path) -> None:
    config = config_of({"nvme_path": str(folder / "swap")})
    engine = trainer.initialize(model=_model(), config=config).engine
    try:
        _steps(engine, 2)
        if rank == 0:
            say(folder, 9, "killed")
            os.kill(engine.backends.param.daemon["pid"], signal.SIGKILL)  # type: ignore[attr-defined]
        _steps(engine, 50)
    except (trainer.SwapError, CollectiveError) as error:
        say(folder, rank, str(error))
        os._exit(0)


def test_a_killed_daemon_ends_its_ranks_within_the_bound(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "swap").mkdir()
    assert spawn(2, _daemon_is_killed, (), tmp_path) == [0, 0]
    died = said(tmp_path, 9)[1]
    texts = []
    for rank in range(2):
        text, when = said(tmp_path, rank)
        one_sentence(text)
        texts.append(text)
        assert when - died < 3 * TIMEOUT_S
    assert any("private daemon" in text and "is gone (killed or crashed)" in text for text in texts)
    assert not list((tmp_path / "swap").iterdir())


@pytest.mark.full
@pytest.mark.slow
def test_a_daemon_that_hangs_costs_one_bound_and_not_one_per_parameter(tmp_path: Path, runtime: Path) -> None:
    config = config_of({"nvme_path": str(tmp_path)}, timeout_s=1)
    engine = trainer.initialize(model=nn.Sequential(*(nn.Linear(8, 8) for _ in range(30))), config=config).engine
    _steps(engine, 3, 8)
    pid = engine.backends.param.daemon["pid"]  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(trainer.SwapError, match=r"no answer for .* within 1 s; see the daemon's status and log"):
            _steps(engine, 3, 8)
        assert time.monotonic() - started < 8
        with contextlib.suppress(trainer.SwapError):
            engine.close()
        assert time.monotonic() - started < 25
    finally:
        os.kill(pid, signal.SIGCONT)


# ---- ended at any time -----------------------------------------------------------------------------------------------

TRAIN = """
import signal, sys
import torch, trainer
from tests.integration.test_bad_input import _model, _steps, config_of
torch.set_num_threads(1)
print("up", flush=True)
engine = trainer.initialize(model=_model(), config=config_of({"nvme_path": sys.argv[1]})).engine
print("initialized", flush=True)
while True:
    _steps(engine, 1)
    print("step", flush=True)
"""


@pytest.mark.parametrize(
    "moment", ["up", pytest.param("initialized", marks=pytest.mark.full), pytest.param("step", marks=pytest.mark.slow)]
)
def test_a_rank_ended_at_any_time_leaves_nothing(tmp_path: Path, runtime: Path, moment: str) -> None:
    """By Ctrl-C, SIGTERM and SIGKILL, all three at the same time."""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    swaps = [tmp_path / number.name for number in numbers]
    for swap in swaps:
        swap.mkdir()
    command = [sys.executable, "-c", TRAIN]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [subprocess.Popen([*command, str(swap)], **pipes) for swap in swaps]
    for process in processes:
        next(line for line in process.stdout if line.strip() == moment)
    if moment == "up":
        # In the middle of the daemons' start, since each measures its path for longer than this takes.
        assert until(lambda: len(list(runtime.iterdir())) == 3)
    for process, number in zip(processes, numbers, strict=True):
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        assert process.returncode in (-number, 1, 130)
        # Python's own word for Ctrl-C, and nothing else.
        assert not errors or (number is signal.SIGINT and errors.splitlines()[-1].startswith("KeyboardInterrupt"))
    assert until(lambda: not list(runtime.iterdir()), 20)
    assert not [left for swap in swaps for left in swap.iterdir()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_daemon_ended_at_any_time_of_its_start_leaves_nothing(number: signal.Signals) -> None:
    """Several, each at another moment: importing, probing, measuring, ready."""
    with tempfile.TemporaryDirectory(prefix="od-") as directory:
        started = []
        for after in (0.1, 0.3, 0.9, 2.5):
            swap = Path(directory, f"swap{after}")
            swap.mkdir()
            command = [sys.executable, "-m", "offloadd", "serve", f"--control.socket={directory}/{after}.sock"]
            command += [f"--swap.paths={swap}", "--memory.host_bytes=64MiB", "--telemetry.listen=none"]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
            started.append((time.monotonic() + after, subprocess.Popen(command, **pipes)))
        for when, process in started:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(max(0.01, when - time.monotonic()))
            process.send_signal(number)
        for _, process in started:
            _, errors = process.communicate(timeout=20)
            # A Ctrl-C before our first line is Python's own to tell, with exit code 1.
            ours = f"{ROOT}/offloadd/" in errors or not errors.rstrip().endswith("KeyboardInterrupt")
            assert not ours or process.returncode in (0, -number), errors
            assert not ours or "Traceback" not in errors, errors
        left = {path.suffix for path in Path(directory).rglob("*") if path.is_file() or path.is_socket()}
        assert left <= {".lock", ".sock"}
