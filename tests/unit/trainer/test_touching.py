"""Every way in which scripts touch a partitioned parameter: it means what it says, or one sentence refuses it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import trainer
from tests.numerics.parity.cells import same_bits
from tests.unit.trainer.making import engine_of
from trainer.zero import GatheredParameters, ParameterNotGathered, UsageError

X = torch.linspace(-1, 1, 8).reshape(2, 4)
ONES = torch.ones(3, 4)
WAYS = {"released": 0, "kept": 10**6}
"""Persistence thresholds: a parameter that stays gathered is touched like any other."""


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def step(engine: trainer.Engine) -> None:
    engine.backward(engine(X).square().mean())
    engine.step()


def values(model: nn.Module) -> list[torch.Tensor]:
    with GatheredParameters(model):
        return [param.detach().clone() for param in model.parameters()]


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def engine(request: pytest.FixtureRequest) -> Iterator[trainer.Engine]:
    """One whose first step is taken; at the end its values are those of an engine that nobody touched."""
    zero = {"stage3_param_persistence_threshold": request.param}
    with engine_of(net(), zero) as other:
        step(other)
        step(other)
        expected = values(other.module)
    with engine_of(net(), zero) as made:
        step(made)
        yield made
        step(made)
        assert [same_bits(a, b) for a, b in zip(values(made.module), expected, strict=True)] == [True] * 4
        assert made.backends.param.statistics()["open_leases"] == 0


Use = Callable[[Any, Any], Any]
"""Of a model and its first weight."""


@torch.no_grad()
def touch(use: Use, engine: trainer.Engine) -> Any:
    return use(engine.module, engine.module[0].weight)  # type: ignore[index]


def _reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def _assign(target: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(target, name, value)


VALUES: dict[str, Use] = {
    "data": lambda m, p: p.data,
    "data =": lambda m, p: _assign(p, data=ONES),
    "data.fill_": lambda m, p: p.data.fill_(1),
    "transpose": lambda m, p: p.T,
    "equal": lambda m, p: p == p,
    "less": lambda m, p: p < 1,
    "truth": lambda m, p: bool(p),
    "float": lambda m, p: float(p),
    "add": lambda m, p: p + 1,
    "reversed subtract": lambda m, p: 1 - p,
    "NumPy's subtract": lambda m, p: np.ones((3, 4), np.float32) - p,
    "add in place": lambda m, p: p.__iadd__(1),
    "clamp_": lambda m, p: p.clamp_(-1, 1),
    "copy_": lambda m, p: p.copy_(ONES),
    "set_": lambda m, p: p.set_(ONES),
    "out=": lambda m, p: torch.add(ONES, 1, out=p),
    "where": lambda m, p: torch.where(ONES > 0, ONES, p),
    "index": lambda m, p: p[0, 0],
    "index assignment": lambda m, p: p.__setitem__(0, 1.0),
    "iteration": lambda m, p: list(p),
    "numpy": lambda m, p: p.numpy(),
    "numpy by force": lambda m, p: p.numpy(force=True),
    "asarray": lambda m, p: np.asarray(p),
    "tolist": lambda m, p: p.tolist(),
    "item": lambda m, p: p.item(),
    "format": lambda m, p: f"{p:.2f}",
    "dlpack": lambda m, p: torch.from_dlpack(p),
    "storage": lambda m, p: p.untyped_storage(),
    "foreach": lambda m, p: torch._foreach_add_([p], 1.0),
    "save": lambda m, p: torch.save(p, io.BytesIO()),
    "pickle": lambda m, p: pickle.dumps(p),
    "copy": lambda m, p: copy.copy(p),
    "deepcopy": lambda m, p: copy.deepcopy(p),
    "deepcopy of the model": lambda m, p: copy.deepcopy(m),
    "averaged model": lambda m, p: torch.optim.swa_utils.AveragedModel(m),
    "state_dict": lambda m, p: m.state_dict(),
    "to dtype": lambda m, p: p.to(torch.float64),
    "half of the model": lambda m, p: m.half(),
    "to cpu of the model": lambda m, p: m.to("cpu"),
    "share_memory of the model": lambda m, p: m.share_memory(),
    "init": lambda m, p: nn.init.normal_(p),
    "init of a kind": lambda m, p: nn.init.xavier_uniform_(p),
    "apply": lambda m, p: m.apply(_reset),
    "parameters_to_vector": lambda m, p: nn.utils.parameters_to_vector(m.parameters()),
    "vector_to_parameters": lambda m, p: nn.utils.vector_to_parameters(torch.ones(23), m.parameters()),
    "new parameter of it": lambda m, p: nn.Parameter(p),
    "weight_norm": lambda m, p: parametrizations.weight_norm(m[0]),
    "a parametrization": lambda m, p: parametrize.register_parametrization(m[0], "weight", Double()),
    "spectral_norm": lambda m, p: parametrizations.spectral_norm(m[0]),
}


@pytest.mark.parametrize("use", VALUES)
def test_what_needs_values_is_refused(engine: trainer.Engine, use: str) -> None:
    with pytest.raises(ParameterNotGathered, match=r"^\S+( \.\w+)? needs the values of parameter 0\.\w+ .*Gathered"):
        touch(VALUES[use], engine)


METADATA: dict[str, tuple[Use, Any]] = {
    "shape": (lambda m, p: (tuple(p.shape), p.size(1), len(p), p.ndim, p.numel()), ((3, 4), 4, 3, 2, 12)),
    "kind": (lambda m, p: (p.dtype, p.device.type, p.itemsize), (torch.float32, "cpu", 4)),
    "autograd": (lambda m, p: (p.requires_grad, p.is_leaf, p.grad, p.grad_fn), (True, True, None, None)),
    "identity": (lambda m, p: (p in {p}, p in [p], hash(p) == id(p)), (True, True, True)),
    "print": (lambda m, p: "0.weight, shape=(3, 4), dtype=torch.float32" in f"{p}" and "0.weight" in repr(p), True),
    "count": (lambda m, p: sum(q.numel() for q in m.parameters()), 23),
    "grad = None": (lambda m, p: _assign(p, grad=None), None),
    "zero_grad": (lambda m, p: m.zero_grad(), None),
    "hook": (lambda m, p: p.register_hook(lambda grad: grad).remove(), None),
    "an attribute": (lambda m, p: _assign(p, tag=1), None),
    "frozen and thawed": (lambda m, p: p.requires_grad_(False).requires_grad_(True) is p, True),
}


@pytest.mark.parametrize("use", METADATA)
def test_metadata_is_that_of_the_whole(engine: trainer.Engine, use: str) -> None:
    act, expected = METADATA[use]
    assert touch(act, engine) == expected


def test_loading_a_state_dict_is_refused(engine: trainer.Engine) -> None:
    state = net().state_dict()
    with pytest.raises(RuntimeError, match=r"copy_ needs the values of parameter 0\.weight .*GatheredParameters"):
        engine.module.load_state_dict(state)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("save", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_pickling_the_model_is_refused(engine: trainer.Engine, save: Callable[[Any], Any], inside: bool) -> None:
    with GatheredParameters(engine.module, enabled=inside), pytest.raises(UsageError, match="save its state_dict"):
        save(engine.module)


GRADIENTS: dict[str, Use] = {
    "grad": lambda m, p: p.grad,
    "clip_grad_norm_": lambda m, p: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip_grad_value_": lambda m, p: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "zero_grad": lambda m, p: m.zero_grad(),
    "another optimizer": lambda m, p: torch.optim.SGD(m.parameters(), 0.1).step(),
    "grad =": lambda m, p: _assign(p, grad=ONES),
}


@pytest.mark.parametrize("use", GRADIENTS)
def test_gradients_between_backward_and_step_are_refused(use: str) -> None:
    with engine_of(net()) as engine:
        engine.backward(engine(X).square().mean())
        with pytest.raises(UsageError, match=r"^the gradient of parameter 0\.weight .*GatheredParameters"):
            touch(GRADIENTS[use], engine)
        engine.step()
        assert engine.global_steps == 1


CHANGED_MODELS: dict[str, tuple[Use, str]] = {
    "a parameter replaced": (lambda m, p: _assign(m[0], weight=nn.Parameter(ONES)), "parameter 0.weight was added or"),
    "a state_dict assigned": (lambda m, p: m.load_state_dict(net().state_dict(), assign=True), "parameter 0.weight "),
    "a layer replaced": (lambda m, p: _assign(m, **{"1": nn.Linear(3, 2)}), "parameter 1.weight was added or replaced"),
    "a layer added": (lambda m, p: m.append(nn.Linear(2, 2)), "parameter 2.weight was added or replaced"),
    "a parameter frozen": (lambda m, p: p.requires_grad_(False), "requires_grad of parameter 0.weight was True"),
    "the model frozen": (lambda m, p: m[0].requires_grad_(False), "requires_grad of parameter 0.weight was True"),
}


@pytest.mark.parametrize("use", CHANGED_MODELS)
def test_a_model_that_was_changed_is_refused_in_backward(use: str) -> None:
    act, sentence = CHANGED_MODELS[use]
    with engine_of(net()) as engine:
        before = values(engine.module)
        children, weight = dict(engine.module._modules), engine.module[0].weight  # type: ignore[index]
        bias = children["0"].bias  # type: ignore[union-attr]
        touch(act, engine)
        with pytest.raises(UsageError, match=sentence):
            engine.backward(engine(X).square().mean())
        engine.module._modules = children
        _assign(children["0"], weight=weight, bias=bias)
        if "assigned" in use:
            return
        engine.module.requires_grad_(True)
        assert all(same_bits(a, b) for a, b in zip(values(engine.module), before, strict=True))
        step(engine)
        assert engine.global_steps == 1


def test_thawing_a_parameter_later_is_refused() -> None:
    model = net()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr, operator]
    with engine_of(model) as engine:
        step(engine)
        model.requires_grad_(True)
        with pytest.raises(UsageError, match=r"requires_grad of parameter 0\.weight was False"):
            step(engine)


def test_freezing_between_steps_is_allowed(engine: trainer.Engine) -> None:
    engine.module.requires_grad_(False)
    engine(X)
    engine.module.requires_grad_(True)


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_a_parametrization_registered_inside_trains() -> None:
    def losses(early: bool) -> list[float]:
        model, found = net(), []
        if early:
            parametrize.register_parametrization(model[0], "weight", Double(), unsafe=True)  # type: ignore[index, arg-type]
        with engine_of(model) as engine:
            with GatheredParameters(model):
                if not early:
                    parametrize.register_parametrization(model[0], "weight", Double(), unsafe=True)  # type: ignore[index, arg-type]
            for _ in range(3):
                loss = engine(X).square().mean()
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
        return found

    assert losses(early=True) == losses(early=False)


# ---- inside GatheredParameters ---------------------------------------------------------------------------------------
EDITS: dict[str, Use] = {
    "in place": lambda m, p: p.fill_(3),
    "through data": lambda m, p: p.data.fill_(3),
    "of one element through data": lambda m, p: p.data.view(-1)[5:6].neg_(),
    "two rows exchanged": lambda m, p: p.data.copy_(p.data.flip(0)),
    "data replaced": lambda m, p: _assign(p, data=torch.full((3, 4), 3.0)),
    "data replaced by another dtype": lambda m, p: _assign(p, data=p.data.double()),
    "through NumPy": lambda m, p: p.detach().numpy().fill(3),
    "through DLPack": lambda m, p: torch.from_dlpack(p.detach()).fill_(3),
    "by load_state_dict": lambda m, p: m.load_state_dict(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).state_dict()),
    "by init": lambda m, p: nn.init.normal_(p),
    "by apply": lambda m, p: m.apply(_reset),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_without_a_modifier_rank_is_said_and_undone(engine: trainer.Engine, edit: str) -> None:
    with pytest.raises(UsageError, match=r"0\.weight was changed .*modifier_rank=0"), GatheredParameters(engine.module):
        touch(EDITS[edit], engine)


@pytest.mark.parametrize("threshold", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("edit", [name for name in EDITS if "dtype" not in name])
def test_an_edit_with_a_modifier_rank_is_kept(edit: str, threshold: int) -> None:
    with engine_of(net(), {"stage3_param_persistence_threshold": threshold}) as engine:
        with GatheredParameters(engine.module, modifier_rank=0):
            touch(EDITS[edit], engine)
            expected = [param.detach().clone() for param in engine.module.parameters()]
        assert all(same_bits(a, b) for a, b in zip(values(engine.module), expected, strict=True))
        plain = net()
        with torch.no_grad():
            for param, value in zip(plain.parameters(), expected, strict=True):
                param.copy_(value)
            assert same_bits(engine(X), plain(X))


@pytest.mark.parametrize("new", [torch.ones(1), torch.ones(4, 3), torch.ones(3, 4).double(), torch.ones(5, 4)])
def test_another_shape_or_dtype_is_refused(engine: trainer.Engine, new: torch.Tensor) -> None:
    weight = engine.module[0].weight  # type: ignore[index]
    block = GatheredParameters(engine.module, modifier_rank=0)
    with pytest.raises(UsageError, match=r"0\.weight is torch\.float\d+ of shape .*change its values only"), block:
        weight.data = new


def test_looking_is_not_changing(engine: trainer.Engine) -> None:
    with GatheredParameters(engine.module), torch.no_grad():
        weight = engine.module[0].weight  # type: ignore[index]
        weight.add_(0.0).data.mul_(1)


def test_a_change_kept_by_an_inner_block_is_not_lost_by_the_outer() -> None:
    model = net()
    with engine_of(model):
        with GatheredParameters(model), GatheredParameters(model, modifier_rank=0):
            model[0].weight.data.fill_(3)  # type: ignore[index, union-attr, operator]
        assert values(model)[0].unique().tolist() == [3]


def test_looking_inside_a_block_that_changes_is_allowed() -> None:
    model = net()
    with engine_of(model):
        with GatheredParameters(model, modifier_rank=0):
            model[0].weight.data.fill_(3)  # type: ignore[index, union-attr, operator]
            with GatheredParameters(model):
                assert model[0].weight.detach().unique().tolist() == [3]  # type: ignore[index, union-attr, operator]
        assert values(model)[0].unique().tolist() == [3]


ALIASES: dict[str, Use] = {
    "data": lambda m, p: p.data,
    "view": lambda m, p: p.view(-1)[3:],
    "state_dict": lambda m, p: m.state_dict()["0.weight"],
    "numpy": lambda m, p: torch.from_numpy(p.detach().numpy()),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_a_tensor_taken_inside_keeps_its_values(engine: trainer.Engine, alias: str) -> None:
    with GatheredParameters(engine.module):
        taken = touch(ALIASES[alias], engine)
        expected = taken.clone()
    step_of_another = net()(X).square().mean()
    step_of_another.backward()
    assert same_bits(taken, expected)
    with pytest.raises(ParameterNotGathered):
        engine.module[0].weight.sum()  # type: ignore[index]


def test_a_deep_copy_made_inside_is_an_ordinary_model(engine: trainer.Engine) -> None:
    with GatheredParameters(engine.module):
        twin = copy.deepcopy(engine.module)
        expected = engine(X)
    fetches = engine.backends.param.statistics()["fetches"]
    assert same_bits(twin(X), expected)
    twin(X).sum().backward()
    assert twin[0].weight.grad is not None  # type: ignore[index]
    assert engine.backends.param.statistics()["fetches"] == fetches
