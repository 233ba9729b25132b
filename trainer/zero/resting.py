"""Shards at rest: parameters between their construction inside zero.Init and the moment there is a backend.

Owned by `zero.Init`. A constructor may use and change the values of parameters that were partitioned before, as
`nn.init` and `.data` do: such a parameter is gathered when it is touched and partitioned again, with rank 0's values,
as soon as another one is touched, or at the end of the constructor that touched it at the latest. So no rank ever
holds more than what one constructor works with at a time.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from trainer.zero.collectives import Collectives
from trainer.zero.errors import UsageError
from trainer.zero.parameter import ParamState, ZeroParam
from trainer.zero.paramset import partition


class RestingParams:
    """Gives parameters their values from the shards at rest, and takes changed values back."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.active = False
        """Whether a touch gathers: inside the zero.Init block."""
        self._made: weakref.WeakSet[ZeroParam] = weakref.WeakSet()
        self._count = 0
        """Parameters made so far. Names tell them apart only once the model is complete."""
        self._depth = 0
        """Constructors that run now."""
        self._open: dict[ZeroParam, int] = {}
        """Gathered by a touch, with the depth at which that was; in the same order on every rank."""
        self._lent: list[tuple[weakref.ref[ZeroParam], StorageWeakRef]] = []
        """Partitioned although a tensor over the values was alive: that tensor kept the old storage."""

    # ---- as any Gatherer ----------------------------------------------------------------------------------------
    def gather(self, wanted: Sequence[ZeroParam]) -> None:
        """Make them AVAILABLE. Through a buffer: the process group goes on referring to what it gathered into for a
        while, which must not count as a use of the values."""
        world = self.collectives.world
        for zero in wanted:
            if zero.state is ParamState.AVAILABLE:
                continue
            whole = torch.empty(world, zero.layout.shard_numel, dtype=zero.dtype)
            self.collectives.all_gather(list(whole), _resting(zero), f"the gather of {zero.name}")
            zero.renew(whole.view(-1)[: zero.numel].view(zero.shape))

    def release(self, zero: ZeroParam) -> None:
        """Drop full values."""
        if zero.state is ParamState.AVAILABLE:
            zero.conceal()

    def idle(self, zero: ZeroParam) -> None:
        """A constructor may go on using it."""

    def write(self, zero: ZeroParam, mine: torch.Tensor) -> None:
        """Replace the shard at rest."""
        _resting(zero).copy_(mine)

    def before_modified(self) -> None:
        """Always the time."""

    def modified(self, params: Sequence[ZeroParam]) -> None:
        """Nothing is derived from them yet."""

    # ---- making -------------------------------------------------------------------------------------------------
    def partition(self, param: torch.nn.Parameter, name: str) -> None:
        """Take over an ordinary parameter: rank 0's values, of which this rank keeps its shard."""
        if torch.nn.parameter.is_lazy(param):
            raise UsageError(f"zero.Init: {name} has no shape before the first forward; give its layer its input size")
        if param.device.type != "cpu":
            raise UsageError(f"zero.Init: {name} is made on device {param.device.type}; make the model on the cpu")
        original = param.data
        zero = self._new(param, name)
        zero.adopt(original)
        partition(zero, self.collectives)

    def cast(self, dtype: torch.dtype) -> None:
        """Give every floating-point parameter made so far its final dtype. Not earlier: an initialiser draws other
        numbers in another dtype."""
        for zero in list(self._made):
            if zero.resting is not None and zero.dtype.is_floating_point and zero.dtype != dtype:
                zero.cast(dtype)

    def _new(self, param: torch.nn.Parameter, name: str) -> ZeroParam:
        zero = ZeroParam(param, name, self.collectives.world)
        zero.owner, zero.on_touch, zero.on_copy = self, self.touched, self._copy
        zero.index = self._count
        self._count += 1
        self._made.add(zero)
        return zero

    def _copy(self, zero: ZeroParam) -> torch.nn.Parameter:
        cls = type(zero.param)._unsharded_class  # type: ignore[attr-defined]
        param: torch.nn.Parameter = cls(torch.empty(zero.shape, dtype=zero.dtype), zero.param.requires_grad)
        twin = self._new(param, zero.name)
        twin.resting = _resting(zero).clone()
        twin.expose()
        twin.conceal()
        return param

    # ---- touches ------------------------------------------------------------------------------------------------
    def touched(self, zero: ZeroParam, operands: Sequence[ZeroParam]) -> bool:
        """A stub's values are used: gather them, if that is inside the block. Collective."""
        if not self.active:
            return False
        self.collectives.announce(f"the use of {zero.name} (parameter {zero.index}) while the model is made")
        self._make_room(operands)
        self.gather([zero])
        self._open[zero] = self._depth
        return True

    def enter(self) -> None:
        """A constructor begins."""
        self._depth += 1

    def leave(self) -> None:
        """A constructor ended: what it touched is partitioned again. Collective."""
        mine = [zero for zero, depth in self._open.items() if depth >= self._depth and not zero.blocks]
        for zero in mine:
            self._settle(zero)
        self.abandon()

    def abandon(self) -> None:
        """A constructor raised: what it touched is left to the one around it."""
        self._depth -= 1
        for zero, depth in self._open.items():
            self._open[zero] = min(depth, self._depth)

    def end(self) -> None:
        """The block ended. Collective."""
        self.active = False
        for zero in list(self._open):
            self._settle(zero)

    def forget(self) -> None:
        """The block raised: changes that are not partitioned yet are lost."""
        self.active = False
        for zero in self._open:
            zero.renew(zero.param.detach())
            self.release(zero)
        self._open.clear()

    def kept(self) -> list[str]:
        """Names of parameters whose old values are still in use by a tensor that was taken of them."""
        if not self._lent:
            return []
        lent, self._lent = self._lent, []
        # What only an unreachable cycle still refers to is not in use.
        gc.collect()
        names = []
        for ref, storage in lent:
            zero = ref()
            if zero is not None and not storage.expired():  # type: ignore[no-untyped-call]
                names.append(zero.name)
        return names

    def _make_room(self, operands: Sequence[ZeroParam]) -> None:
        """Partition whatever nothing uses any more. Whether a tensor is alive may depend on a rank's garbage
        collector, so ranks agree."""
        candidates = [zero for zero in self._open if zero not in operands and not zero.blocks]
        if not candidates:
            return
        idle = self.collectives.exchange([not zero.lent for zero in candidates], "the parameters no longer in use")
        for number, zero in enumerate(candidates):
            if all(theirs[number] for theirs in idle):
                self._settle(zero)

    def _settle(self, zero: ZeroParam) -> None:
        del self._open[zero]
        if not zero.in_place:
            zero.renew(zero.param.detach())
        elif zero.lent:
            self._lent.append((weakref.ref(zero), StorageWeakRef(zero.storage)))  # type: ignore[no-untyped-call]
            zero.renew(zero.param.detach())
        self.collectives.announce(
            f"the partition of {zero.name} (parameter {zero.index}), {tuple(zero.shape)} {zero.dtype}"
        )
        partition(zero, self.collectives)


def _resting(zero: ZeroParam) -> torch.Tensor:
    if zero.resting is None:
        raise AssertionError(f"{zero.name} has no shard at rest")
    return zero.resting
