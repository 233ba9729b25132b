"""Hooks on a model's modules: they tell the coordinator when a call needs its parameters, forward and backward.

Installed once by the engine, on every module, because a module without parameters of its own may still use another's.

Backward is told by two hooks on tensors. A gradient that reaches an output activates the call. A gradient that leaves
through an input ends it: each input is first passed through `view_as`, and the hook sits on that view. Autograd runs
nodes that are ready in the reverse order of their creation, and the view was created before every node of the module,
so when its turn comes the module's nodes that were reached have run. A native view rather than a custom function,
because a module may change its input in place, which autograd forbids on what a custom function returned. Where no
such input exists, the call ends with the backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer.zero import walk
from trainer.zero.coordinator import Call, Coordinator
from trainer.zero.errors import UsageError
from trainer.zero.parameter import ZeroParam
from trainer.zero.trace import HookedModule


class _Hook:
    """A hook in a module. A deep copy of the module has it too, and is none of the engine's business."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act

    def __call__(self, *args: Any) -> Any:
        return self._act(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a model cannot be pickled while an engine trains it; save its state_dict(), taken inside "
            "`with trainer.zero.GatheredParameters(model):`"
        )


class ModelHooks:
    """All hooks of one model."""

    def __init__(self, model: nn.Module, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            own = [_zero(param) for param in module._parameters.values() if param is not None]
            hooked = HookedModule(name or "the model", module, list(dict.fromkeys(own)))
            self._install(hooked)

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _install(self, hooked: HookedModule) -> None:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._before(hooked, args, kwargs) if module is hooked.module else None

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if module is hooked.module:
                self._after(hooked, output)

        # First of the pre-hooks and, called even when forward raises, last of the others: a user's hooks see values.
        self._handles.append(hooked.module.register_forward_pre_hook(_Hook(before), prepend=True, with_kwargs=True))
        self._handles.append(hooked.module.register_forward_hook(_Hook(after), with_kwargs=True, always_call=True))

    def _before(self, hooked: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._coordinator.enter_forward(hooked)
        if not hooked.params or not torch.is_grad_enabled():
            return None
        call.inputs_want = any(tensor.requires_grad for tensor in walk.tensors((args, kwargs)))
        views: dict[int, torch.Tensor] = {}
        for tensor in walk.replaceable((args, kwargs)):
            if tensor.requires_grad and id(tensor) not in views and type(tensor) is torch.Tensor:
                views[id(tensor)] = view = tensor.view_as(tensor)
                _on_gradient(view, call, self._coordinator.leave_backward)
        return (walk.replace(args, views), walk.replace(kwargs, views)) if views else None

    def _after(self, hooked: HookedModule, output: Any) -> None:
        call = self._coordinator.current()
        if call is None or call.hooked is not hooked:
            self._coordinator.leave_forward(hooked, pin=False)
            return
        self._find_escaped(call, output)
        pin = False
        if hooked.params and torch.is_grad_enabled() and not self._watch(call, output):
            pin = call.inputs_want or any(zero.param.requires_grad for zero in call.held)
        if output is None and sys.exc_info()[0] is not None:
            pin = False
        self._coordinator.leave_forward(hooked, pin)

    def _watch(self, call: Call, output: Any) -> bool:
        """Hook the outputs. False if there is none to hook, although this call may take part in backward."""
        outputs = walk.watchable(output)
        for tensor in outputs:
            _on_gradient(tensor, call, self._coordinator.enter_backward)
            # A caller may change a view in place, which gives it another history and loses its hooks, but its base's
            # history stays part of the graph.
            base = tensor._base
            if base is not None and base.requires_grad and not base.is_leaf:
                _on_gradient(base, call, self._coordinator.enter_backward)
        return bool(outputs)

    def _find_escaped(self, call: Call, output: Any) -> None:
        """A module may return a parameter of its own, or a view of one."""
        if not call.held:
            return
        for tensor in walk.tensors(output):
            if tensor.layout is torch.strided and type(tensor) in (torch.Tensor, nn.Parameter):
                storage = tensor.untyped_storage()._cdata
                for zero in call.held:
                    if zero.storage._cdata == storage and not zero.persistent:
                        self._coordinator.escaped(zero)


def _on_gradient(tensor: torch.Tensor, call: Call, then: Callable[[Call], None]) -> None:
    def hook(_: torch.Tensor) -> None:
        then(call)

    tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def _zero(param: torch.Tensor) -> ZeroParam:
    zero: ZeroParam = param._zero  # type: ignore[attr-defined]
    return zero
