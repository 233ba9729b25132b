"""Updates that begin in backward: which, when, and what is refused while a step is half taken."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import trainer
from tests.unit.trainer.making import engine_of
from trainer.config import ConfigError, load_config
from trainer.optim.early import EarlyWorks
from trainer.zero import GatheredParameters

NVME = {"device": "nvme", "endpoint": "unix:///nowhere"}
ZERO = {"offload_param": NVME, "offload_optimizer": NVME, "reduce_bucket_size": 100}
EARLY = {"gradient_clipping": 0.0, "offloadd": {"update_in_backward": True}}
SETTLED_STEPS = 4
"""Steps until updates begin in backward as they will from then on: two that resemble each other, and a rehearsal."""


def works(count: int) -> tuple[list[Any], list[Any]]:
    """A parameter each."""
    zeros = [SimpleNamespace(name=f"p{n}") for n in range(count)]

    class Hashable(SimpleNamespace):
        __hash__ = object.__hash__

    named = [Hashable(name=zero.name) for zero in zeros]
    return named, [Hashable(params=(zero,)) for zero in named]


def settled(taken: int, count: int) -> tuple[EarlyWorks, list[Any], list[Any]]:
    """After a rehearsal that got through `taken` of `count`."""
    zeros, all_works = works(count)
    early = EarlyWorks(all_works)
    assert not early.settle()
    early.begin()
    early.reduced(zeros)
    early.end(count - taken)
    assert early.settle()
    return early, zeros, all_works


def test_nothing_is_offered_while_learning() -> None:
    zeros, all_works = works(2)
    early = EarlyWorks(all_works)
    early.begin()
    assert early.reduced(zeros) == []


def test_a_rehearsal_offers_whatever_is_ready() -> None:
    zeros, all_works = works(3)
    early = EarlyWorks(all_works)
    early.settle()
    early.begin()
    assert early.reduced([zeros[2], zeros[1]]) == [all_works[2], all_works[1]]


def test_as_many_are_offered_as_the_rehearsal_got_through() -> None:
    early, zeros, all_works = settled(2, 4)
    early.begin()
    assert early.reduced(zeros[:1:-1]) == [all_works[3], all_works[2]]
    assert early.reduced(zeros[1::-1]) == []


def test_a_parameter_whose_gradient_came_in_two_parts_is_not_offered_again() -> None:
    zeros, all_works = works(2)
    early = EarlyWorks(all_works)
    early.begin()
    early.reduced(zeros)
    early.reduced(zeros[:1])
    early.end(0)
    early.settle()
    early.begin()
    assert early.reduced(zeros) == [all_works[1]]


def test_a_parameter_gathered_after_its_gradient_is_not_offered_again() -> None:
    zeros, all_works = works(2)
    early = EarlyWorks(all_works)
    early.begin()
    early.reduced(zeros)
    early.gathered(zeros[1])
    early.end(0)
    early.settle()
    early.begin()
    assert early.reduced(zeros) == [all_works[0]]


def test_one_that_is_needed_again_after_its_update_began_is_named() -> None:
    early, zeros, _ = settled(2, 2)
    early.begin()
    early.reduced(zeros)
    with pytest.raises(RuntimeError, match="p1 is needed between its update"):
        early.gathered(zeros[1])


def train(engine: trainer.Engine, steps: int) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 32)).sum())
        engine.step()


@pytest.fixture
def half_taken() -> Iterator[trainer.Engine]:
    """An engine whose next step has begun in backward."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with engine_of(model, ZERO, **EARLY) as engine:
        train(engine, SETTLED_STEPS)
        engine.backward(engine(torch.ones(2, 32)).sum())
        assert engine.optimizer.early is not None
        assert engine.optimizer.early.begun
        yield engine


def test_a_step_half_taken_is_completed_by_step(half_taken: trainer.Engine) -> None:
    half_taken.step()
    train(half_taken, 1)
    assert half_taken.global_steps == SETTLED_STEPS + 2


def test_a_step_taken_is_completed_by_close(half_taken: trainer.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = half_taken.optimizer
    update, drain, go_on, updated = optimizer._update, optimizer.drain, threading.Event(), []

    def held(*arguments: Any) -> None:
        go_on.wait(10)
        updated.append(1)
        update(*arguments)

    def draining() -> None:
        go_on.set()
        drain()

    half_taken.step()
    optimizer.drain()
    monkeypatch.setattr(optimizer, "_update", held)
    monkeypatch.setattr(optimizer, "drain", draining)
    optimizer.apply(1.0)
    half_taken.close()
    assert len(updated) == sum(len(work.pieces) for work in optimizer._works)


def test_an_evaluation_before_the_step_is_refused(half_taken: trainer.Engine) -> None:
    with pytest.raises(RuntimeError, match=r"call engine\.step\(\) first"):
        half_taken.eval()(torch.ones(2, 32))


def test_states_half_updated_are_not_shown(half_taken: trainer.Engine) -> None:
    with pytest.raises(RuntimeError, match=r"call engine\.step\(\) first"):
        list(half_taken.optimizer.shard_states())


def test_a_learning_rate_changed_too_late_is_refused_and_can_be_put_back(half_taken: trainer.Engine) -> None:
    group = half_taken.optimizer.param_groups[0]
    before, group["lr"] = group["lr"], 0.5
    with pytest.raises(RuntimeError, match="changed between"):
        half_taken.step()
    group["lr"] = before
    half_taken.step()
    assert half_taken.global_steps == SETTLED_STEPS + 1


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_parameters_cannot_be_modified_while_a_step_is_half_taken(kind: str) -> None:
    """A weight is sharded, a bias is persistent."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    first = getattr(model[0], kind)  # is not among what is updated early: its gradient comes last
    with engine_of(model, {**ZERO, "stage3_param_persistence_threshold": 100}, **EARLY) as engine:
        train(engine, SETTLED_STEPS)
        with GatheredParameters(first):
            before = first.detach().clone()
        engine.backward(engine(torch.ones(2, 32)).sum())
        refused = pytest.raises(RuntimeError, match=r"call engine\.step\(\) first")
        with refused, GatheredParameters(first, modifier_rank=0), torch.no_grad():
            first.fill_(9.0)
        with GatheredParameters(first):
            assert torch.equal(first, before)
        engine.step()


class Failing(nn.Module):
    """Raises in backward when told to, after the layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.layers[0](x)
        first.register_hook(self._check)
        last: torch.Tensor = self.layers[1](first)
        return last

    def _check(self, grad: torch.Tensor) -> None:
        if self.fail:
            raise ValueError("no")


def test_a_backward_that_raises_after_updates_began_leaves_the_engine_unusable() -> None:
    model = Failing()
    with engine_of(model, ZERO, **EARLY) as engine:
        train(engine, SETTLED_STEPS)
        model.fail = True
        with pytest.raises(ValueError, match="no"):
            engine.backward(engine(torch.ones(2, 32)).sum())
        with pytest.raises(RuntimeError, match="failed half-way"):
            engine(torch.ones(2, 32))


def test_a_backward_that_raises_before_any_update_can_be_repeated_with_accumulation() -> None:
    model = Failing()
    with engine_of(model, ZERO, gradient_accumulation_steps=2, **EARLY) as engine:
        train(engine, 2 * SETTLED_STEPS)
        assert engine.optimizer.early is not None
        engine.backward(engine(torch.ones(2, 32)).sum())
        engine.optimizer.early.learn()  # Nothing is offered, but the backward that completes gradients has begun.
        model.fail = True
        with pytest.raises(ValueError, match="no"):
            engine.backward(engine(torch.ones(2, 32)).sum())
        assert not engine.optimizer.early.open


def test_updates_run_where_priorities_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*arguments: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", denied)
    with engine_of(nn.Linear(32, 32), ZERO) as engine:
        train(engine, 2)
        assert engine.global_steps == 2


def test_clipping_and_updates_in_backward_exclude_each_other() -> None:
    tree = {"train_micro_batch_size_per_gpu": 1, **EARLY, "gradient_clipping": 1.0}
    with pytest.raises(ConfigError, match="set gradient_clipping to 0 instead of 1"):
        load_config(tree)
