"""One rank of two ends, in every way and everywhere: the other ends soon and says why, and nothing is left behind.

The survivor always notices by the connection that closes, never by a bound that runs out: the bound of every wait is
longer than what these tests allow.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer
from offloadd.core.units import MIB
from tests.daemon import ROOT, Daemon, running, until

SCRIPT = Path(__file__).with_name("ending_rank.py")
WAYS = ["SIGKILL", "raise", "exit", "SIGTERM", "SIGINT"]
PHASES = {"init": 0, "forward": 1, "backward": 1, "step": 1, "between": 1}
"""Where, and in which step."""
DAEMONS = ["private", "shared"]

SHORT = {
    ("SIGKILL", "init", "private", 0),
    ("SIGKILL", "backward", "shared", 1),
    ("raise", "forward", "shared", 0),
    ("raise", "backward", "private", 1),
    ("exit", "step", "shared", 0),
    ("exit", "between", "private", 1),
    ("SIGTERM", "step", "private", 0),
    ("SIGINT", "forward", "private", 1),
    ("SIGINT", "step", "shared", 1),
}
"""Every way, every place, either daemon, either rank: what runs every time. The others are variants."""

ENDS = {
    "SIGKILL": (-signal.SIGKILL, ""),
    "raise": (1, "ValueError: the user's own mistake"),
    "exit": (3, ""),
    "SIGTERM": (-signal.SIGTERM, ""),
    "SIGINT": (-signal.SIGINT, "KeyboardInterrupt"),
}
"""Exit status and last words of the rank that ends: Python's own, as without us."""

WAIT_SECONDS = 60
ALLOWED_SECONDS = 30


@dataclass
class End:
    """Of one rank."""

    status: int
    errors: str
    at: float


def config_of(side: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", **side},
            "offload_optimizer": {"device": "nvme", **side},
            "stage3_param_persistence_threshold": 0,
        },
        "offloadd": {"host_bytes": 4 * MIB, "swap_bytes": 16 * MIB, "timeout_s": WAIT_SECONDS},
        **more,
    }


def run_ranks(tasks: list[dict[str, Any]], folder: Path) -> list[End]:
    """Run the script on one rank per task. Bounded, and nobody is left over."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(len(tasks)), "LOCAL_WORLD_SIZE": str(len(tasks))}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes: list[subprocess.Popen[bytes]] = []
    ended: dict[int, float] = {}
    said = [folder / f"errors{rank}" for rank in range(len(tasks))]

    def all_ended() -> bool:
        for rank, process in enumerate(processes):
            if process.poll() is not None:
                ended.setdefault(rank, time.monotonic())
        return len(ended) == len(tasks)

    try:
        for rank, task in enumerate(tasks):
            environment = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, str(SCRIPT), json.dumps(task)]
            with said[rank].open("wb") as errors:
                processes.append(subprocess.Popen(command, env=environment, cwd=ROOT, stderr=errors))
        assert until(all_ended, WAIT_SECONDS), f"ended: {ended}; {[file.read_text() for file in said]}"
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    # torch puts the rank before each line of a traceback.
    words = [re.sub(r"(?m)^\[rank\d\]: ?", "", file.read_text()) for file in said]
    return [End(process.returncode, words[rank], ended[rank]) for rank, process in enumerate(processes)]


def last_line(text: str) -> str:
    return text.splitlines()[-1] if text else ""


def ended_clearly(end: End) -> None:
    """By one typed sentence that names what was waited for, below the script's own lines."""
    assert end.status == 1, end
    assert re.fullmatch(r"trainer\S+(CollectiveError|SwapError): rank \d of 2 waited .* in .*", last_line(end.errors))
    assert end.errors.count("Traceback") == 1, end.errors
    assert not re.search(r'File ".*/(trainer|offloadd)/(?!boundary\.py)', end.errors), end.errors


def plain_losses(steps: int) -> list[float]:
    """What torch alone computes."""
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 64)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def our_losses(endpoint: str, steps: int) -> list[float]:
    engine = trainer.initialize(model=seeded(), config=config_of({"endpoint": endpoint})).engine
    losses = []
    for _ in range(steps):
        loss = engine(torch.ones(1, 64)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """One for all jobs of this file: each finds what the ones before it left."""
    with running() as daemon:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log()


def nothing_granted(daemon: Daemon) -> bool:
    status: Any = daemon.status()
    granted = status["memory"]["granted_bytes"] + status["swap"]["granted_bytes"]
    return granted == 0 and not status["sessions"]


def cases() -> Iterator[Any]:
    for case in itertools.product(WAYS, PHASES, DAEMONS, (0, 1)):
        yield pytest.param(*case, marks=[] if case in SHORT else [pytest.mark.full, pytest.mark.slow])


@pytest.mark.parametrize(("how", "phase", "kind", "ending"), list(cases()))
def test_a_rank_that_ends_ends_the_other_with_a_sentence_and_leaves_nothing(
    tmp_path: Path, runtime: Path, request: pytest.FixtureRequest, how: str, phase: str, kind: str, ending: int
) -> None:
    """Rank 0 holds the rendezvous of a group that we make, and has started the private daemon; when rank 1 is the one
    that ends, the group is the script's own."""
    swap = tmp_path / "swap"
    swap.mkdir()
    daemon: Daemon | None = request.getfixturevalue("shared") if kind == "shared" else None
    task: dict[str, Any] = {"config": config_of({"endpoint": daemon.endpoint} if daemon else {"nvme_path": str(swap)})}
    if ending == 1:
        task["rendezvous"] = f"file://{tmp_path}/rendezvous"
    tasks = [task, task]
    tasks[ending] = {**task, "how": how, "phase": phase, "step": PHASES[phase]}
    ends = run_ranks(tasks, tmp_path)
    gone, survivor = ends[ending], ends[1 - ending]

    status, words = ENDS[how]
    assert (gone.status, last_line(gone.errors)) == (status, words), gone.errors
    assert gone.errors.count("Traceback") == (1 if words else 0)
    ended_clearly(survivor)
    assert survivor.at - gone.at < ALLOWED_SECONDS
    if daemon is None:
        assert until(lambda: not list(runtime.iterdir()) and not list(swap.iterdir()), 20)
    else:
        assert until(lambda: nothing_granted(daemon))
        assert our_losses(daemon.endpoint, 3) == pytest.approx(plain_losses(3), rel=1e-5)
        assert nothing_granted(daemon)
