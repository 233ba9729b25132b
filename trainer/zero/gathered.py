"""GatheredParameters: the full values of some parameters, for a block of code outside forward.

Used by training scripts. Collective: all ranks enter it with the same parameters. Changes are kept when
`modifier_rank` says whose; a change without it is an error rather than a silent loss, for which the values are
checksummed at both ends of the block.
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

    def idle(self, zero: ZeroParam) -> None:
        """No block uses it now."""

    def write(self, zero: ZeroParam, mine: torch.Tensor) -> None:
        """Replace this rank's shard."""

    def before_modified(self) -> None:
        """Shards are to be replaced from outside: refuse, if now is not the time."""

    def modified(self, params: Sequence[ZeroParam]) -> None:
        """Shards were replaced from outside: whatever is derived from them must follow."""


class GatheredParameters:
    """`with GatheredParameters(params, modifier_rank=None):` the parameters are whole inside. With a modifier rank, its
    values are broadcast at the end and every rank keeps its shard of them. Parameters that are not sharded are left
    alone. Blocks may nest; the outermost one for a parameter releases it. A tensor that was taken of a parameter
    inside, as `state_dict()` does, keeps the values that it shows at the end."""

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
        self._fingerprints: dict[ZeroParam, int] = {}
        """Of what must not change: everything, where there is no modifier rank."""
        self._before: dict[ZeroParam, torch.Tensor] = {}
        """Values of what was gathered already and stays so: to be put back without the other ranks, who may not know of
        this one's error."""

    @user_facing
    def __enter__(self) -> GatheredParameters:
        for owner, zeros in self._by_owner():
            self._opened += [zero for zero in zeros if zero.state is not ParamState.AVAILABLE]
            owner.gather(zeros)
        for zero in self._zeros:
            if zero not in self._opened and not zero.blocks:
                self._before[zero] = zero.flat.clone()
            zero.blocks += 1
            if self._modifier is None:
                self._fingerprints[zero] = zero.fingerprint()
        return self

    @user_facing
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for zero in self._zeros:
            zero.blocks -= 1
        changed = [z for z, before in self._fingerprints.items() if z.fingerprint() not in (before, z.kept)]
        kept = False
        try:
            if kind is None and self._modifier is not None:
                self._check()
                kept = True
                self._keep(self._modifier)
            elif kind is None and changed:
                raise UsageError(
                    f"{changed[0].name} was changed inside GatheredParameters without modifier_rank, so the change is "
                    "lost; say whose values to keep, as in GatheredParameters(params, modifier_rank=0)"
                )
        finally:
            for owner, zeros in self._by_owner():
                self._restore(owner, zeros, kept)

    def _check(self) -> None:
        """Before anything is written, and before the other ranks are met."""
        for owner, _ in self._by_owner():
            owner.before_modified()
        for zero in self._zeros:
            if zero.param.shape != zero.shape or zero.param.dtype != zero.dtype:
                raise UsageError(
                    f"{zero.name} is {zero.param.dtype} of shape {tuple(zero.param.shape)} at the end of "
                    f"GatheredParameters and was {zero.dtype} of shape {tuple(zero.shape)}; change its values only"
                )

    def _keep(self, source: int) -> None:
        for owner, zeros in self._by_owner():
            together = owner.collectives
            together.announce(f"the end of GatheredParameters with {zeros[0].name}")
            for zero in zeros:
                # A padded copy: user code may have replaced `param.data` by a tensor of its own.
                full = torch.zeros_like(zero.flat)
                full[: zero.numel].copy_(zero.param.detach().reshape(-1))
                together.broadcast(full, source, f"the broadcast of {zero.name}")
                if not torch.equal(zero.flat.view(torch.uint8), full.view(torch.uint8)):
                    # Another rank's values, or those of a tensor put into `param.data`. A change in place that this
                    # rank made itself, autograd has seen.
                    zero.flat.copy_(full)
                    zero.replaced()
                zero.expose()
                zero.kept = zero.fingerprint() if zero.blocks else None
                owner.write(zero, zero.piece(together.rank))
            owner.modified(zeros)

    def _restore(self, owner: Gatherer, zeros: list[ZeroParam], kept: bool) -> None:
        for zero in zeros:
            if not kept and zero in self._before:
                zero.flat.copy_(self._before[zero])
                zero.expose()
            if zero.blocks == 0:
                zero.kept = None
                if zero.in_place and zero.lent:
                    zero.renew(zero.param.detach())  # Who took a tensor of it keeps the old storage.
                if zero in self._opened and zero.users == 0:
                    owner.release(zero)
                owner.idle(zero)

    def _by_owner(self) -> list[tuple[Gatherer, list[ZeroParam]]]:
        groups: dict[int, tuple[Gatherer, list[ZeroParam]]] = {}
        for zero in self._zeros:
            owner = zero.owner
            if owner is None:
                raise UsageError(f"parameter {zero.name} belongs to an engine that was closed")
            groups.setdefault(id(owner), (owner, []))[1].append(zero)
        return list(groups.values())
