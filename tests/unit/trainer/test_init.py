"""zero.Init: modules are partitioned as they are constructed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainer
from tests.unit.trainer.making import config_of, engine_of
from trainer.zero.stub import is_stub


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.partitioned_while_building = is_stub(self.first.weight)
        self.scale = nn.Parameter(torch.ones(8))
        self.last = nn.Linear(8, 4)
        self.last.weight = nn.Parameter(torch.full((4, 8), 0.5))
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.scale)


def losses(inside: bool) -> list[float]:
    torch.manual_seed(0)
    with trainer.zero.Init(enabled=inside):
        model = Net()
    found = []
    with engine_of(model) as engine:
        for _ in range(3):
            loss = engine(torch.ones(2, 4)).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
    return found


def test_a_model_made_inside_trains_as_one_made_outside() -> None:
    assert losses(inside=True) == losses(inside=False)


def test_children_are_partitioned_before_their_parent_is_finished() -> None:
    with trainer.zero.Init():
        model = Net()
    assert model.partitioned_while_building
    assert all(is_stub(param) for param in model.parameters())


def test_classes_defined_inside_take_part() -> None:
    with trainer.zero.Init():

        class Late(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3))

        assert is_stub(Late().weight)


def test_outside_construction_is_as_ever() -> None:
    with trainer.zero.Init():
        pass
    before = nn.Linear.__init__
    assert not is_stub(nn.Linear(2, 2).weight)
    assert nn.Linear.__init__ is before
    assert "__init_subclass__" not in nn.Module.__dict__


def test_edits_inside_apply_are_kept() -> None:
    with trainer.zero.Init():
        model = Net()
    with trainer.zero.GatheredParameters(model):
        assert model.first.bias.tolist() == [0.25] * 8


def test_the_configuration_says_the_dtype() -> None:
    config = config_of(bf16={"enabled": True})
    with trainer.zero.Init(config=config):
        model = Net()
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    trainer.initialize(model=model, config=config).engine.close()


def test_a_model_of_another_dtype_is_refused() -> None:
    with trainer.zero.Init():
        model = Net()
    with pytest.raises(trainer.ConfigError, match="partitioned as"):
        trainer.initialize(model=model, config=config_of(bf16={"enabled": True}))


def test_an_existing_model_can_be_partitioned() -> None:
    model = nn.Linear(3, 3)
    trainer.zero.Init(module=model)
    assert is_stub(model.weight)


def test_contexts_nest() -> None:
    with trainer.zero.Init(), trainer.zero.Init():
        model = nn.Linear(3, 3)
    assert is_stub(model.weight)
    assert not is_stub(nn.Linear(3, 3).weight)
