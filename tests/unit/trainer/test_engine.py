"""The engine's interface: boundaries, counters, schedulers, errors, lifetimes."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainer
from tests.unit.trainer.making import config_of, engine_of, guarded


def step(engine: trainer.Engine, x: torch.Tensor) -> None:
    engine.backward(engine(x).square().mean())
    engine.step()


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def test_step_acts_at_the_boundary_only() -> None:
    with engine_of(nn.Linear(4, 2), gradient_accumulation_steps=3) as engine:
        seen = []
        for _ in range(6):
            step(engine, X)
            seen.append(engine.global_steps)
        assert seen == [0, 0, 1, 1, 1, 2]
        assert engine.micro_steps == 6


def test_backward_beyond_the_boundary_is_refused() -> None:
    with engine_of(nn.Linear(4, 2)) as engine:
        engine.backward(engine(X).sum())
        with pytest.raises(RuntimeError, match=r"call engine\.step\(\)"):
            engine.backward(engine(X).sum())


def test_the_norm_is_that_of_the_mean_gradient_before_clipping() -> None:
    model = nn.Linear(4, 1, bias=False)
    with engine_of(model, gradient_clipping=0.01) as engine:
        assert engine.get_global_grad_norm() is None
        engine.backward(engine(X).sum())
        engine.step()
        assert math.isclose(engine.get_global_grad_norm() or 0.0, X.sum(0).norm().item(), rel_tol=1e-6, abs_tol=1e-9)


def test_gradients_do_not_stay_in_the_parameters() -> None:
    model = nn.Linear(4, 2)
    with engine_of(model) as engine:
        engine.backward(engine(X).sum())
        with trainer.zero.GatheredParameters(model):
            assert all(param.grad is None for param in model.parameters())
        engine.step()
        assert all(param.grad is None for param in model.parameters())


def test_a_non_finite_gradient_is_counted_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with engine_of(nn.Linear(4, 2)) as engine, caplog.at_level(logging.WARNING):
        for _ in range(2):
            engine.backward((engine(X) * float("inf")).sum())
            engine.step()
        assert engine.statistics()["nonfinite_steps"] == 2
        assert sum("the gradient of weight is not finite" in message for message in caplog.messages) == 1
        assert engine.global_steps == 2


def test_after_an_exception_in_forward_the_next_step_is_right() -> None:
    class Raising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.armed = nn.Linear(4, 4), False
            self.last = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            if self.armed:
                raise KeyError("user code")
            return self.last(x)

    def losses(disturb: bool) -> list[float]:
        torch.manual_seed(0)
        model, found = Raising(), []
        with engine_of(model) as engine:
            for number in range(3):
                if disturb and number == 1:
                    model.armed = True
                    with pytest.raises(KeyError):
                        engine(X)
                    model.armed = False
                loss = engine(X).square().mean()
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            assert engine.backends.param.statistics()["open_leases"] == 0
        return found

    assert losses(True) == losses(False)


def test_two_forwards_before_one_backward() -> None:
    def losses(zero: dict[str, int]) -> list[float]:
        torch.manual_seed(0)
        found = []
        with engine_of(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), zero) as engine:
            for _ in range(3):
                loss = engine(X).square().mean() + engine(X * 2).abs().mean()
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
        return found

    assert losses({}) == losses({"stage3_param_persistence_threshold": 1000})


def test_at_most_one_layer_is_live_in_forward_and_backward() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    with engine_of(model, {"stage3_prefetch_bucket_size": 0}) as engine:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 64)).sum())
            engine.step()
        assert engine.statistics()["live_parameters_max"] == 64 * 64 + 64
        assert engine.statistics()["live_parameter_bytes"] == 0


def test_prefetching_follows_the_trace_without_gathering_more() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    with engine_of(model, {"stage3_prefetch_bucket_size": 10_000}) as engine:
        for _ in range(4):
            step(engine, torch.ones(2, 64))
        counted = engine.statistics()
        assert (counted["trace_invalidations"], counted["cancelled_prefetches"]) == (0, 0)
        assert counted["live_parameters_max"] == 64 * 64 + 64


def test_a_plan_of_two_whole_steps_reaches_the_backends() -> None:
    with engine_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), gradient_accumulation_steps=2) as engine:
        for _ in range(12):
            step(engine, X)
        reads = [access for access in engine.backends.param.planned if access.mode == "read"]
        states = engine.backends.optimizer.planned
        assert len(reads) == 2 * 2 * 2 * 4  # steps, micro-steps, passes, parameters (one tile each)
        assert states[: len(states) // 2] != states[len(states) // 2 :] or len({a.tile for a in states}) == 1
        assert engine.statistics()["access_plans"] == 1


def test_a_scheduler_over_the_callers_optimizer_drives_the_engine() -> None:
    model = nn.Linear(4, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, step_size=1, gamma=0.5)
    with engine_of(model, optimizer_object=adam, lr_scheduler=scheduler) as engine:
        step(engine, X)
        step(engine, X)
        assert engine.get_lr() == [0.25]


def test_a_scheduler_that_raises_does_not_undo_the_step() -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        def step() -> None:
            raise ValueError("it is over")

        return SimpleNamespace(step=step)

    with engine_of(nn.Linear(4, 2), lr_scheduler=make) as engine:
        engine.backward(engine(torch.ones(1, 4)).sum())
        with pytest.raises(ValueError, match="it is over"):
            engine.step()
        assert engine.global_steps == 1
        engine.backward(engine(torch.ones(1, 4)).sum())


def test_a_scheduler_may_be_made_from_the_engines_optimizer() -> None:
    def make(optimizer: torch.optim.Optimizer) -> object:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)

    with engine_of(nn.Linear(4, 2), lr_scheduler=make) as engine:
        step(engine, X)
        assert engine.get_lr() == [pytest.approx(0.001)]


def test_other_optimizers_are_refused() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(trainer.ConfigError, match="SGD is not supported yet"):
        trainer.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=config_of())


def test_groups_have_their_own_hyper_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with trainer.zero.GatheredParameters(model):
        before = [param.detach().clone() for param in model.parameters()]
    groups = [{"params": [model[0].weight], "lr": 0.0}, {"params": [model[1].weight], "lr": 0.1, "weight_decay": 0.0}]
    with engine_of(model, model_parameters=groups) as engine:
        step(engine, X)
        with trainer.zero.GatheredParameters(model):
            assert torch.equal(model[0].weight, before[0])
            assert not torch.equal(model[1].weight, before[1])


def test_the_native_kernel_and_the_reference_give_the_same_bits() -> None:
    def weights(torch_adam: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 500)
        optimizer = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": torch_adam}}
        with engine_of(model, optimizer=optimizer, bf16={"enabled": True}) as engine:
            for _ in range(3):
                step(engine, X.bfloat16())
            return [v for _, states in engine.optimizer.shard_states() for v in states["master"].tolist()]

    assert weights(True) == weights(False)


def test_a_loader_has_the_micro_batch() -> None:
    data = TensorDataset(torch.arange(10.0))
    config = config_of(train_batch_size=5)
    config.pop("train_micro_batch_size_per_gpu")
    result = trainer.initialize(model=nn.Linear(4, 2), training_data=data, config=config, backends=guarded)
    assert result.loader is not None
    assert [len(batch[0]) for batch in result.loader] == [5, 5]
    result.engine.close()


def test_a_replaced_auto_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), engine_of(nn.Linear(4, 2), gradient_clipping="auto"):
        assert [m for m in caplog.messages if "auto" in m] == [
            '"auto" was replaced by the default: gradient_clipping = 1.0'
        ]


def test_a_path_serves_as_configuration(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config_of()))
    engine, optimizer, loader, scheduler = trainer.initialize(model=nn.Linear(4, 2), config=tmp_path / "ds.json")
    assert (loader, scheduler, optimizer) == (None, None, engine.optimizer)
    engine.close()


def test_a_closed_engine_says_so_and_closes_again() -> None:
    with engine_of(nn.Linear(4, 2)) as engine:
        engine.destroy()
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            engine(X)


def test_the_callers_optimizer_step_is_refused() -> None:
    with engine_of(nn.Linear(4, 2)) as engine, pytest.raises(RuntimeError, match=r"engine\.step\(\)"):
        engine.optimizer.step()


class FailsInBackward(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        if FailsInBackward.armed:
            raise KeyError("user code")
        return grad


def test_a_backward_that_raised_leaves_nothing_behind() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(FailsInBackward.apply(self.first(x)))

    def losses(disturb: bool) -> list[float]:
        torch.manual_seed(0)
        found = []
        with engine_of(Net(), {"reduce_bucket_size": 1}, gradient_accumulation_steps=2) as engine:
            if disturb:
                engine.backward(engine(X).sum())
                FailsInBackward.armed = True
                with pytest.raises(KeyError):
                    engine.backward(engine(X).sum())
                FailsInBackward.armed = False
            for _ in range(4):
                loss = engine(X).square().mean()
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            assert engine.global_steps == 2
        return found

    assert losses(True) == losses(False)


def test_a_model_belongs_to_one_engine() -> None:
    model = nn.Linear(4, 2)
    with engine_of(model):
        pass
    with pytest.raises(trainer.ConfigError, match="build the model anew"):
        trainer.initialize(model=model, config=config_of())


def test_double_precision_is_refused() -> None:
    with pytest.raises(trainer.ConfigError, match="float64"):
        trainer.initialize(model=nn.Linear(4, 2).double(), config=config_of())


class Side(nn.Module):
    """What it computes reaches its caller by an attribute of something else only."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), seen
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> None:
        self.seen.append(self.linear(x) * self.scale)


def test_a_module_without_an_output_to_watch_stays_gathered_until_backward_is_over() -> None:
    seen: list[torch.Tensor] = []
    model = Side(seen)
    with engine_of(model) as engine:
        for _ in range(2):
            engine(X)
            assert engine.params.live_numel == 4
            engine.backward(seen.pop().square().sum())
            assert engine.params.live_numel == 0
            engine.step()


def test_a_frozen_model_is_released_although_gradients_are_enabled() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    with engine_of(model) as engine:
        engine(X)
        assert engine.params.live_numel == 0
