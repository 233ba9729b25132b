"""What fails half-way leaves nothing that a later call could take for whole."""

from __future__ import annotations

import threading
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
    deferred = Deferred()
    go_on, ended = threading.Event(), []

    def run(works: Any, done: Any) -> None:
        go_on.wait(10)
        ended.append(True)

    deferred.start([], run)
    thread = deferred._thread
    assert thread is not None
    join = thread.join

    def interrupted() -> None:
        monkeypatch.setattr(thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        deferred.drain()
    go_on.set()
    deferred.drain()
    assert ended == [True]
