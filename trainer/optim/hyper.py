"""The scalars of one Adam step, as the kernel and the reference take them. A leaf: imports nothing of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """Python floats, that is, doubles; both implementations round each derived scalar to fp32 once."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction1: float
    """1 - beta1^step."""
    bias_correction2_sqrt: float
    """sqrt(1 - beta2^step)."""
    grad_scale: float
    """Gradients are multiplied by this first: clipping."""
    adamw: bool
    """Decoupled weight decay (AdamW) instead of L2 (Adam)."""


def hyper_of(group: Mapping[str, Any], step: int, grad_scale: float) -> AdamHyper:
    """A param_group's scalars at a step, counted from 1."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return AdamHyper(
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        bias_correction1=1.0 - beta1**step,
        bias_correction2_sqrt=math.sqrt(1.0 - beta2**step),
        grad_scale=grad_scale,
        adamw=bool(group["adamw"]),
    )
