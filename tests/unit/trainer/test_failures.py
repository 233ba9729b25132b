"""What fails half-way leaves nothing that a later call could take for whole."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import trainer
from tests.unit.trainer.making import config_of, engine_of
from trainer.optim.deferred import Deferred
from trainer.swap.backend import SwapError, Tile
from trainer.swap.inprocess import InProcessBackend
from trainer.swap.select import Backends
from trainer.zero import GatheredParameters


class Failing:
    """A fetch that ends in an error."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error or SwapError("the disk is gone")

    def wait(self) -> Any:
        raise self._error


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


@pytest.mark.parametrize("error", [SwapError("the disk is slow"), KeyboardInterrupt()])
def test_a_look_after_an_interrupted_look_sees_whole_parameters(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    before = [param.detach().clone() for param in model.parameters()]
    with engine_of(model) as engine:
        backend = engine.backends.param
        fetch, errors = backend.fetch, [error]

        def interrupted(tile: Tile, mode: str) -> Any:
            if tile.index == 1 and errors:
                return Failing(errors.pop())
            return fetch(tile, mode)

        monkeypatch.setattr(backend, "fetch", interrupted)
        with pytest.raises(type(error)), GatheredParameters(model):
            pass
        monkeypatch.setattr(backend, "fetch", fetch)
        with GatheredParameters(model):
            assert all(torch.equal(param, was) for param, was in zip(model.parameters(), before, strict=True))
        assert backend.statistics().get("open_leases", 0) == 0


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


class Recording(InProcessBackend):
    """Remembers that it was closed; closing may fail."""

    def __init__(self, complaint: str = "") -> None:
        super().__init__(tile_numel=1024)
        self.complaint, self.closed, self.opened = complaint, False, False

    def register(self, specs: Any) -> Any:
        self.opened = True
        return super().register(specs)

    def close(self) -> None:
        self.closed = True
        super().close()
        if self.complaint:
            raise SwapError(self.complaint)


def _bad_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    raise KeyError("user code")


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"lr_scheduler": _bad_scheduler}, KeyError),
        ({"lr_scheduler": torch.optim.lr_scheduler.StepLR}, trainer.ConfigError),
        ({"training_data": object()}, TypeError),
    ],
)
def test_what_fails_late_in_initialize_leaves_nothing_open(more: dict[str, Any], kind: type[Exception]) -> None:
    made = [Recording(), Recording("the second error")]
    model = nn.Linear(4, 4)
    threads = threading.active_count()
    with pytest.raises(kind):
        trainer.initialize(model=model, config=config_of(), backends=lambda *_: Backends(*made), **more)
    assert [backend.closed for backend in made] == [backend.opened for backend in made]
    assert not model._forward_hooks
    assert threading.active_count() == threads


def _with_a_failed_update(monkeypatch: pytest.MonkeyPatch, made: list[Recording]) -> trainer.Engine:
    engine = trainer.initialize(model=nn.Linear(4, 4), config=config_of(), backends=lambda *_: Backends(*made)).engine
    monkeypatch.setattr(engine.optimizer, "close", Failing().wait)
    return engine


def test_closing_releases_everything_and_tells_once_what_stopped_an_update(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = [Recording("the daemon is gone"), Recording("the daemon is gone")]
    engine = _with_a_failed_update(monkeypatch, made)
    with pytest.raises(SwapError, match="the disk is gone") as caught:
        engine.close()
    assert caught.value.__context__ is None
    assert all(backend.closed for backend in made)
    assert not engine.module._forward_hooks
    assert sum("the daemon is gone" in message for message in caplog.messages) == 1
    engine.close()


def test_what_a_call_has_told_closing_does_not_tell_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Recording(), Recording()]
    engine = _with_a_failed_update(monkeypatch, made)
    error = SwapError("the disk is gone")

    def stopped() -> None:
        raise error

    monkeypatch.setattr(engine.optimizer, "drain", stopped)
    monkeypatch.setattr(engine.optimizer, "close", stopped)
    with pytest.raises(SwapError):
        engine.eval()(torch.ones(1, 4))
    engine.close()
    assert all(backend.closed for backend in made)
