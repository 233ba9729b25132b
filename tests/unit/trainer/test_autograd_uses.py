"""What scripts do with autograd around the engine: the bits are those of the same script without it, or it is refused.

The other side is a plain module with autograd's own `.grad`, updated by the engine's Adam in plain torch, whose
roundings are not those of torch.optim.AdamW; how far that is away is looked at in tests/numerics/parity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trainer
from tests.numerics.parity.cells import same_bits
from tests.unit.trainer.making import engine_of
from trainer.optim.hyper import hyper_of
from trainer.optim.reference import adam_reference
from trainer.zero import GatheredParameters, UsageError

ADAM: dict[str, Any] = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
HYPER = {**ADAM, "adamw": True}
ACCUMULATION = 2


def data(number: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(number))


class Net(nn.Module):
    """Layers that save their weights, views of them, or nothing; raises when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act, self.last = nn.Linear(6, 9), nn.LayerNorm(9), nn.PReLU(), nn.Linear(9, 2)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        hidden = self.act(self.norm(self.first(x)))
        if fail:
            raise KeyError("user code")
        return self.last(hidden)


class Unseen(nn.Module):
    """A part whose results leave it past its return value, so that nothing announces its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = Part(), nn.Linear(9, 2)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        result: list[torch.Tensor] = []
        self.part(x, Out(result))
        if fail:
            raise KeyError("user code")
        return self.last(result[0].tanh())


class Out:
    def __init__(self, into: list[torch.Tensor]) -> None:
        self.into = into


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(6, 9)), nn.Parameter(torch.ones(9))

    def forward(self, x: torch.Tensor, out: Out) -> None:
        out.into.append((x @ self.weight).square() * self.scale)


class Plain:
    """The engine's interface over a plain module."""

    def __init__(self, module: nn.Module, accumulation: int) -> None:
        self.module, self.accumulation, self.micro, self.steps = module, accumulation, 0, 0
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in module.parameters()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        (loss / self.accumulation if self.accumulation > 1 else loss).backward(retain_graph=retain_graph)
        self.micro += 1

    @torch.no_grad()
    def step(self) -> None:
        if self.micro == 0 or self.micro % self.accumulation:
            return
        self.micro, self.steps = 0, self.steps + 1
        for param, moments in zip(self.module.parameters(), self.moments, strict=True):
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            adam_reference(param, *moments, grad, None, hyper_of(HYPER, self.steps, 1.0))
            param.grad = None

    def train(self, mode: bool = True) -> Plain:
        self.module.train(mode)
        return self

    def eval(self) -> Plain:
        return self.train(False)


def engine(model: nn.Module, accumulation: int, zero: dict[str, Any]) -> Any:
    optimizer = {"type": "AdamW", "params": ADAM}
    more = {"optimizer": optimizer, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0.0}
    return engine_of(model, zero, **more)


def full_step(run: Any, number: int) -> None:
    for micro in range(ACCUMULATION):
        run.backward(run(data(100 * number + micro)).square().mean())
        run.step()


def finish(run: Any) -> None:
    """To the end of the step that has begun."""
    while True:
        before = getattr(run, "global_steps", getattr(run, "steps", 0))
        run.backward(run(data(7)).square().mean())
        run.step()
        if getattr(run, "global_steps", getattr(run, "steps", 0)) != before:
            return


# ---- uses that are right ------------------------------------------------------------------------------------
# Each is a part of a step or a whole one; returns what it saw.
def the_same_graph_twice(run: Any) -> Any:
    loss = run(data(1)).square().mean()
    run.backward(loss, retain_graph=True)
    run.step()
    run.backward(loss)
    run.step()


def two_losses_of_one_forward_one_after_the_other(run: Any) -> Any:
    out = run(data(1))
    run.backward(out.square().mean(), retain_graph=True)
    run.backward(out.abs().sum())
    run.step()


def two_losses_of_one_forward_summed(run: Any) -> Any:
    out = run(data(1))
    run.backward(out.square().mean() + out.abs().sum())
    finish(run)


def two_forwards_then_one_backward(run: Any) -> Any:
    run.backward(run(data(1)).square().mean() + run(data(2)).abs().sum())
    finish(run)


def two_forwards_then_two_backwards(run: Any) -> Any:
    first, second = run(data(1)).square().mean(), run(data(2)).abs().sum()
    run.backward(first)
    run.step()
    run.backward(second)
    run.step()


def two_forwards_then_two_backwards_the_other_way_round(run: Any) -> Any:
    first, second = run(data(1)).square().mean(), run(data(2)).abs().sum()
    run.backward(second)
    run.backward(first)
    run.step()


def gradients_of_inputs(run: Any) -> Any:
    x = data(1).requires_grad_()
    (grad,) = torch.autograd.grad(run(x).square().sum(), x)
    full_step(run, 1)
    return [grad]


def gradients_of_inputs_and_then_backward(run: Any) -> Any:
    x = data(1).requires_grad_()
    loss = run(x).square().sum()
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    run.backward(loss)
    finish(run)
    return [grad, x.grad]


def gradients_of_parameters(run: Any) -> Any:
    params = list(run.module.parameters())
    with GatheredParameters(params):
        grads = torch.autograd.grad(run(data(1)).square().sum(), params)
    full_step(run, 1)
    return list(grads)


def gradients_of_inputs_in_evaluation(run: Any) -> Any:
    full_step(run, 1)
    x = data(1).requires_grad_()
    (grad,) = torch.autograd.grad(run.eval()(x).square().sum(), x)
    run.train()
    return [grad]


def a_gradient_penalty(run: Any) -> Any:
    x = data(1).requires_grad_()
    out = run(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    run.backward(out.square().mean() + (grad.norm() - 1).square())
    finish(run)
    return [x.grad]


def a_gradient_penalty_through_the_same_graph_twice(run: Any) -> Any:
    x = data(1).requires_grad_()
    out = run(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    run.backward(out.square().mean() + (grad.norm() - 1).square(), retain_graph=True)
    run.backward(grad.square().sum())
    run.step()


def no_grad_between(run: Any) -> Any:
    loss = run(data(1)).square().mean()
    with torch.no_grad():
        seen = run(data(2))
    run.backward(loss)
    finish(run)
    return [seen]


def inference_mode_between(run: Any) -> Any:
    loss = run(data(1)).square().mean()
    with torch.inference_mode():
        seen = run(data(2)).tolist()
    run.backward(loss)
    finish(run)
    return [torch.tensor(seen)]


def evaluation_between(run: Any) -> Any:
    loss = run(data(1)).square().mean()
    seen = run.eval()(data(2)).detach()
    run.train()
    run.backward(loss)
    finish(run)
    return [seen]


def training_in_evaluation_mode(run: Any) -> Any:
    run.backward(run.eval()(data(1)).square().mean())
    run.train()
    finish(run)


def step_without_backward(run: Any) -> Any:
    run.step()
    loss = run(data(1)).square().mean()
    run.step()
    run.backward(loss)
    finish(run)


def a_forward_between_backward_and_step(run: Any) -> Any:
    for number in (1, 2):
        run.backward(run(data(number)).square().mean())
    seen = run(data(3)).detach()
    run.step()
    return [seen]


def a_forward_that_raised(run: Any) -> Any:
    with pytest.raises(KeyError, match="user code"):
        run(data(2), fail=True)
    full_step(run, 1)


def a_forward_that_raised_after_one_that_did_not(run: Any) -> Any:
    loss = run(data(1)).square().mean()
    with pytest.raises(KeyError, match="user code"):
        run(data(2), fail=True)
    run.backward(loss)
    finish(run)


def an_evaluation_that_raised_before_backward(run: Any) -> Any:
    loss = run(data(1)).square().mean()
    with pytest.raises(KeyError, match="user code"), torch.no_grad():
        run.eval()(data(2), fail=True)
    run.train()
    run.backward(loss)
    finish(run)


def backward_under_no_grad(run: Any) -> Any:
    loss = run(data(1)).square().mean()
    with torch.no_grad() if isinstance(run, trainer.Engine) else contextlib.nullcontext():
        run.backward(loss)
    finish(run)


def a_hook_on_a_parameter(run: Any) -> Any:
    handle = next(run.module.parameters()).register_hook(lambda grad: grad * 3)
    full_step(run, 1)
    handle.remove()


ALLOWED: list[Callable[[Any], Any]] = [
    the_same_graph_twice,
    two_losses_of_one_forward_one_after_the_other,
    two_losses_of_one_forward_summed,
    two_forwards_then_one_backward,
    two_forwards_then_two_backwards,
    two_forwards_then_two_backwards_the_other_way_round,
    gradients_of_inputs,
    gradients_of_inputs_and_then_backward,
    gradients_of_parameters,
    gradients_of_inputs_in_evaluation,
    a_gradient_penalty,
    a_gradient_penalty_through_the_same_graph_twice,
    no_grad_between,
    inference_mode_between,
    evaluation_between,
    training_in_evaluation_mode,
    step_without_backward,
    a_forward_between_backward_and_step,
    a_forward_that_raised,
    a_forward_that_raised_after_one_that_did_not,
    an_evaluation_that_raised_before_backward,
    backward_under_no_grad,
    a_hook_on_a_parameter,
]
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"reduce_bucket_size": 20},
    "kept": {"stage3_param_persistence_threshold": 10, "stage3_max_reuse_distance": 10**6},
}


def trained(run: Any, use: Callable[[Any], Any]) -> list[torch.Tensor]:
    """What two uses with a step before and after them see and leave."""
    full_step(run, 9)
    seen = [tensor for _ in range(2) for tensor in use(run) or []]
    full_step(run, 10)
    with GatheredParameters(run.module):
        return seen + [param.detach().clone() for param in run.module.parameters()]


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def assert_nothing_is_held(run: trainer.Engine) -> None:
    assert all(backend.statistics()["open_leases"] == 0 for backend in run.backends.each())
    assert run.params.live_numel == sum(zero.numel for zero in run.params.params if zero.persistent)
    assert not any(zero.users or zero.blocks for zero in run.params.params)


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert [same_bits(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(theirs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Net, Unseen])
@pytest.mark.parametrize("use", ALLOWED, ids=lambda use: use.__name__)
def test_the_bits_are_those_of_plain_torch(use: Callable[[Any], Any], kind: type[nn.Module], way: str) -> None:
    expected = trained(Plain(model_of(kind), ACCUMULATION), use)
    with engine(model_of(kind), ACCUMULATION, WAYS[way]) as run:
        found = trained(run, use)
        assert_nothing_is_held(run)
    assert_same(found, expected)


# ---- uses that are refused ----------------------------------------------------------------------------------
# Each drops the step that it began.
def backward_by_the_user(run: trainer.Engine) -> None:
    run(data(1)).square().mean().backward()


def backward_through_a_freed_graph(run: trainer.Engine) -> None:
    loss = run(data(1)).square().mean()
    run.backward(loss)
    run.backward(loss)


def a_loss_without_gradient(run: trainer.Engine) -> None:
    with torch.no_grad():
        loss = run(data(1)).square().mean()
    run.backward(loss)


def a_loss_of_many_elements(run: trainer.Engine) -> None:
    run.backward(run(data(1)))


def a_loss_that_is_a_number(run: trainer.Engine) -> None:
    run.backward(run(data(1)).mean().item())  # type: ignore[arg-type]


def a_loss_of_another_model(run: trainer.Engine) -> None:
    run(data(1))
    run.backward(nn.Linear(6, 1)(data(1)).mean())


def a_loss_without_forward(run: trainer.Engine) -> None:
    run.backward(nn.Linear(6, 1)(data(1)).mean())


def a_loss_from_before_the_step(run: trainer.Engine) -> None:
    old = run(data(1)).square().mean()
    full_step(run, 10)
    run(data(1))
    run.backward(old)


def gradients_from_before_the_step(run: trainer.Engine) -> None:
    x = data(1).requires_grad_()
    old = run(x).square().mean()
    full_step(run, 10)
    torch.autograd.grad(old, x)


def gradients_of_stubs(run: trainer.Engine) -> None:
    torch.autograd.grad(run(data(1)).square().mean(), list(run.module.parameters()))


def a_loss_from_before_another_ranks_change(run: trainer.Engine) -> None:
    old = run(data(1)).square().mean()
    with GatheredParameters(run.module, modifier_rank=0):
        for param in run.module.parameters():
            param.data = param.data.clone().add_(0)
            param.data.view(-1)[0] += 1
    run.backward(old)


REFUSED: dict[Callable[[trainer.Engine], None], tuple[type[Exception], str]] = {
    backward_by_the_user: (UsageError, r"call engine\.backward\(loss\) instead of loss\.backward\(\)"),
    backward_through_a_freed_graph: (RuntimeError, "backward through the graph a second time"),
    a_loss_without_gradient: (UsageError, "this loss needs no gradient"),
    a_loss_of_many_elements: (UsageError, r"a loss of shape \(3, 2\)"),
    a_loss_that_is_a_number: (UsageError, "a loss of type float"),
    a_loss_of_another_model: (UsageError, "gave no parameter of this engine a gradient"),
    a_loss_without_forward: (UsageError, "no forward of this engine"),
    a_loss_from_before_the_step: (UsageError, "has changed since forward"),
    gradients_from_before_the_step: (UsageError, "has changed since forward"),
    gradients_of_stubs: (UsageError, "GatheredParameters"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("use", REFUSED, ids=lambda use: use.__name__)
def test_what_is_refused_leaves_a_usable_engine(use: Callable[[trainer.Engine], None], way: str) -> None:
    kind, sentence = REFUSED[use]
    plain = Plain(model_of(Net), ACCUMULATION)
    full_steps = 2 if use in (a_loss_from_before_the_step, gradients_from_before_the_step) else 1
    for _ in range(full_steps):
        full_step(plain, 10)
    with engine(model_of(Net), ACCUMULATION, WAYS[way]) as run:
        with pytest.raises(kind, match=sentence):
            use(run)
        full_step(run, 10)
        assert run.global_steps == full_steps
        assert_nothing_is_held(run)
        with GatheredParameters(run.module):
            assert_same(list(run.module.parameters()), list(plain.module.parameters()))


def test_backward_after_a_change_by_another_rank_is_refused() -> None:
    with engine(model_of(Net), 1, {}) as run, pytest.raises(UsageError, match="has changed since forward"):
        a_loss_from_before_another_ranks_change(run)


def test_unannounced_backward_after_the_step_is_refused_by_autograd() -> None:
    model = model_of(Unseen)
    with engine(model, 1, {}) as run:
        result: list[torch.Tensor] = []
        x = data(1).requires_grad_()
        model.part(x, Out(result))  # type: ignore[operator]
        run.backward(run(data(1)).square().mean())
        run.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(result[0].sum(), x)


def test_backward_after_close_is_refused() -> None:
    with engine(model_of(Net), 1, {}) as run:
        loss = run(data(1)).square().mean()
    with pytest.raises(UsageError, match="the engine was closed"):
        loss.backward()


def test_a_refused_backward_keeps_the_micro_steps_before_it() -> None:
    plain = Plain(model_of(Net), ACCUMULATION)
    full_step(plain, 10)
    with engine(model_of(Net), ACCUMULATION, {}) as run:
        run.backward(run(data(1000)).square().mean())
        with pytest.raises(UsageError):
            run(data(3)).square().mean().backward()
        run.backward(run(data(1001)).square().mean())
        run.step()
        with GatheredParameters(run.module):
            assert_same(list(run.module.parameters()), list(plain.module.parameters()))
