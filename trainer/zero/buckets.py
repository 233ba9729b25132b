"""Gradients on their way from autograd to this rank's flat accumulation buffers.

The bucket layout is a pure function of the parameters and the configuration, and buckets are reduced strictly in its
order: ranks whose hooks fire in different orders cannot mismatch, and the bits of a sum, which depend on its position
in the bucket, do not depend on timing. Fed by the hooks that autograd runs when a gradient is complete; `finish` is
called by the engine when backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trainer.zero.collectives import Collectives
from trainer.zero.errors import UsageError
from trainer.zero.parameter import ZeroParam


@dataclass(frozen=True)
class Entry:
    """One parameter's columns in a bucket."""

    zero: ZeroParam
    column: int


@dataclass(frozen=True)
class Bucket:
    """A (world, columns) matrix: row r holds what belongs to rank r."""

    entries: tuple[Entry, ...]
    columns: int
    dtype: torch.dtype


def plan_buckets(params: Sequence[ZeroParam], bucket_numel: int, communication: torch.dtype | None) -> list[Bucket]:
    """Trainable parameters from the last to the first, as backward comes to them, packed up to `bucket_numel`
    elements. A parameter larger than that has a bucket of its own."""
    buckets: list[Bucket] = []
    entries: list[Entry] = []
    columns = numel = 0
    dtype: torch.dtype | None = None
    for zero in [zero for zero in reversed(params) if zero.trainable and zero.numel]:
        wanted = communication or zero.dtype
        if entries and (wanted != dtype or numel + zero.numel > bucket_numel):
            buckets.append(Bucket(tuple(entries), columns, _known(dtype)))
            entries, columns, numel = [], 0, 0
        entries.append(Entry(zero, columns))
        columns += zero.layout.shard_numel
        numel += zero.numel
        dtype = wanted
    if entries:
        buckets.append(Bucket(tuple(entries), columns, _known(dtype)))
    return buckets


def _known(dtype: torch.dtype | None) -> torch.dtype:
    """The bucket's type once it has an entry."""
    if dtype is None:
        raise AssertionError("a bucket without entries has no type")
    return dtype


class _Filling(Protocol):
    """A bucket while gradients arrive. Nothing is cleared beforehand: the first part of a gradient is copied, a further
    one added, and what never came is zeroed at the end."""

    @property
    def complete(self) -> bool:
        """Whether every parameter's gradient is here."""

    def put(self, entry: Entry, grad: torch.Tensor) -> None:
        """A full gradient, or a further part of one."""

    def finished(self) -> torch.Tensor | None:
        """What ranks exchange now; None: nothing."""


class _Staged:
    """In a matrix of its own, cut as the shards are."""

    def __init__(self, bucket: Bucket, world: int, spare: torch.Tensor | None) -> None:
        self._bucket = bucket
        shape = (world, bucket.columns)
        fits = spare is not None and spare.shape == shape and spare.dtype == bucket.dtype
        self._matrix = spare if spare is not None and fits else torch.empty(shape, dtype=bucket.dtype)
        self._filled: set[ZeroParam] = set()

    @property
    def complete(self) -> bool:
        return len(self._filled) == len(self._bucket.entries)

    def put(self, entry: Entry, grad: torch.Tensor) -> None:
        flat, layout = grad.reshape(-1), entry.zero.layout
        first = entry.zero not in self._filled
        self._filled.add(entry.zero)
        for rank in range(layout.world):
            start, numel = layout.start(rank), layout.logical(rank)
            row = self._matrix[rank, entry.column : entry.column + layout.shard_numel]
            if first:
                row[:numel].copy_(flat[start : start + numel])
                row[numel:].zero_()
            else:
                row[:numel].add_(flat[start : start + numel])

    def finished(self) -> torch.Tensor:
        for entry in self._bucket.entries:
            if entry.zero not in self._filled:
                self._matrix[:, entry.column : entry.column + entry.zero.layout.shard_numel].zero_()
        return self._matrix


class _InPlace:
    """One rank alone has nothing to exchange: gradients go straight to where they accumulate."""

    def __init__(self, bucket: Bucket, buffers: _Accumulators) -> None:
        self._bucket, self._buffers = bucket, buffers
        self._filled: set[ZeroParam] = set()

    @property
    def complete(self) -> bool:
        return len(self._filled) == len(self._bucket.entries)

    def put(self, entry: Entry, grad: torch.Tensor) -> None:
        self._filled.add(entry.zero)
        self._buffers.add(entry.zero, grad.reshape(-1))

    def finished(self) -> None:
        for entry in self._bucket.entries:
            if entry.zero not in self._filled:
                self._buffers.add(entry.zero, None)


class _Accumulators:
    """`zero.grad_shard` of all parameters: this rank's flat buffers."""

    def __init__(self, zeros: Iterable[ZeroParam]) -> None:
        self._zeros = list(zeros)

    def add(self, zero: ZeroParam, grad: torch.Tensor | None) -> None:
        """`grad` is this rank's shard of a gradient, with or without its padding; None stands for zeros."""
        if zero.grad_shard is None:
            raise AssertionError(f"{zero.name} has no accumulation buffer")
        # What a buffer holds at first is the last step's.
        fresh, zero.accumulated = not zero.accumulated, True
        numel = 0 if grad is None else grad.numel()
        if grad is not None:
            mine = zero.grad_shard[:numel]
            mine.copy_(grad) if fresh else mine.add_(grad)
        if fresh:
            zero.grad_shard[numel:].zero_()

    def new_step(self) -> None:
        """What was accumulated was used: the next gradients replace it."""
        for zero in self._zeros:
            zero.accumulated = False


class GradReducer:
    """One backward after another, into `zero.grad_shard`."""

    def __init__(
        self, buckets: Sequence[Bucket], collectives: Collectives, scatter: bool, watched: Sequence[ZeroParam]
    ) -> None:
        """`watched`: parameters that may get gradients; what is in no bucket is dropped as it comes."""
        self._buckets = list(buckets)
        self._collectives = collectives
        self._scatter = scatter
        self._home = {e.zero: (number, e) for number, b in enumerate(self._buckets) for e in b.entries}
        self._filling: dict[int, _Filling] = {}
        self._next = 0
        """The first bucket that has not left."""
        self._open = False
        """Whether the engine runs a backward."""
        self._arrivals = False
        """Whether that has given any gradient."""
        self._spare: torch.Tensor | None = None
        """The last matrix that was used up; fresh memory costs a page fault per page."""
        self._buffers = _Accumulators(self._home)
        self.on_reduced: Callable[[Sequence[ZeroParam]], None] = lambda zeros: None
        """Told after each reduction whose gradients it completed, as far as backward has shown."""
        self.on_stray: Callable[[], None] = lambda: None
        """Told of a gradient outside the engine's backward, before that is refused."""
        self.late = 0
        """Gradients that came after their bucket had left."""
        for zero in watched:
            with torch._C.DisableTorchFunctionSubclass():
                zero.param.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """The engine's backward begins; it ends with `finish` or `forget`."""
        self._open, self._arrivals = True, False

    def _arrived(self, param: torch.Tensor) -> None:
        zero: ZeroParam = param._zero  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            grad, param.grad = param.grad, None
        if not self._open:
            self.on_stray()
            raise UsageError(
                f"a gradient of parameter {zero.name} came outside its engine's backward; call engine.backward(loss) "
                "instead of loss.backward(), or torch.autograd.grad for gradients that are not to be trained with"
            )
        self._arrivals = True
        if grad is None or zero not in self._home:
            return
        number, entry = self._home[zero]
        if number < self._next:
            self.late += 1
        self._of(number).put(entry, grad.detach())
        while self._next in self._filling and self._filling[self._next].complete:
            self._reduce(self._next)
            self._next += 1

    def _of(self, number: int) -> _Filling:
        if number not in self._filling:
            self._filling[number] = self._begin(number)
        return self._filling[number]

    def _begin(self, number: int) -> _Filling:
        bucket, spare = self._buckets[number], self._spare
        # What comes late waits for the end: until then an update may be reading the buffer.
        if self._collectives.world == 1 and number >= self._next:
            return _InPlace(bucket, self._buffers)
        self._spare = None
        return _Staged(bucket, self._collectives.world, spare)

    def finish(self) -> None:
        """Backward is over: reduce what is left, unused parameters as zeros, then what came late."""
        while self._next < len(self._buckets):
            self._reduce(self._next)
            self._next += 1
        self._reduce_late()
        self.forget()

    def _reduce_late(self) -> None:
        """A parameter used in two re-entrant checkpoints gets its gradient in two parts. Ranks agree on whose second
        part came after the bucket had left, for that may differ between them."""
        if not self._buckets:
            return
        what = "the end of backward"
        late = [n in self._filling for n in range(len(self._buckets))]
        flags = torch.tensor([*late, self._arrivals], dtype=torch.uint8)
        everyone = torch.empty(self._collectives.world, len(flags), dtype=torch.uint8)
        self._collectives.announce(what)
        self._collectives.all_gather(list(everyone), flags, what)
        *late, arrivals = everyone.any(dim=0).tolist()
        if not arrivals:
            raise UsageError(
                "engine.backward(loss) gave no parameter of this engine a gradient, on any rank; pass a loss that was "
                "computed from what engine(...) returned"
            )
        for number, flag in enumerate(late):
            if flag:
                self._reduce(number)

    def _reduce(self, number: int) -> None:
        matrix = self._of(number).finished()
        del self._filling[number]
        if matrix is not None:
            self._exchange(number, matrix)
        self.on_reduced([entry.zero for entry in self._buckets[number].entries])

    def _exchange(self, number: int, matrix: torch.Tensor) -> None:
        world = self._collectives.world
        if world > 1:
            # Divided before the sum, so that a 16-bit sum does not overflow where the mean would not.
            matrix.div_(world)
        last = self._buckets[number].entries[-1].zero.name
        what = f"the reduction of gradient bucket {number} (up to {last})"
        self._collectives.announce(what)
        row = self._collectives.reduce_rows(matrix, self._scatter, what)
        for entry in self._buckets[number].entries:
            self._buffers.add(entry.zero, row[entry.column : entry.column + entry.zero.layout.shard_numel])
        self._spare = matrix

    def new_step(self) -> None:
        """The accumulated gradients were used: the next ones replace them."""
        self._buffers.new_step()

    def forget(self) -> None:
        """Drop what is on its way; after a finished backward, or one that raised."""
        self._open = False
        self._filling.clear()
        self._next = 0
