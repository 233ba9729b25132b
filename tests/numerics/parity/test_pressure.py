"""Training through a daemon with memory for little more than what is in use: slower, never different, never stuck."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainer
from tests.daemon import running
from tests.numerics.parity.world import spawn

STEPS = 4
WIDTH = 256
HOST_BYTES = 1664 << 10
"""Room for the tiles that the engine works with at once, and no more."""


class Deep(nn.Module):
    """Eight layers, the first and the last with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.layers[7].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()


class Embedding(nn.Module):
    """One tensor several times as large as any slot."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3000, WIDTH)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.abs().mul(100).long() % 3000
        return self.head(self.table(rows)).square().mean()


MODELS = {"deep": Deep, "embedding": Embedding}


def config_of(endpoint: str | None, host_bytes: int) -> dict[str, Any]:
    side = {"device": "nvme", "endpoint": endpoint} if endpoint else {"device": "none"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": side,
            "offload_optimizer": side,
            "stage3_prefetch_bucket_size": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_param_persistence_threshold": 0,
        },
        "offloadd": {"host_bytes": host_bytes, "swap_bytes": 64 << 20, "timeout_s": 20},
    }


def _train(rank: int, world: int, folder: Path, model: str, endpoint: str | None, host_bytes: int) -> None:
    torch.manual_seed(0)
    engine = trainer.initialize(model=MODELS[model](), config=config_of(endpoint, host_bytes)).engine
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = engine(torch.randn(2, WIDTH, generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append([loss.item(), engine.get_global_grad_norm()])
    read = engine.backends.param.statistics().get("disk_read_bytes", 0.0)
    (folder / f"trained{rank}.json").write_text(json.dumps({"losses": losses, "disk_read_bytes": read}))
    engine.close()


def train(world: int, folder: Path, *arguments: object) -> list[dict[str, Any]]:
    folder.mkdir()
    codes = spawn(world, _train, arguments, folder)
    assert codes == [0] * world, "\n".join(path.read_text() for path in folder.glob("error*.txt"))
    return [json.loads((folder / f"trained{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize(("model", "world"), [("deep", 2), ("embedding", 1)])
def test_little_memory_changes_time_only(tmp_path: Path, model: str, world: int) -> None:
    plain = train(world, tmp_path / "plain", model, None, HOST_BYTES)
    with running(memory__host_bytes="4MiB") as daemon:
        small = train(world, tmp_path / "small", model, daemon.endpoint, HOST_BYTES)
    assert [rank["losses"] for rank in small] == [rank["losses"] for rank in plain]
    assert all(rank["disk_read_bytes"] > 0 for rank in small)


def _refused(rank: int, world: int, folder: Path, endpoint: str) -> None:
    config = config_of(endpoint, 8 << 20)
    config["offloadd"]["swap_bytes"] = 1 << 20
    try:
        trainer.initialize(model=Embedding(), config=config)
    except trainer.SwapError as error:
        (folder / f"said{rank}.txt").write_text(str(error))


def test_a_model_larger_than_its_budget_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with running() as daemon:
        codes = spawn(1, _refused, (daemon.endpoint,), tmp_path)
    assert codes == [0]
    assert "1 MiB" in (tmp_path / "said0.txt").read_text()
