"""GatheredParameters outside forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.trainer.making import engine_of
from trainer.zero import GatheredParameters, ParameterNotGathered


def test_changes_are_kept_with_a_modifier_rank() -> None:
    model = nn.Linear(2, 2)
    with engine_of(model):
        with GatheredParameters(model, modifier_rank=0), torch.no_grad():
            model.weight.fill_(3.0)
        with GatheredParameters(model):
            assert model.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_changes_without_a_modifier_rank_are_an_error_and_do_not_stay() -> None:
    model = nn.Linear(2, 2)
    with engine_of(model):
        with pytest.raises(RuntimeError, match="modifier_rank=0"), GatheredParameters(model.weight), torch.no_grad():
            model.weight.fill_(3.0)
        with GatheredParameters(model):
            assert 3.0 not in model.weight.flatten().tolist()


def test_changes_to_a_parameter_that_stays_gathered_do_not_stay_either() -> None:
    model = nn.Linear(2, 2)
    with engine_of(model, {"stage3_param_persistence_threshold": 100}):
        with pytest.raises(RuntimeError, match="modifier_rank=0"), GatheredParameters(model.weight), torch.no_grad():
            model.weight.fill_(3.0)
        with GatheredParameters(model):
            assert 3.0 not in model.weight.flatten().tolist()


def test_blocks_nest_and_the_outermost_releases() -> None:
    model = nn.Linear(2, 2)
    with engine_of(model):
        with GatheredParameters(model):
            with GatheredParameters(model.weight):
                pass
            assert model.weight.sum() is not None
        with pytest.raises(ParameterNotGathered):
            model.weight.sum()


def test_the_block_releases_after_an_exception() -> None:
    model = nn.Linear(2, 2)
    with engine_of(model):
        with pytest.raises(KeyError), GatheredParameters(model):
            raise KeyError("user code")
        with pytest.raises(ParameterNotGathered):
            model.weight.sum()


def test_masters_follow_a_change_and_keep_their_bits_elsewhere() -> None:
    model = nn.Linear(2, 2, bias=False)
    with engine_of(model, bf16={"enabled": True}) as engine:
        engine.backward(engine(torch.ones(1, 2, dtype=torch.bfloat16)).sum())
        engine.step()
        ((_, before),) = engine.optimizer.shard_states()
        with GatheredParameters(model, modifier_rank=0), torch.no_grad():
            model.weight[0, 0] = 5.0
        ((_, after),) = engine.optimizer.shard_states()
        assert after["master"][0] == 5.0
        assert torch.equal(after["master"][1:], before["master"][1:])


def test_parameters_that_are_not_sharded_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    with GatheredParameters(model, modifier_rank=0), torch.no_grad():
        model.weight.zero_()
    assert model.weight.sum() == 0


def test_forward_and_backward_work_inside_a_block_and_step_does_not() -> None:
    model = nn.Linear(2, 2)
    with engine_of(model) as engine:
        with GatheredParameters(model):
            engine.backward(engine(torch.ones(1, 2)).sum())
            assert model.weight.shape == (2, 2)
            with pytest.raises(RuntimeError, match="leave the block first"):
                engine.step()
        engine.step()
        assert engine.global_steps == 1


def test_numpy_may_look_at_gathered_values() -> None:
    model = nn.Linear(2, 2)
    with engine_of(model) as engine:
        with GatheredParameters(model):
            seen = model.weight.detach().numpy()
            before = seen.copy()
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        assert (seen == before).all()
        with GatheredParameters(model, modifier_rank=0), torch.no_grad():
            model.weight.fill_(1.0)
        with GatheredParameters(model):
            assert model.weight.detach().numpy().tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_values_put_into_data_are_changes_too() -> None:
    model = nn.Linear(2, 2)
    with engine_of(model, {"stage3_param_persistence_threshold": 4}):  # the bias stays gathered
        with GatheredParameters(model):
            before = [param.detach().clone() for param in model.parameters()]
        for param in model.parameters():
            with pytest.raises(RuntimeError, match="without modifier_rank"), GatheredParameters(param):
                param.data = torch.zeros_like(param)
        with pytest.raises(RuntimeError, match="without modifier_rank"), GatheredParameters(model.bias):
            model.bias.data.fill_(3.0)
        with GatheredParameters(model):
            assert all(torch.equal(param, was) for param, was in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("persistent", [0, 100])
def test_values_of_another_shape_are_refused_and_do_not_stay(persistent: int) -> None:
    model = nn.Linear(2, 2)
    with engine_of(model, {"stage3_param_persistence_threshold": persistent}):
        with GatheredParameters(model):
            before = model.weight.detach().clone()
        refused = pytest.raises(
            RuntimeError, match=r"of shape \(3, 3\) at the end .* was torch.float32 of shape \(2, 2\)"
        )
        with refused, GatheredParameters(model.weight, modifier_rank=0):
            model.weight.data = torch.zeros(3, 3)
        with GatheredParameters(model):
            assert torch.equal(model.weight, before)
