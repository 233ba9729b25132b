"""Adam and AdamW in plain torch: the order of operations that the native kernel follows bit for bit.

Used by tests, and where the native kernel cannot run. Element-wise, so a slice gives the same bits as the whole. Every
operation is one rounding of fp32: no `alpha=` and no `addcmul`, which torch may contract into a fused multiply-add.
Kingma & Ba 2015 (Adam), Loshchilov & Hutter 2019 (AdamW).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.optim.hyper import AdamHyper


def adam_reference(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None, hyper: AdamHyper
) -> None:
    """One step in place. `master`, `exp_avg` and `exp_avg_sq` are fp32; `grad` is fp32, bf16 or f16 and is not changed;
    `out` (fp32, bf16 or f16) receives the new weights rounded to nearest even, or is None. All have one shape.

    Without weight decay no operation for it happens at all.
    """

    def scalar(value: float) -> Tensor:
        """Computed in double and rounded to fp32 once, as the kernel does."""
        return torch.tensor(value, dtype=torch.float32, device=master.device)

    g = grad.to(torch.float32) * scalar(hyper.grad_scale)
    weight = master
    if hyper.weight_decay != 0.0 and not hyper.adamw:
        g = g + scalar(hyper.weight_decay) * weight
    if hyper.weight_decay != 0.0 and hyper.adamw:
        weight = weight * scalar(1.0 - hyper.lr * hyper.weight_decay)
    exp_avg.copy_(scalar(hyper.beta1) * exp_avg + scalar(1.0 - hyper.beta1) * g)
    exp_avg_sq.copy_(scalar(hyper.beta2) * exp_avg_sq + scalar(1.0 - hyper.beta2) * g * g)
    # torch's fp32 square root on CPU is one unit off for one value in six (a vector library's); the root in double,
    # rounded once to fp32, is the exact one, which is what every CPU's instruction gives.
    root = exp_avg_sq.double().sqrt().to(torch.float32)
    denominator = root / scalar(hyper.bias_correction2_sqrt) + scalar(hyper.eps)
    master.copy_(weight - scalar(hyper.lr / hyper.bias_correction1) * (exp_avg / denominator))
    if out is not None:
        out.copy_(master)
