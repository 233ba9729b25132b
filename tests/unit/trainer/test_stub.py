"""A parameter that is not gathered: metadata answers, values do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.trainer.making import engine_of
from trainer.zero import GatheredParameters, ParameterNotGathered


@pytest.fixture
def param() -> nn.Parameter:
    model = nn.Sequential(nn.Linear(4, 3))
    with engine_of(model):
        yield model[0].weight


def test_metadata_is_that_of_the_whole_parameter(param: nn.Parameter) -> None:
    assert param.shape == (3, 4)
    assert param.size() == (3, 4)
    assert param.size(-1) == 4
    assert (param.ndim, param.dim(), param.numel(), len(param)) == (2, 2, 12, 3)
    assert (param.dtype, param.device.type, param.requires_grad, param.grad) == (torch.float32, "cpu", True, None)
    assert isinstance(param, nn.Parameter)
    assert "0.weight" in repr(param)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p + 1,
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p.tolist(),
        lambda p: F.linear(torch.ones(1, 4), p),
        lambda p: torch.cat([p, p]),
        lambda p: p.add_(1),
        lambda p: p.copy_(torch.ones(3, 4)),
        lambda p: p.data_ptr(),
        lambda p: p[0],
        lambda p: torch.ones(3, 4) * p,
        lambda p: nn.init.zeros_(p),
    ],
)
def test_values_are_refused_with_name_shape_and_remedy(param: nn.Parameter, use: object) -> None:
    with pytest.raises(ParameterNotGathered, match=r"0\.weight of shape \(3, 4\).*GatheredParameters"):
        use(param)  # type: ignore[operator]


def test_a_gathered_parameter_is_an_ordinary_one(param: nn.Parameter) -> None:
    with GatheredParameters(param):
        assert type(param) is nn.Parameter
        assert (param + 1).shape == (3, 4)


def test_a_state_dict_of_stubs_is_refused() -> None:
    model = nn.Linear(4, 3)
    with engine_of(model), pytest.raises(ParameterNotGathered):
        model.state_dict()
