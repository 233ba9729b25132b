"""One cell of the parity matrix: a model trained a few steps one way, everything that must be equal written down.

Run inside a rank. `reference` is the way everything else is compared with: nothing offloaded, nothing released early,
one tile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import trainer
from tests.numerics.parity.zoo import ZOO, batch
from trainer.config import TrainerConfig
from trainer.swap.inprocess import InProcessBackend
from trainer.swap.select import Backends, RankPlace, select_backends

STEPS = 5
"""Two to know the order, one to rehearse updates in backward, two to follow both."""
EPS = 1e-4
"""Large, so that Adam does not turn the rounding noise of a gradient that is really zero into whole steps."""


@dataclass(frozen=True)
class Cell:
    model: str
    accumulation: int = 1
    clip: float = 1.0
    bf16: bool = False

    @property
    def id(self) -> str:
        return f"{self.model}-gas{self.accumulation}-clip{self.clip:g}-{'bf16' if self.bf16 else 'fp32'}"


@dataclass
class Record:
    """What must be equal bit for bit; `live` and `statistics` are for tests of behaviour."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    live: list[int] = field(default_factory=list)
    statistics: dict[str, float] = field(default_factory=dict)

    def differences(self, other: Record) -> list[str]:
        found = [name for name in ("losses", "evaluations", "norms") if getattr(self, name) != getattr(other, name)]
        if self.tensors.keys() != other.tensors.keys():
            return [*found, "tensor names"]
        return found + [name for name, tensor in self.tensors.items() if not same_bits(tensor, other.tensors[name])]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def _tiled(config: TrainerConfig, place: RankPlace) -> Backends:
    return Backends(InProcessBackend(tile_numel=1024, guarded=True), InProcessBackend(tile_numel=2048, guarded=True))


EAGER = {  # Releases everything as soon as it can, in many small buckets and sub-groups.
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 400,
    "sub_group_size": 700,
}
MIXED = {  # Some stay, some are kept for their next use.
    "stage3_param_persistence_threshold": 50,
    "stage3_max_reuse_distance": 500,
    "stage3_prefetch_bucket_size": 100_000,
    "sub_group_size": 100_000,
}

NVME_HOST_BYTES = 4 << 20
"""Room for a few tiles only."""


@dataclass(frozen=True)
class Way:
    """Where shards live, and how eagerly parameters are released."""

    zero: dict[str, int]
    param: str = "none"
    optimizer: str = "none"
    backends: Callable[[TrainerConfig, RankPlace], Backends] = select_backends

    own: dict[str, Any] = field(default_factory=dict)
    """Further keys of the block `offloadd`."""

    def suits(self, cell: Cell) -> bool:
        """Whether the configuration is one that the engine takes."""
        return not (cell.clip and self.own.get("update_in_backward"))

    def block(self, device: str) -> dict[str, str]:
        """The configuration of one side. The daemon is the one whose endpoint the test put in the environment."""
        endpoint = {"endpoint": os.environ[ENDPOINT_VARIABLE]} if device == "nvme" else {}
        return {"device": device, **endpoint}


ENDPOINT_VARIABLE = "PARITY_ENDPOINT"
WAYS = {
    "reference": Way({}),
    "eager": Way(EAGER, backends=_tiled),
    "mixed": Way(MIXED, backends=_tiled),
    "nvme_both": Way(EAGER, "nvme", "nvme"),
    "nvme_param": Way(MIXED, "nvme", "cpu"),
    "nvme_optimizer": Way(MIXED, "cpu", "nvme"),
    "nvme_early": Way(EAGER, "nvme", "nvme", own={"update_in_backward": True}),
}
"""How a cell can be trained."""


def config_of(cell: Cell, way: Way) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": cell.accumulation,
        "gradient_clipping": cell.clip,
        "bf16": {"enabled": cell.bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": EPS, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 300,
            "offload_param": way.block(way.param),
            "offload_optimizer": way.block(way.optimizer),
            **way.zero,
        },
        "offloadd": {"host_bytes": NVME_HOST_BYTES, "swap_bytes": 64 << 20, "timeout_s": 60} | way.own,
    }


def build(cell: Cell) -> nn.Module:
    torch.manual_seed(7)
    return ZOO[cell.model]()


def run(cell: Cell, way: str, rank: int) -> Record:
    chosen, record = WAYS[way], Record()
    dtype = torch.bfloat16 if cell.bf16 else torch.float32
    engine, optimizer, _, _ = trainer.initialize(
        model=build(cell), config=config_of(cell, chosen), backends=chosen.backends
    )
    for step in range(STEPS):
        for micro in range(cell.accumulation):
            loss = engine(*batch(step, micro, rank, dtype))
            record.live.append(engine.params.live_bytes())
            engine.backward(loss)
            engine.step()
            record.losses.append(loss.item())
        record.norms.append(float(engine.get_global_grad_norm() or 0.0))
        with torch.no_grad():
            record.evaluations.append(engine.eval()(*batch(99, 0, rank, dtype)).item())
        engine.train()
    record.tensors = tensors_of(engine, optimizer)
    record.live.append(engine.params.live_bytes())
    record.statistics = engine.statistics()
    for backend in engine.backends.each():
        record.statistics["open_leases"] = backend.statistics().get("open_leases", 0.0)
    engine.close()
    return record


def tensors_of(engine: trainer.Engine, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {f"{zero.name}.{kind}": t for zero, states in optimizer.shard_states() for kind, t in states.items()}
    with trainer.zero.GatheredParameters(engine.parameters()):
        found |= {name: param.detach().clone() for name, param in engine.named_parameters()}
    return found


def run_plain(cell: Cell, world: int) -> Record:
    """Plain torch on one process: the mean over ranks and micro-steps, torch's own clipping and AdamW."""
    record, model = Record(), build(cell)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS, weight_decay=0.01)
    for step in range(STEPS):
        for micro in range(cell.accumulation):
            for rank in range(world):
                loss = model(*batch(step, micro, rank, torch.float32))
                (loss / cell.accumulation / world).backward()
                if rank == 0:
                    record.losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), cell.clip or float("inf"))
        record.norms.append(norm.item())
        # A parameter that took no part has a gradient of zeros here: weight decay reaches it, as in the engine.
        for param in model.parameters():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()
    record.tensors = {name: param.detach().clone() for name, param in model.named_parameters()}
    return record
