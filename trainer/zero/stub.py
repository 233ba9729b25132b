"""What a Parameter is while its values are elsewhere: same object, another class that answers only for metadata.

Switched by `ZeroParam`. Reading shape or dtype works and gives the logical answer. Any use of the values goes to the
parameter's owner, which either gathers it (inside a hooked forward) or raises `ParameterNotGathered`. A parameter that
stays gathered is a stub too while nobody uses it: a change of its values would be lost, and a script that works with a
small model should work with a large one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from trainer.boundary import user_facing
from trainer.zero.errors import ParameterNotGathered, UsageError

if TYPE_CHECKING:
    from trainer.zero.parameter import ZeroParam

_Function = Callable[..., Any]


def _slots(slot: str, *names: str) -> set[_Function]:
    """Descriptor methods of Tensor attributes: what __torch_function__ receives for `t.name`, `t.name = x`, ...
    Releases of torch differ in which they have."""
    return {getattr(getattr(torch.Tensor, name), slot) for name in names if hasattr(torch.Tensor, name)}


_READABLE = (
    *("requires_grad", "is_leaf", "grad", "grad_fn", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_meta"),
    *("is_sparse", "is_quantized", "is_xpu", "is_mps", "_backward_hooks", "_post_accumulate_grad_hooks", "_version"),
    *("output_nr", "retains_grad", "_base", "name", "names", "is_nested", "is_sparse_csr", "itemsize"),
)
_METADATA: set[_Function] = {
    torch.Tensor.requires_grad_,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.get_device,
    torch.Tensor.__hash__,
}
_METADATA |= _slots("__get__", *_READABLE)
_METADATA |= _slots("__set__", "requires_grad", "grad", "_backward_hooks")
_READS_GRAD = _slots("__get__", "grad")
_SETS_GRAD = _slots("__set__", "grad")
_METADATA |= _slots("__delete__", "grad")

_LOGICAL: dict[_Function, Callable[..., Any]] = {
    torch.Tensor.size: lambda shape, dim=None: shape if dim is None else shape[dim],
    torch.Tensor.dim: len,
    torch.Tensor.ndimension: len,
    torch.Tensor.numel: lambda shape: shape.numel(),
    torch.Tensor.nelement: lambda shape: shape.numel(),
    torch.numel: lambda shape: shape.numel(),
    torch.Tensor.__len__: lambda shape: shape[0],
}
"""Answered from the logical shape: the tensor underneath is empty."""
_LOGICAL |= dict.fromkeys(_slots("__get__", "shape"), lambda shape: shape)
_LOGICAL |= dict.fromkeys(_slots("__get__", "ndim"), len)


@user_facing
def _dispatch(func: _Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    kwargs = kwargs or {}
    if func in _LOGICAL:
        return _LOGICAL[func](args[0]._zero.shape, *args[1:], **kwargs)
    if func is torch.Tensor.__format__ and args[1] == "":
        return str(args[0])
    if func is torch.Tensor.__repr__:
        zero = args[0]._zero
        return f"Parameter({zero.name}, shape={tuple(zero.shape)}, dtype={zero.dtype}, {zero.state.name})"
    if func in _READS_GRAD and args[0]._zero.accumulated:
        raise UsageError(
            f"the gradient of parameter {args[0]._zero.name} is accumulated in shards until engine.step(), and neither "
            ".grad nor GatheredParameters has it; set gradient_clipping in the configuration to clip it, read its norm "
            "from engine.get_global_grad_norm(), or take it with torch.autograd.grad"
        )
    if func in _SETS_GRAD and args[1] is not None:
        raise UsageError(
            f"the gradient of parameter {args[0]._zero.name} comes from engine.backward(loss), in shards, and cannot "
            "be set, in GatheredParameters neither; change it in a hook (param.register_hook) or change the loss"
        )
    if func not in _METADATA:
        name = _spoken(func)
        operands = list(_operands((args, kwargs)))
        for zero in operands:
            if is_stub(zero.param):
                zero.touched(name, operands)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _spoken(func: _Function) -> str:
    """The operation as scripts write it."""
    name = getattr(func, "__name__", str(func))
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return {"__get__": f"reading .{attribute}", "__set__": f"setting .{attribute}"}.get(name, name)


def _operands(tree: Any) -> Iterator[ZeroParam]:
    if isinstance(tree, torch.Tensor):
        zero: ZeroParam | None = getattr(tree, "_zero", None)
        if zero is not None:
            yield zero
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _operands(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _operands(item)


@user_facing
def _deepcopy(param: Any, memo: dict[int, Any]) -> Any:
    """A shard at rest is copied as a shard; otherwise the values are needed, and the copy is an ordinary parameter."""
    zero: ZeroParam = param._zero
    if id(param) not in memo:
        if zero.on_copy is None:
            zero.touched("deepcopy", [zero])
            return param.__deepcopy__(memo)
        memo[id(param)] = zero.on_copy(zero)
    return memo[id(param)]


def _refused(name: str) -> _Function:
    """For the methods that torch does not send through `__torch_function__`."""

    @user_facing
    def method(param: Any, *args: Any, **kwargs: Any) -> Any:
        param._zero.touched(name, [param._zero])
        return getattr(param, name)(*args, **kwargs)

    return method


_NAME = "ShardedParameter"
_UNDISPATCHED = ("set_",)


@functools.cache
def _stub_class(original: type[torch.Tensor]) -> type[torch.Tensor]:
    body = {"__torch_function__": staticmethod(_dispatch), "__deepcopy__": _deepcopy, "_unsharded_class": original}
    return type(_NAME, (original,), body | {name: _refused(name) for name in _UNDISPATCHED})


def is_stub(param: torch.Tensor) -> bool:
    """Whether this parameter answers for metadata only."""
    return hasattr(type(param), "_unsharded_class")


def hide(param: torch.Tensor) -> None:
    """Make the parameter answer for metadata only."""
    if not is_stub(param):
        param.__class__ = _stub_class(type(param))


def reveal(param: torch.Tensor) -> None:
    """Give the parameter its own class back."""
    if is_stub(param):
        param.__class__ = type(param)._unsharded_class  # type: ignore[attr-defined]


def not_gathered(zero: ZeroParam, operation: str) -> ParameterNotGathered:
    """The error for a use outside any hooked forward."""
    return ParameterNotGathered(
        f"{operation} needs the values of parameter {zero.name} of shape {tuple(zero.shape)}, of which this rank holds "
        "a shard only; wrap the code in `with trainer.zero.GatheredParameters([param]):` "
        "(with modifier_rank=0 to change it)"
    )
