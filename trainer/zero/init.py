"""zero.Init: a context in which modules are partitioned as soon as they are constructed.

Used by training scripts around the construction of a model that no rank could hold whole. Rank 0's values count; they
are broadcast tensor by tensor. Until `trainer.initialize` has a backend, each rank keeps its shards in its memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from trainer.config import load_config
from trainer.zero.collectives import Collectives, default_collectives
from trainer.zero.gathered import GatheredParameters
from trainer.zero.group import ensure_process_group
from trainer.zero.parameter import ParamState, ZeroParam
from trainer.zero.paramset import partition

_DEFAULT_TIMEOUT_S = 60.0


class RestingParams:
    """Gives parameters their values from the shards at rest, before there is a backend."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    def gather(self, wanted: Sequence[ZeroParam]) -> None:
        """Make them AVAILABLE."""
        for zero in wanted:
            if zero.state is ParamState.AVAILABLE:
                continue
            zero.allocate()
            pieces = [zero.piece(rank) for rank in range(self.collectives.world)]
            self.collectives.all_gather(pieces, _resting(zero), f"the gather of {zero.name}")
            zero.expose()

    def release(self, zero: ZeroParam) -> None:
        """Drop full values."""
        if zero.state is ParamState.AVAILABLE:
            zero.conceal()

    def write(self, zero: ZeroParam, mine: torch.Tensor) -> None:
        """Replace the shard at rest."""
        _resting(zero).copy_(mine)

    def modified(self, params: Sequence[ZeroParam]) -> None:
        """Nothing is derived from them yet."""


def _resting(zero: ZeroParam) -> torch.Tensor:
    if zero.resting is None:
        raise AssertionError(f"{zero.name} has no shard at rest")
    return zero.resting


class Init:
    """`with zero.Init(config=...):` construct the model inside. `dtype` None: bfloat16 if the configuration enables
    bf16, else as constructed. `module`: partition an existing model at once instead."""

    _depth = 0

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

    def __enter__(self) -> Init:
        # Inside another Init the outer one does the work.
        if self._enabled and Init._depth == 0:
            self._patch()
        Init._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Init._depth -= 1
        while self._undo:
            self._undo.pop()()
        self._building.clear()

    def _patch(self) -> None:
        for cls in dict.fromkeys(_subclasses(nn.Module)):
            self._wrap(cls)
        inherited = nn.Module.__dict__.get("__init_subclass__")

        def on_new_class(cls: type[nn.Module], /, **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)
            self._wrap(cls)

        nn.Module.__init_subclass__ = classmethod(on_new_class)  # type: ignore[assignment]
        self._undo.append(functools.partial(_restore, nn.Module, "__init_subclass__", inherited))
        original = nn.Module.apply
        nn.Module.apply = _gathering_apply  # type: ignore[assignment]
        self._undo.append(functools.partial(_restore, nn.Module, "apply", original))

    def _wrap(self, cls: type[nn.Module]) -> None:
        original = cls.__dict__.get("__init__")
        if original is None:
            return
        building, partition_module = self._building, self._partition

        @functools.wraps(original)
        def constructed(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            outermost = id(module) not in building
            building.add(id(module))
            try:
                original(module, *args, **kwargs)
            finally:
                if outermost:
                    building.discard(id(module))
            if outermost:
                # A parent may have put new parameters into children that were partitioned before.
                for part in [module] if building else module.modules():
                    partition_module(part)

        cls.__init__ = constructed  # type: ignore[method-assign, assignment]
        self._undo.append(functools.partial(_restore, cls, "__init__", original))

    def _partition(self, module: nn.Module) -> None:
        if self._owner is None:
            return
        for name, param in module._parameters.items():
            if param is None or hasattr(param, "_zero"):
                continue
            if self._dtype is not None and param.is_floating_point():
                param.data = param.data.to(self._dtype)
            original = param.data
            zero = ZeroParam(param, f"{type(module).__name__}.{name}", self._owner.collectives.world)
            zero.owner = self._owner
            zero.adopt(original)
            partition(zero, self._owner.collectives)


def _subclasses(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _restore(cls: type, name: str, value: Any) -> None:
    if value is None:
        delattr(cls, name)
    else:
        setattr(cls, name, value)


def _gathering_apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """Module.apply as initialisers use it: each module's own parameters are whole, and rank 0's changes are kept."""
    for child in module.children():
        child.apply(fn)
    with GatheredParameters(module.parameters(recurse=False), modifier_rank=0):
        fn(module)
    return module
