"""What ranks do together, as an object that can be replaced: gather, reduce, broadcast, agree.

Called by the other files of this package. Every wait is bounded and its failure says what was waited for. Before
ranks exchange bytes they exchange what they are about to exchange (`announce`), so that ranks which took different
branches get an error naming both sides instead of each other's bytes.
"""

from __future__ import annotations

import atexit
import json
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trainer.zero.errors import CollectiveError

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch renamed it; the old name warns where the new one exists."""

_lent: Sequence[torch.Tensor] = ()
"""What the last operation was given, and nobody else keeps. See `wait_until_let_go`."""
_ALONE = 3
"""References to an object in a tuple while a loop asks how many there are."""


def wait_until_let_go(timeout_s: float = 1.0) -> None:
    """The group's own threads let go of tensors a moment after the operation is over, for which torch needs the
    interpreter; if that is ending meanwhile, the process aborts instead of saying why it ended. So wait for them."""
    deadline = time.monotonic() + timeout_s
    while any(sys.getrefcount(tensor) > _ALONE for tensor in _lent) and time.monotonic() < deadline:
        time.sleep(0.001)


atexit.register(wait_until_let_go)


class Collectives(Protocol):
    """All ranks of a job. `what` names the operation in errors."""

    rank: int
    world: int

    def announce(self, what: str) -> None:
        """Meet, and check that every rank is about to do the same thing."""

    def all_gather(self, pieces: Sequence[torch.Tensor], mine: torch.Tensor, what: str) -> None:
        """`pieces[r]` receives rank r's `mine`, which may be its own piece; all of one length, contiguous. Any dtype,
        bit for bit."""

    def reduce_rows(self, matrix: torch.Tensor, scatter: bool, what: str) -> torch.Tensor:
        """Sum a (world, n) matrix over ranks; returns this rank's row."""

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """`tensor` becomes the source rank's."""

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Every rank's small value (of what JSON can carry), in rank order."""


class SoloCollectives:
    """World size 1."""

    rank = 0
    world = 1

    def announce(self, what: str) -> None:
        """Nobody to disagree with."""

    def all_gather(self, pieces: Sequence[torch.Tensor], mine: torch.Tensor, what: str) -> None:
        """A copy, unless it is there already."""
        if pieces[0].data_ptr() != mine.data_ptr():
            pieces[0].copy_(mine)

    def reduce_rows(self, matrix: torch.Tensor, scatter: bool, what: str) -> torch.Tensor:
        """The only row."""
        return matrix[0]

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Already there."""

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Only one."""
        return [value]


class GroupCollectives:
    """The default process group (gloo)."""

    def __init__(self, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self._timeout = timedelta(seconds=timeout_s)
        self._sequence = 0

    def announce(self, what: str) -> None:
        """One small gather of a fingerprint; names are exchanged only when fingerprints differ."""
        self._sequence += 1
        mine = torch.tensor([self._sequence, zlib.crc32(what.encode())], dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        self._bounded(lambda: dist.all_gather(everyone, mine, async_op=True), what, *everyone, mine)
        if all(torch.equal(other, mine) for other in everyone):
            return
        wanted = self.exchange(what, what)
        other = next(rank for rank in range(self.world) if wanted[rank] != what or rank == self.world - 1)
        raise CollectiveError(
            f"ranks went different ways: rank {self.rank} came to {what}, rank {other} to {wanted[other]}; "
            "every rank must run the same modules in the same order"
        )

    def all_gather(self, pieces: Sequence[torch.Tensor], mine: torch.Tensor, what: str) -> None:
        """Bytes, so that no dtype is special."""
        if mine.numel() == 0:
            return
        into, out = [piece.view(torch.uint8) for piece in pieces], mine.view(torch.uint8)
        self._bounded(lambda: dist.all_gather(into, out, async_op=True), what, *into, out)

    def reduce_rows(self, matrix: torch.Tensor, scatter: bool, what: str) -> torch.Tensor:
        """Reduce-scatter, or all-reduce and a slice."""
        if matrix.shape[1] == 0:
            return matrix[self.rank]
        if not scatter:
            flat = matrix.view(-1)
            self._bounded(lambda: dist.all_reduce(flat, async_op=True), what, flat)
            return matrix[self.rank]
        row, flat = matrix.new_empty(matrix.shape[1]), matrix.view(-1)
        self._bounded(lambda: _reduce_scatter(row, flat, async_op=True), what, row, flat)
        return row

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Contiguous tensors only."""
        if tensor.numel():
            flat = tensor.view(-1).view(torch.uint8)
            self._bounded(lambda: dist.broadcast(flat, source, async_op=True), what, flat)

    def exchange(self, value: Any, what: str) -> list[Any]:
        """As JSON: lengths first, then the text, padded to the longest."""
        mine = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.world)]
        self.all_gather(lengths, torch.tensor([mine.numel()]), what)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        texts = [torch.empty_like(padded) for _ in range(self.world)]
        self.all_gather(texts, padded, what)
        return [json.loads(bytes(t[: int(n)].tolist())) for t, n in zip(texts, lengths, strict=True)]

    def _bounded(self, start: Callable[[], Any], what: str, *lent: torch.Tensor) -> None:
        global _lent
        _lent = lent
        try:
            start().wait(self._timeout)
        except RuntimeError as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: RuntimeError) -> CollectiveError:
        reason = str(error).splitlines()[0][:200]
        return CollectiveError(
            f"rank {self.rank} of {self.world} waited up to {self._timeout.total_seconds():g} s for the other ranks "
            f"in {what}: {reason}"
        )


def default_collectives(timeout_s: float) -> Collectives:
    """The process group if there is one with more than one rank."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return GroupCollectives(timeout_s)
    return SoloCollectives()
