"""All parameters of a model, in registration order: partition, fetch, unshard, reshard.

Owned by the engine; called by the coordinator, GatheredParameters and the optimizer. The only place where parameter
shards and full parameters meet. It decides nothing about when.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from trainer.config import ConfigError
from trainer.swap.accesslog import AccessLog
from trainer.swap.backend import SwapBackend, SwapError, SwapShard, SwapSpec, Tile
from trainer.zero import stub
from trainer.zero.collectives import Collectives
from trainer.zero.parameter import ParamState, ZeroParam

_SMALL_BYTES = 64 << 10
"""Shards up to this size share a collective with others."""
_PACK_BYTES = 4 << 20
"""At most this much of one rank's bytes in a shared collective."""


P = ParamSpec("P")
R = TypeVar("R")


def _whatever_the_mode(act: Callable[P, R]) -> Callable[P, R]:
    """Tensors made inside the caller's inference_mode would be of no use after it."""

    @functools.wraps(act)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return act(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return act(*args, **kwargs)

    return call


class ParamSet:
    """The parameters of one model."""

    def __init__(self, collectives: Collectives, params: Sequence[ZeroParam]) -> None:
        self.collectives = collectives
        self.params = list(params)
        self.backend: SwapBackend | None = None
        self.log: AccessLog | None = None
        self.live_numel = 0
        """Elements gathered now, persistent ones included."""
        self.live_numel_max = 0
        self._inflight: dict[ZeroParam, None] = {}
        for index, zero in enumerate(self.params):
            zero.index = index
            zero.owner, zero.on_copy = self, None
        self.before_modified: Callable[[], None] = lambda: None
        """Asked before shards are replaced from outside; may refuse."""
        self.on_modified: Callable[[Sequence[ZeroParam]], None] | None = None
        """Told when shards were replaced from outside; the optimizer then refreshes its master copies."""
        self.before_fetch: Callable[[ZeroParam], None] = lambda zero: None
        """Called before a shard is fetched; waits for an update of it that is still under way."""
        self.may_prefetch: Callable[[], bool] = lambda: True
        """Whether a shard may be fetched ahead of need: not while updates are under way, whose memory it could take."""

    def attach(self, backend: SwapBackend, log: AccessLog) -> None:
        """Register every shard and store its present values; from now on the backend has them."""
        self.backend, self.log = backend, log
        specs = [SwapSpec(f"param/{p.name}", p.layout.shard_numel, p.dtype, "param") for p in self.params]
        for zero, shard in zip(self.params, backend.register(specs), strict=True):
            zero.shard = shard
            if zero.resting is None:
                raise AssertionError(f"{zero.name} was not partitioned before it got a backend")
            self.write(zero, zero.resting)
            zero.resting = None
        self.refresh_persistent()
        self.live_numel_max = self.live_numel

    @_whatever_the_mode
    def write(self, zero: ZeroParam, mine: torch.Tensor) -> None:
        """Replace this rank's shard."""
        backend, shard, _ = self._attached(zero)
        self.before_fetch(zero)
        for tile in shard.tiles:
            slot = backend.fetch(tile, "overwrite").wait()
            slot.tensor.copy_(mine[tile.start : tile.start + tile.numel])
            slot.store()

    @_whatever_the_mode
    def start(self, zero: ZeroParam) -> None:
        """Begin fetching this rank's shard. No collective, so ranks need not agree on when."""
        if zero.state is not ParamState.NOT_AVAILABLE:
            raise AssertionError(f"{zero.name} cannot be fetched while {zero.state.value}")
        backend, shard, log = self._attached(zero)
        self.before_fetch(zero)
        for tile in shard.tiles:
            log.note(backend, tile, "read")
            zero.pending.append(backend.fetch(tile, "read"))
        zero.state = ParamState.INFLIGHT
        self._inflight[zero] = None

    def cancel(self, zero: ZeroParam) -> None:
        """Give back what was fetched for nothing. Raises no SwapError. Nothing is left half done: a fetch that failed
        has nothing to give back, and part of a parameter must not be taken for the whole."""
        pending = list(zero.pending)
        zero.pending.clear()
        try:
            for one in pending:
                with contextlib.suppress(SwapError):
                    one.wait().release()
        finally:
            self._inflight.pop(zero, None)
            zero.storage.resize_(0)
            zero.state = ParamState.NOT_AVAILABLE

    def inflight(self) -> list[ZeroParam]:
        """Parameters whose shards are being fetched."""
        return list(self._inflight)

    @_whatever_the_mode
    def gather(self, wanted: Sequence[ZeroParam]) -> None:
        """Make parameters AVAILABLE. Collective: every rank calls it for the same parameters in the same order."""
        missing = [zero for zero in dict.fromkeys(wanted) if zero.state is not ParamState.AVAILABLE]
        for zero in wanted:
            if zero.state is ParamState.AVAILABLE:
                stub.reveal(zero.param)
        if not missing:
            return
        try:
            self._gather(missing)
        except BaseException:
            # A part of what was fetched has gone its way already: the rest must not be taken for the whole.
            with contextlib.ExitStack() as all_of_them:
                for zero in missing:
                    if zero.state is ParamState.INFLIGHT:
                        all_of_them.callback(self.cancel, zero)
            raise
        self.live_numel_max = max(self.live_numel_max, self.live_numel)

    def _gather(self, missing: list[ZeroParam]) -> None:
        fetched = [zero for zero in missing if zero.state is ParamState.NOT_AVAILABLE]
        # All updates first, then all fetches: a fetch holds memory that an update may be waiting for.
        for zero in fetched:
            self.before_fetch(zero)
        for zero in fetched:
            self.start(zero)
        digest = zlib.crc32(repr([zero.index for zero in missing]).encode())
        self.collectives.announce(f"the gather of {missing[0].name} and {len(missing) - 1} more (#{digest:08x})")
        small = [zero for zero in missing if zero.shard_bytes <= _SMALL_BYTES and self.collectives.world > 1]
        for zero in missing:
            if zero not in small:
                self._receive(zero)
        for together in _packs(small):
            self._receive_together(together)
        for zero in missing:
            zero.expose()
            self.live_numel += zero.numel

    def _arrive(self, zero: ZeroParam) -> Iterator[Tile]:
        """Put this rank's tiles into their places as they come. Copied and given back at once: a slot must not wait
        for other ranks, nor for whatever the process group still refers to after its work is done."""
        zero.allocate()
        while zero.pending:
            slot = zero.pending.pop(0).wait()
            tile = slot.tile
            zero.piece(self.collectives.rank, tile.start, tile.numel).copy_(slot.tensor)
            slot.release()
            yield tile
        self._inflight.pop(zero, None)

    def _receive(self, zero: ZeroParam) -> None:
        """One collective per tile, straight into place."""
        for tile in self._arrive(zero):
            pieces = [zero.piece(rank, tile.start, tile.numel) for rank in range(self.collectives.world)]
            self.collectives.all_gather(pieces, pieces[self.collectives.rank], f"the gather of {zero.name}")

    def _receive_together(self, pack: list[ZeroParam]) -> None:
        """One collective for many small shards: what a collective costs before its first byte is what counts."""
        for zero in pack:
            for _ in self._arrive(zero):
                pass
        rank, world = self.collectives.rank, self.collectives.world
        mine = torch.cat([zero.piece(rank).view(torch.uint8) for zero in pack])
        everyone = torch.empty(world, mine.numel(), dtype=torch.uint8)
        self.collectives.all_gather(list(everyone), mine, f"the gather of {pack[0].name} and {len(pack) - 1} more")
        for other in range(world):
            parts = torch.split(everyone[other], [zero.shard_bytes for zero in pack])
            for zero, part in zip(pack, parts, strict=True):
                zero.piece(other).view(torch.uint8).copy_(part)

    @_whatever_the_mode
    def release(self, zero: ZeroParam) -> None:
        """Drop the full values, whether persistent or not."""
        if zero.state is ParamState.AVAILABLE:
            zero.conceal()
            self.live_numel -= zero.numel

    def drop_idle(self) -> None:
        """Release and cancel everything that is neither persistent nor in use; after a pass."""
        for zero in self.params:
            zero.kept_until = -1
            if zero.state is ParamState.INFLIGHT:
                self.cancel(zero)
            elif zero.persistent:
                zero.idle()
            elif not zero.blocks and not zero.users:
                self.release(zero)

    def drop_all(self) -> None:
        """The same, and no module uses anything; before shards change."""
        for zero in self.params:
            zero.users = 0
        self.drop_idle()

    def refresh_persistent(self) -> None:
        """Shards changed: gather the persistent parameters again."""
        persistent = [zero for zero in self.params if zero.persistent]
        for zero in persistent:
            self.release(zero)
        self.gather(persistent)
        for zero in persistent:
            zero.idle()

    def idle(self, zero: ZeroParam) -> None:
        """No module or block uses it now, although it may stay gathered."""
        zero.idle()

    def modified(self, params: Sequence[ZeroParam]) -> None:
        """Shards were replaced from outside."""
        if self.on_modified is not None:
            self.on_modified(params)

    def detach(self) -> None:
        """The backend is about to close: parameters that are not gathered can no longer be."""
        self.drop_all()
        self.backend = None
        for zero in self.params:
            zero.owner, zero.on_touch = None, None

    def live_bytes(self) -> int:
        """Bytes that gathered parameters take now, counted from their storages."""
        return sum(zero.storage.nbytes() for zero in self.params)

    def _attached(self, zero: ZeroParam) -> tuple[SwapBackend, SwapShard, AccessLog]:
        if self.backend is None or self.log is None or zero.shard is None:
            raise AssertionError(f"{zero.name} is fetched before its shard was registered")
        return self.backend, zero.shard, self.log


def _packs(small: Sequence[ZeroParam]) -> list[list[ZeroParam]]:
    """Consecutive shards up to a bound; the same on every rank, for it depends on sizes only."""
    packs: list[list[ZeroParam]] = []
    room = 0
    for zero in small:
        if not packs or zero.shard_bytes > room:
            packs.append([])
            room = _PACK_BYTES
        packs[-1].append(zero)
        room -= zero.shard_bytes
    return packs


def partition(zero: ZeroParam, collectives: Collectives) -> None:
    """Take rank 0's values, keep this rank's shard at rest, drop the rest."""
    collectives.broadcast(zero.flat, 0, f"the broadcast of {zero.name}")
    zero.resting = zero.piece(collectives.rank).clone()
    zero.conceal()


def choose_persistent(params: Iterable[ZeroParam], threshold: int, model_threshold: int) -> None:
    """Mark parameters that stay gathered: small ones, in registration order, up to a total. Empty ones always."""
    total = 0
    for zero in params:
        fits = zero.numel <= threshold and total + zero.numel <= model_threshold
        zero.persistent = fits or zero.numel == 0
        total += zero.numel if fits else 0


def collect(model: nn.Module, world: int, dtype: torch.dtype | None) -> list[ZeroParam]:
    """A ZeroParam for each distinct parameter, in registration order; tied ones get aliases. Those that zero.Init made
    are found again under their full names; others are adopted, floating ones as `dtype` if that is given."""
    found: dict[int, ZeroParam] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        known = found.get(id(param))
        if known is not None:
            known.aliases = (*known.aliases, name)
            continue
        zero: ZeroParam | None = getattr(param, "_zero", None)
        if zero is None:
            original = param.data
            if dtype is not None and param.is_floating_point():
                original = param.data = original.to(dtype)
            zero = ZeroParam(param, name, world)
            zero.adopt(original)
        elif zero.resting is None:
            raise ConfigError(f"{name} belongs to another engine; build the model anew")
        elif dtype is not None and zero.dtype.is_floating_point and zero.dtype != dtype:
            raise ConfigError(f"{name} was partitioned as {zero.dtype}; give zero.Init the configuration with bf16")
        zero.name, zero.aliases = name, (name,)
        zero.trainable = zero.differentiable = param.requires_grad
        found[id(param)] = zero
    return list(found.values())
