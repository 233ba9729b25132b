"""What fails half-way leaves nothing that a later call could take for whole."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.trainer.making import engine_of
from trainer.optim.deferred import Deferred
from trainer.swap.backend import SwapError, Tile


class Failing:
    """A fetch that ends in an error."""

    def wait(self) -> Any:
        raise SwapError("the disk is gone")


def test_a_forward_after_a_failed_gather_computes_with_whole_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    x = torch.randn(2, 64)
    expected = model(x).detach()
    with engine_of(model) as engine, torch.no_grad():
        backend = engine.backends.param
        fetch = backend.fetch

        def failing(tile: Tile, mode: str) -> Any:
            return Failing() if tile.index in (1, 2) else fetch(tile, mode)

        monkeypatch.setattr(backend, "fetch", failing)
        with pytest.raises(SwapError, match="the disk is gone"):
            engine(x)
        monkeypatch.setattr(backend, "fetch", fetch)
        assert torch.equal(engine(x), expected)


def test_a_step_that_failed_cannot_be_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(nn.Linear(64, 64)) as engine:
        engine.backward(engine(torch.randn(2, 64)).sum())
        monkeypatch.setattr(engine.params, "refresh_persistent", Failing().wait)
        with pytest.raises(SwapError):
            engine.step()
        with pytest.raises(RuntimeError, match="failed half-way"):
            engine.step()


def test_an_interrupted_wait_for_the_optimizer_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, ended = threading.Event(), []

    def run(take: Any, done: Any) -> None:
        while (work := take()) is not None:
            go_on.wait(10)
            ended.append(work)
            done(work)

    deferred = Deferred(run)
    work: Any = SimpleNamespace(params=())
    deferred.add([work])
    wait_for = deferred._condition.wait_for

    def interrupted(condition: Any) -> None:
        monkeypatch.setattr(deferred._condition, "wait_for", wait_for)
        raise KeyboardInterrupt

    monkeypatch.setattr(deferred._condition, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        deferred.drain()
    go_on.set()
    deferred.drain()
    assert ended == [work]
