"""One parameter: its logical shape, where its values are, and the one storage they are gathered into.

Owned by `ParamSet`; hooks, reducer and optimizer refer to it. It moves no bytes between ranks.

The storage is stable: releasing the parameter resizes it to zero bytes and gathering resizes it back, so that a view
which autograd saved in forward sees the values again in backward. Giving a parameter a new storage at each gather
would leave such views on freed memory, and the gradients would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

import torch

from trainer.swap.backend import Pending, SwapShard
from trainer.zero import stub
from trainer.zero.layout import ShardLayout

if TYPE_CHECKING:
    from trainer.zero.gathered import Gatherer


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
        self.shape = torch.Size(param.shape)
        self.dtype = param.dtype
        self.layout = ShardLayout(param.numel(), world)
        self.trainable = param.requires_grad
        self.persistent = False
        """Stays gathered between steps."""
        self.state = ParamState.NOT_AVAILABLE
        self.users = 0
        """Module calls that need it gathered now."""
        self.blocks = 0
        """GatheredParameters blocks it is in."""
        self.kept_until = -1
        """Trace position for which the prefetcher counted on it staying gathered."""
        self.shard: SwapShard | None = None
        self.resting: torch.Tensor | None = None
        """This rank's shard between zero.Init and the moment there is a backend."""
        self.pending: list[Pending] = []
        self.grad_shard: torch.Tensor | None = None
        """View of the flat accumulation buffer; set by the optimizer."""
        self.owner: Gatherer | None = None
        """What can gather it: a ParamSet, or zero.Init before there is one; None after close."""
        self.on_touch: Callable[[ZeroParam], bool] | None = None
        """Asked when a stub's values are used; True if it gathered the parameter."""
        self.flat = torch.zeros(self.layout.padded_numel, dtype=param.dtype)
        self._full_bytes = self.flat.untyped_storage().nbytes()
        self._stub = torch.empty(0, dtype=param.dtype)
        param._zero = self  # type: ignore[attr-defined]

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
            self.param.data = self._stub
            stub.hide(self.param)
        self.storage.resize_(0)
        self.state = ParamState.NOT_AVAILABLE

    def piece(self, rank: int, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Part of one rank's shard within the gathered values."""
        first = self.layout.start(rank) + start
        return self.flat[first : first + (self.layout.shard_numel - start if numel is None else numel)]

    def touched(self, operation: str) -> None:
        """A stub's values are wanted: have them gathered, or refuse."""
        if self.on_touch is None or not self.on_touch(self):
            raise stub.not_gathered(self, operation)
