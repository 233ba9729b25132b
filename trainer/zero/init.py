"""zero.Init: a context in which modules are partitioned as soon as they are constructed.

Used by training scripts around the construction of a model that no rank could hold whole. Rank 0's values count; they
are broadcast tensor by tensor. What constructors do with parameters that were partitioned before is in `resting`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn

from trainer import heap
from trainer.boundary import user_facing
from trainer.config import load_config
from trainer.zero.collectives import default_collectives
from trainer.zero.errors import UsageError
from trainer.zero.gathered import GatheredParameters
from trainer.zero.group import ensure_process_group
from trainer.zero.resting import RestingParams
from trainer.zero.stub import is_stub

log = logging.getLogger(__name__)

_DEFAULT_TIMEOUT_S = 60.0


class Init:
    """`with zero.Init(config=...):` construct the model inside. `dtype` None: bfloat16 if the configuration enables
    bf16, else as constructed. `module`: partition an existing model at once instead."""

    _depth = 0

    @user_facing
    def __init__(
        self,
        module: nn.Module | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        config_dict_or_path: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
    ) -> None:
        source = config if config is not None else config_dict_or_path
        timeout_s = _DEFAULT_TIMEOUT_S
        if source is not None:
            loaded, _ = load_config(source)
            timeout_s = loaded.offloadd.timeout_s
            dtype = dtype or (torch.bfloat16 if loaded.bf16.enabled else None)
        self._dtype, self._enabled = dtype, enabled
        self._building: set[int] = set()
        self._undo: list[Callable[[], None]] = []
        self._owner: RestingParams | None = None
        if enabled:
            ensure_process_group(timeout_s)
            self._owner = RestingParams(default_collectives(timeout_s))
        if module is not None:
            for part in module.modules():
                self._partition(part)
            self._cast()

    def __enter__(self) -> Init:
        # Inside another Init the outer one does the work.
        if self._owner is not None and Init._depth == 0:
            heap.share_one_arena()
            self._patch(self._owner)
            self._owner.active = True
        Init._depth += 1
        return self

    @user_facing
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Init._depth -= 1
        if not self._undo or self._owner is None:
            return
        while self._undo:
            self._undo.pop()()
        self._building.clear()
        if kind is not None:
            self._owner.forget()
            return
        self._owner.end()
        self._cast()
        for name in self._owner.kept():
            log.warning("a tensor over the values of %s outlives zero.Init; writing into it has no effect now", name)

    def _cast(self) -> None:
        if self._dtype is not None and self._owner is not None:
            self._owner.cast(self._dtype)

    def _patch(self, owner: RestingParams) -> None:
        for cls in dict.fromkeys(_subclasses(nn.Module)):
            self._wrap(cls, owner)
        inherited = nn.Module.__dict__.get("__init_subclass__")

        def on_new_class(cls: type[nn.Module], /, **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)
            self._wrap(cls, owner)

        nn.Module.__init_subclass__ = classmethod(on_new_class)  # type: ignore[assignment]
        self._undo.append(functools.partial(_restore, nn.Module, "__init_subclass__", inherited))
        original = nn.Module.apply
        nn.Module.apply = _gathering_apply  # type: ignore[assignment]
        self._undo.append(functools.partial(_restore, nn.Module, "apply", original))
        new = nn.Parameter.__dict__["__new__"]
        nn.Parameter.__new__ = _new_parameter(new.__func__)  # type: ignore[method-assign, assignment]
        self._undo.append(functools.partial(_restore, nn.Parameter, "__new__", new))
        copy = nn.Parameter.__deepcopy__
        nn.Parameter.__deepcopy__ = _partitioned_copy(copy, owner)  # type: ignore[method-assign]
        self._undo.append(functools.partial(_restore, nn.Parameter, "__deepcopy__", copy))

    def _wrap(self, cls: type[nn.Module], owner: RestingParams) -> None:
        original = cls.__dict__.get("__init__")
        if original is None:
            return

        @user_facing
        @functools.wraps(original)
        def constructed(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if id(module) in self._building:  # A base class's part of a construction.
                original(module, *args, **kwargs)
                return
            self._building.add(id(module))
            owner.enter()
            try:
                original(module, *args, **kwargs)
                owner.leave()
            except BaseException:
                owner.abandon()
                raise
            finally:
                self._building.discard(id(module))
            # All of it: a constructor may put new parameters into modules that were partitioned before.
            for part in module.modules():
                self._partition(part)
            for name in owner.kept():
                raise UsageError(
                    f"zero.Init: a tensor over the values of {name} outlives the constructor of "
                    f"{type(module).__name__}, and would not follow them; take it in forward, or keep a clone() of it"
                )

        cls.__init__ = constructed  # type: ignore[method-assign, assignment]
        self._undo.append(functools.partial(_restore, cls, "__init__", original))

    def _partition(self, module: nn.Module) -> None:
        if self._owner is None:
            return
        for name, param in module._parameters.items():
            if param is not None and not hasattr(param, "_zero"):
                self._owner.partition(param, f"{type(module).__name__}.{name}")


def _subclasses(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _restore(cls: type, name: str, value: Any) -> None:
    if value is None:
        delattr(cls, name)
    else:
        setattr(cls, name, value)


def _new_parameter(original: Callable[..., nn.Parameter]) -> Callable[..., nn.Parameter]:
    """`nn.Parameter(param)` looks at the class of what it is given before it asks for values."""

    def new(cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> nn.Parameter:
        return original(cls, data.data if is_stub(data) else data, requires_grad)

    return new


def _partitioned_copy(original: Callable[..., nn.Parameter], owner: RestingParams) -> Callable[..., nn.Parameter]:
    """A copy of a partitioned parameter that is gathered just now: no constructor would partition it."""

    def copied(param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        copy = memo.get(id(param))
        if copy is None:
            copy = original(param, memo)
            if hasattr(param, "_zero"):
                owner.partition(copy, param._zero.name)
        return copy

    return copied


def _gathering_apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """Module.apply as initialisers use it: each module's own parameters are whole, and rank 0's changes are kept."""
    for child in module.children():
        child.apply(fn)
    with GatheredParameters(module.parameters(recurse=False), modifier_rank=0):
        fn(module)
    return module
