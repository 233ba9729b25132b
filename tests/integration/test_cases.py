"""Configurations that are known to break engines of this kind, each trained through a private daemon on `nvme_path`.

The same ranks train once without offload and once through the daemon; what must be equal is equal bit for bit.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainer
from offloadd.core.units import MIB
from offloadd.session.reservation import TILE_BYTES_MIN
from tests.daemon import running
from tests.numerics.parity.cells import same_bits
from tests.numerics.parity.world import spawn
from tests.restrict import refuse_io_uring
from trainer.swap.daemon import PINNED_TILES

STEPS = 4
WIDTH = 256
LEAST_HOST_BYTES = (2 * PINNED_TILES + 1) * TILE_BYTES_MIN
"""What the daemon grants a rank at the least."""


class Tied(nn.Module):
    """Eight layers, the first and the last with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.layers[7].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()


class Table(nn.Module):
    """One parameter five times as large as all the host memory of its rank."""

    ROWS = 5 * LEAST_HOST_BYTES // (4 * WIDTH)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(self.ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x.abs().mul(1000).long() % self.ROWS)).square().mean()


SHAPES: dict[str, tuple[int, ...]] = {
    "one": (1,),
    "seven": (7,),
    "odd": (513, 1001),
    "below": (262_143,),
    "even": (262_144,),
    "above": (262_145,),
}


class Ragged(nn.Module):
    """Parameters that no number of ranks, page or tile divides."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(piece * x.mean()).square().mean() for piece in self.pieces.values()]).sum()


MODELS: dict[str, Callable[[], nn.Module]] = {"tied": Tied, "table": Table, "ragged": Ragged}


def config_of(side: dict[str, Any], bf16: bool = False, **ours: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {
            "stage": 3,
            "offload_param": side,
            "offload_optimizer": side,
            "stage3_prefetch_bucket_size": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_param_persistence_threshold": 0,
        },
        "offloadd": {"host_bytes": LEAST_HOST_BYTES, "timeout_s": 30, **ours},
    }


def _train(rank: int, model: str, side: dict[str, Any], bf16: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    built = trainer.initialize(model=MODELS[model](), config=config_of(side, bf16))
    engine, losses = built.engine, []
    for step in range(STEPS):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(x.bfloat16() if bf16 else x)
        engine.backward(loss)
        engine.step()
        losses.append([loss.item(), engine.get_global_grad_norm()])
    states = {
        f"{zero.name}.{kind}": t.clone() for zero, kinds in built.optimizer.shard_states() for kind, t in kinds.items()
    }
    with trainer.zero.GatheredParameters(engine.parameters()):
        states |= {name: param.detach().clone() for name, param in engine.named_parameters()}
    counters = engine.backends.param.statistics()
    daemon = getattr(engine.backends.param, "daemon", {})
    engine.close()
    return {"losses": losses, "states": states, "counters": counters, "daemon": daemon}


def _both(rank: int, world: int, folder: Path, model: str, bf16: bool, forbid_uring: bool) -> None:
    """Without offload, then through a private daemon; writes down what differs."""
    if forbid_uring:
        refuse_io_uring(1)
    swap = folder / "swap"
    plain = _train(rank, model, {"device": "none"}, bf16)
    ours = _train(rank, model, {"device": "nvme", "nvme_path": str(swap)}, bf16)
    different = [name for name, tensor in plain["states"].items() if not same_bits(tensor, ours["states"][name])]
    said = {
        "losses": [plain["losses"], ours["losses"]],
        "different": different,
        "names": [len(plain["states"]), len(ours["states"])],
        "counters": ours["counters"],
        "engine": ours["daemon"]["engine"],
    }
    (folder / f"said{rank}.json").write_text(json.dumps(said))


def both(world: int, folder: Path, model: str, bf16: bool = False, forbid_uring: bool = False) -> list[dict[str, Any]]:
    """What each rank said, after checking that the bits are the same and nothing was left behind."""
    (folder / "swap").mkdir()
    codes = spawn(world, _both, (model, bf16, forbid_uring), folder)
    assert codes == [0] * world, "\n".join(path.read_text() for path in folder.glob("error*.txt"))
    said = [json.loads((folder / f"said{rank}.json").read_text()) for rank in range(world)]
    for rank in said:
        assert rank["losses"][0] == rank["losses"][1]
        assert rank["different"] == []
        assert rank["names"][0] == rank["names"][1]
    assert not list((folder / "swap").iterdir())
    return said


def test_tied_weights_in_the_least_memory_wait_and_change_nothing(tmp_path: Path) -> None:
    for rank in both(2, tmp_path, "tied"):
        counters = rank["counters"]
        assert counters["stall_seconds_slots_exhausted"] + counters["stall_seconds_writeback"] > 0
        assert counters["disk_read_bytes"] > 0


def test_one_byte_less_than_the_least_memory_is_refused_with_the_figure(tmp_path: Path) -> None:
    side = {"device": "nvme", "nvme_path": str(tmp_path)}
    with pytest.raises(
        trainer.SwapError,
        match=r"12 tiles of 64 KiB .* needs 1\.56 MiB .*1638400.* but gets .*1634304.* raise the host budget",
    ):
        trainer.initialize(model=Tied(), config=config_of(side, host_bytes=LEAST_HOST_BYTES - 4096))


def test_a_parameter_larger_than_all_memory_moves_in_tiles(tmp_path: Path) -> None:
    assert both(1, tmp_path, "table")[0]["counters"]["disk_read_bytes"] > 5 * LEAST_HOST_BYTES


def _refused(rank: int, world: int, folder: Path, endpoint: str) -> None:
    side = {"device": "nvme", "endpoint": endpoint}
    try:
        trainer.initialize(model=Table(), config=config_of(side, swap_bytes=2 * MIB))
    except trainer.SwapError as error:
        (folder / f"said{rank}.txt").write_text(str(error))


def test_a_parameter_larger_than_the_quota_is_refused_on_every_rank_with_both_figures(tmp_path: Path) -> None:
    with running() as daemon:
        assert spawn(2, _refused, (daemon.endpoint,), tmp_path) == [0, 0]
    first, second = ((tmp_path / f"said{rank}.txt").read_text() for rank in range(2))
    assert first == second
    assert "2 MiB" in first
    assert "\n" not in first


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_ragged_shards_on_three_ranks_come_back_bit_for_bit(tmp_path: Path, bf16: bool) -> None:
    both(3, tmp_path, "ragged", bf16)


def test_half_precision_is_refused_in_one_sentence() -> None:
    config = {**config_of({"device": "none"}), "fp16": {"enabled": True}}
    with pytest.raises(trainer.ConfigError, match=r"fp16\.enabled is not supported yet; use bf16"):
        trainer.initialize(model=nn.Linear(4, 4), config=config)


def _stay(rank: int, world: int, folder: Path, endpoint: str, state: str, bf16: bool) -> None:
    side = {"device": "nvme", "endpoint": endpoint}
    engine = trainer.initialize(model=Ragged(), config=config_of(side, bf16, swap_bytes=16 * MIB)).engine
    with sqlite3.connect(f"file:{state}/catalog.sqlite?mode=ro", uri=True, timeout=10) as database:
        rows = database.execute("SELECT name, kind, length FROM shards WHERE rank = ?", (rank,)).fetchall()
    (folder / f"rows{rank}.json").write_text(json.dumps(rows))
    engine.close()


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_the_catalog_knows_logical_lengths_only(tmp_path: Path, bf16: bool) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with running(session__state_dir=str(state)) as daemon:
        assert spawn(3, _stay, (daemon.endpoint, str(state), bf16), tmp_path) == [0, 0, 0]
    shards = {name: -(-torch.Size(shape).numel() // 3) for name, shape in SHAPES.items()}
    for rank in range(3):
        found: dict[str, int] = {}
        for title, kind, length in json.loads((tmp_path / f"rows{rank}.json").read_text()):
            if kind == "param":
                assert length == shards[title.removeprefix("param/pieces.")] * (2 if bf16 else 4), title
            else:
                found[kind] = found.get(kind, 0) + length
        # In fp32 the parameter itself is the master.
        assert set(found) == {"exp_avg", "exp_avg_sq", *(["master"] if bf16 else [])}
        assert set(found.values()) == {4 * sum(shards.values())}


def test_without_io_uring_training_gives_the_same_bits(tmp_path: Path) -> None:
    for rank in both(2, tmp_path, "tied", forbid_uring=True):
        assert rank["engine"] == "threads"
