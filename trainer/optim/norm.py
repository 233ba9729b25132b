"""The gradient norm over all ranks, and the factor that clips it.

Called by `ShardedAdam.step`. In double, per parameter in registration order, gathered and summed in rank order: the
same bits on every rank, and independent of the order in which sub-groups are updated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from trainer.zero.collectives import Collectives
from trainer.zero.parameter import ZeroParam

_CHUNK_NUMEL = 1 << 20


class GradNorm(NamedTuple):
    """The norm, and the first parameter whose gradient is not finite."""

    value: float
    nonfinite: str | None


def grad_norm(params: Sequence[ZeroParam], collectives: Collectives, step: str) -> GradNorm:
    """L2 norm of the accumulated gradients of trainable parameters. `step` must be the same on all ranks."""
    trainable = [zero for zero in params if zero.grad_shard is not None]
    if not trainable:
        return GradNorm(0.0, None)
    mine = torch.tensor([_square_sum(zero.grad_shard) for zero in trainable], dtype=torch.float64)
    everyone = torch.empty(collectives.world, len(trainable), dtype=torch.float64)
    collectives.announce(f"the gradient norm of {step}")
    collectives.all_gather(list(everyone), mine, "the gradient norm")
    total = 0.0
    for rank in everyone.tolist():
        for value in rank:
            total += value
    if math.isfinite(total):
        return GradNorm(math.sqrt(total), None)
    bad = (~torch.isfinite(everyone)).any(dim=0).nonzero().flatten().tolist()
    return GradNorm(total, trainable[bad[0]].name if bad else None)


def clip_scale(norm: float, clip: float) -> float:
    """What gradients are multiplied by. A norm that is not finite clips nothing, as in DeepSpeed."""
    if clip <= 0.0 or not math.isfinite(norm):
        return 1.0
    return 1.0 / max(1.0, (norm + 1e-6) / clip)


def _square_sum(grad: torch.Tensor | None) -> float:
    total = 0.0
    if grad is not None:
        for start in range(0, grad.numel(), _CHUNK_NUMEL):
            total += float(grad[start : start + _CHUNK_NUMEL].double().square().sum())
    return total
