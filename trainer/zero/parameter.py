"""One parameter: its logical shape, where its values are, and the one storage they are gathered into.

Owned by `ParamSet`; hooks, reducer and optimizer refer to it. It moves no bytes between ranks.

The storage is stable: releasing the parameter resizes it to zero bytes and gathering resizes it back, so that a view
which autograd saved in forward sees the values again in backward. Giving a parameter a new storage at each gather
would leave such views on freed memory, and the gradients would be wrong without an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import zlib
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch

from trainer.swap.backend import Pending, SwapShard
from trainer.zero import stub
from trainer.zero.layout import ShardLayout

if TYPE_CHECKING:
    from trainer.zero.gathered import Gatherer


_checksum: Callable[[memoryview], int] = zlib.crc32
with contextlib.suppress(ImportError):  # The engine runs without the native module, slower.
    import offloadd_native

    _checksum = offloadd_native.crc32c


def _holders(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_flat = torch.zeros(1)
_shown = _flat.view(1)
_OURS = _holders(_flat)
"""Holders of a storage that only the flat buffer and the parameter that shows it use."""


class ParamState(Enum):
    """Where the full values are."""

    NOT_AVAILABLE = "not available"
    INFLIGHT = "inflight"
    """This rank's shard is being fetched; the parameter itself is still a stub."""
    AVAILABLE = "available"


class ZeroParam:
    """See the module's docstring. `param._zero` leads back here."""

    def __init__(self, param: torch.nn.Parameter, name: str, world: int) -> None:
        self.param = param
        self.name = name
        self.aliases: tuple[str, ...] = (name,)
        self.index = -1
        """Position in registration order; the same on every rank."""
        self.trainable = param.requires_grad
        self.differentiable = param.requires_grad
        """As when the engine was made; `trainable` ones are those of them that the optimizer was given."""
        self.persistent = False
        """Stays gathered between steps."""
        self.state = ParamState.NOT_AVAILABLE
        self.users = 0
        """Module calls that need it gathered now."""
        self.blocks = 0
        """GatheredParameters blocks it is in."""
        self.changes = 0
        """How often its values were replaced, other than by code that autograd can see."""
        self.kept: int | None = None
        """Fingerprint of the values that a block inside another one has kept."""
        self.kept_until = -1
        """Trace position for which the prefetcher counted on it staying gathered."""
        self.shard: SwapShard | None = None
        self.resting: torch.Tensor | None = None
        """This rank's shard between zero.Init and the moment there is a backend."""
        self.pending: list[Pending] = []
        self.grad_shard: torch.Tensor | None = None
        """View of the flat accumulation buffer; set by the optimizer."""
        self.accumulated = False
        """Whether that holds a gradient for the next step."""
        self.owner: Gatherer | None = None
        """What can gather it: a ParamSet, or zero.Init before there is one; None after close."""
        self.on_touch: Callable[[ZeroParam, Sequence[ZeroParam]], bool] | None = None
        """Asked when a stub's values are used, with all parameters that take part; True if it gathered this one."""
        self.on_copy: Callable[[ZeroParam], torch.nn.Parameter] | None = None
        """Makes the deep copy of a stub without gathering it; only while the shard is at rest."""
        self._lay_out(param.shape, param.dtype, world)
        param._zero = self  # type: ignore[attr-defined]

    def _lay_out(self, shape: torch.Size, dtype: torch.dtype, world: int) -> None:
        """A new storage, of zeros. What used the one before keeps that one."""
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.layout = ShardLayout(self.shape.numel(), world)
        self.flat = torch.zeros(self.layout.padded_numel, dtype=dtype)
        self._full_bytes = self.flat.untyped_storage().nbytes()
        self._stub = torch.empty(0, dtype=dtype)

    @property
    def numel(self) -> int:
        """Logical elements."""
        return self.layout.numel

    @property
    def shard_bytes(self) -> int:
        """Bytes of each rank's shard, padding included."""
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def storage(self) -> torch.UntypedStorage:
        """The stable storage."""
        return self.flat.untyped_storage()

    def adopt(self, full: torch.Tensor) -> None:
        """Take over a parameter's original values; the state becomes AVAILABLE."""
        self.flat[: self.numel].copy_(full.detach().reshape(-1))
        self.expose()

    def renew(self, full: torch.Tensor) -> None:
        """As `adopt`, in a new storage, whatever shape and dtype the values have now."""
        self._lay_out(full.shape, full.dtype, self.layout.world)
        self.adopt(full)

    def cast(self, dtype: torch.dtype) -> None:
        """Change the dtype of the shard at rest."""
        if self.resting is None or self.state is not ParamState.NOT_AVAILABLE:
            raise AssertionError(f"{self.name} is cast while {self.state.value}")
        self.resting = self.resting.to(dtype)
        self._lay_out(self.shape, dtype, self.layout.world)
        self.expose()
        self.conceal()

    def idle(self) -> None:
        """The values stay although nobody uses them now: metadata only until somebody does."""
        if self.state is ParamState.AVAILABLE and not self.users and not self.blocks:
            stub.hide(self.param)

    @property
    def in_place(self) -> bool:
        """Whether the parameter shows the flat buffer, and not what somebody put into `param.data`. While gathered."""
        values = self.param.detach()
        same = (values.shape, values.dtype, values.data_ptr()) == (self.shape, self.dtype, self.flat.data_ptr())
        return same and values.is_contiguous()

    @property
    def lent(self) -> bool:
        """Whether a tensor other than the flat buffer and the parameter is over the gathered values."""
        return _holders(self.flat) > _OURS

    def fingerprint(self) -> int:
        """A checksum of the gathered values, at about 10 GB/s; -1 if the parameter shows something else. It sees
        what `_version` does not: writes through `.data`, NumPy and pointers."""
        if not self.in_place:
            return -1
        # Not by way of NumPy, after which torch could not resize the storage any more.
        values = (ctypes.c_char * (self.numel * self.dtype.itemsize)).from_address(self.flat.data_ptr())
        return _checksum(memoryview(values))

    def allocate(self) -> None:
        """Give the storage its bytes back, contents undefined."""
        self.storage.resize_(self._full_bytes)

    def expose(self) -> None:
        """The flat buffer is complete: the parameter shows it."""
        stub.reveal(self.param)
        self.param.data = self.flat[: self.numel].view(self.shape)
        self.state = ParamState.AVAILABLE

    def conceal(self) -> None:
        """Drop the full values. Views saved by autograd stay valid in shape and are refilled by the next gather."""
        if self.users or self.blocks or self.state is ParamState.INFLIGHT:
            raise AssertionError(
                f"{self.name} is released while {self.users + self.blocks} use it ({self.state.value})"
            )
        if self.state is ParamState.AVAILABLE:
            stub.reveal(self.param)
            self.param.data = self._stub
            stub.hide(self.param)
        if not self.storage.resizable():
            # Once NumPy has seen it, torch will never resize it; what NumPy has keeps it.
            self._lay_out(self.shape, self.dtype, self.layout.world)
        self.storage.resize_(0)
        self.state = ParamState.NOT_AVAILABLE

    def replaced(self) -> None:
        """What was computed with the values so far cannot be differentiated with those that come: have autograd refuse
        it, as it does after a change in place."""
        self.changes += 1
        torch.autograd.graph.increment_version(self.param)

    def piece(self, rank: int, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Part of one rank's shard within the gathered values."""
        first = self.layout.start(rank) + start
        return self.flat[first : first + (self.layout.shard_numel - start if numel is None else numel)]

    def touched(self, operation: str, operands: Sequence[ZeroParam]) -> None:
        """A stub's values are wanted, together with those of `operands`: have them gathered, or refuse."""
        if self.on_touch is None or not self.on_touch(self, operands):
            raise stub.not_gathered(self, operation)
