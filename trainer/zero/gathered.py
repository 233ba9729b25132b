"""GatheredParameters: the full values of some parameters, for a block of code outside forward.

Used by training scripts. Collective: all ranks enter it with the same parameters. Changes are kept when
`modifier_rank` says whose; a change without it is an error rather than a silent loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol

import torch
from torch import nn

from trainer.boundary import user_facing
from trainer.zero.collectives import Collectives
from trainer.zero.errors import UsageError
from trainer.zero.parameter import ParamState, ZeroParam


class Gatherer(Protocol):
    """What gives parameters their values: a `ParamSet`, or zero.Init before there is one."""

    collectives: Collectives

    def gather(self, wanted: Sequence[ZeroParam]) -> None:
        """Make them AVAILABLE."""

    def release(self, zero: ZeroParam) -> None:
        """Drop full values."""

    def write(self, zero: ZeroParam, mine: torch.Tensor) -> None:
        """Replace this rank's shard."""

    def before_modified(self) -> None:
        """Shards are to be replaced from outside: refuse, if now is not the time."""

    def modified(self, params: Sequence[ZeroParam]) -> None:
        """Shards were replaced from outside: whatever is derived from them must follow."""


class GatheredParameters:
    """`with GatheredParameters(params, modifier_rank=None):` the parameters are whole inside. With a modifier rank, its
    values are broadcast at the end and every rank keeps its shard of them. Parameters that are not sharded are left
    alone. Blocks may nest; the outermost one for a parameter releases it."""

    def __init__(
        self,
        params: nn.Module | torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, torch.Tensor):
            params = [params]
        zeros = [getattr(param, "_zero", None) for param in params] if enabled else []
        self._zeros: list[ZeroParam] = list(dict.fromkeys(zero for zero in zeros if zero is not None))
        self._modifier = modifier_rank
        self._opened: list[ZeroParam] = []
        self._versions: dict[ZeroParam, int] = {}

    @user_facing
    def __enter__(self) -> GatheredParameters:
        for owner, zeros in self._by_owner():
            self._opened += [zero for zero in zeros if zero.state is not ParamState.AVAILABLE]
            owner.gather(zeros)
        for zero in self._zeros:
            zero.blocks += 1
            self._versions[zero] = zero.param._version
        return self

    @user_facing
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for zero in self._zeros:
            zero.blocks -= 1
        changed = [zero for zero in self._zeros if zero.param._version != self._versions[zero]]
        discard = changed
        try:
            if kind is None and self._modifier is not None:
                for owner, _ in self._by_owner():
                    owner.before_modified()
                discard = []
                self._keep(self._modifier)
            elif kind is None and changed:
                raise UsageError(
                    f"{changed[0].name} was changed inside GatheredParameters without modifier_rank, so the change is "
                    "lost; say whose values to keep, as in GatheredParameters(params, modifier_rank=0)"
                )
        finally:
            for owner, zeros in self._by_owner():
                self._restore(owner, zeros, discard)

    def _keep(self, source: int) -> None:
        for owner, zeros in self._by_owner():
            together = owner.collectives
            together.announce(f"the end of GatheredParameters with {zeros[0].name}")
            for zero in zeros:
                # A padded copy: user code may have replaced `param.data` by a tensor of its own.
                full = torch.zeros_like(zero.flat)
                full[: zero.numel].copy_(zero.param.detach().reshape(-1))
                together.broadcast(full, source, f"the broadcast of {zero.name}")
                zero.flat.copy_(full)
                zero.expose()
                owner.write(zero, zero.piece(together.rank))
            owner.modified(zeros)

    def _restore(self, owner: Gatherer, zeros: list[ZeroParam], discard: list[ZeroParam]) -> None:
        again = []
        for zero in zeros:
            if (zero in self._opened or zero in discard) and zero.users == 0 and zero.blocks == 0:
                owner.release(zero)
                if zero not in self._opened:
                    again.append(zero)
        owner.gather(again)

    def _by_owner(self) -> list[tuple[Gatherer, list[ZeroParam]]]:
        groups: dict[int, tuple[Gatherer, list[ZeroParam]]] = {}
        for zero in self._zeros:
            owner = zero.owner
            if owner is None:
                raise UsageError(f"parameter {zero.name} belongs to an engine that was closed")
            groups.setdefault(id(owner), (owner, []))[1].append(zero)
        return list(groups.values())
