"""The process group's operations: bounded, named in errors, and what they are given outlives them."""

from __future__ import annotations

import time
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.zero import collectives
from trainer.zero.collectives import GroupCollectives
from trainer.zero.errors import CollectiveError


class Group:
    """Stands in for torch.distributed, with one rank of two, and remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[weakref.ref[torch.Tensor]] = []
        self.failure: RuntimeError | None = None

    def get_rank(self) -> int:
        return 0

    def get_world_size(self) -> int:
        return 2

    def all_gather(self, into: list[torch.Tensor], out: torch.Tensor, async_op: bool) -> Any:
        for tensor in into:
            tensor.copy_(out)
        return self._work(*into, out)

    def all_reduce(self, matrix: torch.Tensor, async_op: bool) -> Any:
        return self._work(matrix)

    def reduce_scatter(self, row: torch.Tensor, flat: torch.Tensor, async_op: bool) -> Any:
        row.copy_(flat[: row.numel()])
        return self._work(row, flat)

    def broadcast(self, flat: torch.Tensor, source: int, async_op: bool) -> Any:
        return self._work(flat)

    def _work(self, *tensors: torch.Tensor) -> Any:
        self.given += [weakref.ref(tensor) for tensor in tensors]

        def wait(timeout: timedelta) -> None:
            if self.failure is not None:
                raise self.failure

        return SimpleNamespace(wait=wait)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group()
    monkeypatch.setattr(collectives, "dist", group)
    monkeypatch.setattr(collectives, "_reduce_scatter", group.reduce_scatter)
    return group


OPERATIONS = {
    "announce": lambda ranks: ranks.announce("x"),
    "all_gather": lambda ranks: ranks.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(2), "x"),
    "all_reduce": lambda ranks: ranks.reduce_rows(torch.ones(2, 2), False, "x"),
    "reduce_scatter": lambda ranks: ranks.reduce_rows(torch.ones(2, 2), True, "x"),
    "broadcast": lambda ranks: ranks.broadcast(torch.ones(2), 0, "x"),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_the_end_waits_for_whoever_still_holds_what_an_operation_was_given(
    group: Group, operation: str, fails: bool
) -> None:
    """A thread of the group that lets go of a tensor while the interpreter ends aborts the process."""
    ranks, result = GroupCollectives(1.0), None
    if fails:
        group.failure = RuntimeError("gone")
        with pytest.raises(CollectiveError, match="rank 0 of 2 waited up to 1 s for the other ranks in x: gone"):
            OPERATIONS[operation](ranks)
    else:
        result = OPERATIONS[operation](ranks)
    del ranks, result
    group.failure = None
    given = [tensor() for tensor in group.given]
    assert given
    assert all(tensor is not None for tensor in given)
    assert lasts(0.01) >= 0.01
    del given
    assert lasts(1000.0) < 500.0


def lasts(timeout_s: float) -> float:
    started = time.monotonic()
    collectives.wait_until_let_go(timeout_s)
    return time.monotonic() - started
