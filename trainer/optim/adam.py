"""Adam and AdamW over contiguous segments: the native kernel, or the torch reference with the same bits.

Called by `ShardedAdam` for each piece of a tile. Touches the tensors it is given and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.optim.hyper import AdamHyper
from trainer.optim.reference import adam_reference

Update = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", AdamHyper],
    None,
]
"""(master, exp_avg, exp_avg_sq, grad, 16-bit copy or None, hyper): one step, in place."""


def native_update() -> Update | None:
    """The fused kernel, or None where the native module lacks it."""
    try:
        import offloadd_native as native
    except ImportError:
        return None
    if not hasattr(native, "adam_step"):
        return None
    code = {torch.float32: native.F32, torch.bfloat16: native.BF16, torch.float16: native.F16}

    def update(
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        out: torch.Tensor | None,
        hyper: AdamHyper,
    ) -> None:
        for tensor in (master, exp_avg, exp_avg_sq):
            if tensor.dtype is not torch.float32 or not tensor.is_contiguous() or tensor.numel() != grad.numel():
                raise ValueError("master and moments must be contiguous fp32 of the gradient's length")
        native.adam_step(
            master.data_ptr(),
            exp_avg.data_ptr(),
            exp_avg_sq.data_ptr(),
            grad.data_ptr(),
            code[grad.dtype],
            0 if out is None else out.data_ptr(),
            native.F32 if out is None else code[out.dtype],
            grad.numel(),
            hyper.lr,
            hyper.beta1,
            hyper.beta2,
            hyper.eps,
            hyper.weight_decay,
            hyper.bias_correction1,
            hyper.bias_correction2_sqrt,
            hyper.grad_scale,
            hyper.adamw,
            torch.get_num_threads(),
        )

    return update


def choose_update(torch_adam: bool) -> Update:
    """The native kernel, unless told otherwise or absent; the reference gives the same bits, slower."""
    native = None if torch_adam else native_update()
    return native or adam_reference
