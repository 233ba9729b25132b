"""Steps in which things go wrong and are tried again give the bits of those in which nothing did."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import trainer
from tests.daemon import running
from tests.numerics.parity.cells import ENDPOINT_VARIABLE, WAYS, Cell, Record, build, config_of, tensors_of
from tests.numerics.parity.zoo import batch
from trainer.zero import GatheredParameters

MODELS = ["plain", "tied", "twice", "checkpoint"]
STEPS = 5
MISHAPS = ["forward raises", "loss is dropped", "evaluation", "look"]
"""Before a micro-step; beside a backward that raises."""


class MishapError(Exception):
    """Of the user's own making."""


class Saboteur:
    """Hooks on every leaf; the armed one raises in forward or in backward."""

    def __init__(self, model: nn.Module, rng: random.Random) -> None:
        self._rng = rng
        self._armed: tuple[nn.Module | None, str] = (None, "")
        self._leaves = [module for module in model.modules() if not list(module.children())]
        for module in self._leaves:
            module.register_forward_hook(self._ran)

    def arm(self, when: str) -> None:
        self._armed = (self._rng.choice(self._leaves), when)

    def disarm(self) -> None:
        self._armed = (None, "")

    def _ran(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        if self._armed == (module, "forward"):
            raise MishapError
        if self._armed == (module, "backward") and output.requires_grad:
            output.register_hook(self._raise)

    def _raise(self, grad: torch.Tensor) -> None:
        if self._armed[1] == "backward":
            raise MishapError


def suffer(engine: trainer.Engine, saboteur: Saboteur, mishap: str, inputs: tuple[torch.Tensor, ...]) -> None:
    """What must leave no trace."""
    if mishap == "forward raises":
        saboteur.arm("forward")
        with pytest.raises(MishapError):
            engine(*inputs)
        saboteur.disarm()
    elif mishap == "loss is dropped":
        engine(*inputs)
    elif mishap == "evaluation":
        with torch.no_grad():
            engine.eval()(*inputs)
        engine.train()
    else:
        with GatheredParameters(engine.parameters()):
            assert all(param.isfinite().all() for param in engine.parameters())


def train(cell: Cell, way: str, seed: int | None = None) -> tuple[Record, int]:
    """`seed`: of the mishaps; None: there are none. Returns how many backwards raised, too."""
    chosen, record, raised = WAYS[way], Record(), 0
    rng = random.Random(seed)
    model = build(cell)
    engine, optimizer, _, _ = trainer.initialize(model=model, config=config_of(cell, chosen), backends=chosen.backends)
    saboteur = Saboteur(model, rng)
    step = micro = 0
    while step < STEPS:
        inputs = batch(step, micro, 0, torch.float32)
        if seed is not None:
            for mishap in rng.sample(MISHAPS, rng.choice([0, 0, 1, 2])):
                suffer(engine, saboteur, mishap, inputs)
            if rng.random() < 0.3:
                saboteur.arm("backward")
        loss = engine(*inputs)
        try:
            engine.backward(loss)
        except MishapError:
            # What the step had accumulated is gone with it.
            del record.losses[len(record.losses) - micro :]
            micro, raised = 0, raised + 1
            continue
        finally:
            saboteur.disarm()
        record.losses.append(loss.item())
        engine.step()
        micro = (micro + 1) % cell.accumulation
        if not micro:
            record.norms.append(float(engine.get_global_grad_norm() or 0.0))
            step += 1
    record.tensors = tensors_of(engine, optimizer)
    for backend in engine.backends.each():
        assert backend.statistics().get("open_leases", 0) == 0
    engine.close()
    return record, raised


@pytest.fixture(scope="module")
def daemon_at() -> Iterator[str]:
    with running() as daemon:
        yield daemon.endpoint


SHORT = {("plain", 2, "eager"), ("tied", 4, "nvme_both"), ("twice", 1, "mixed"), ("checkpoint", 2, "nvme_both")}


def cases() -> Iterator[object]:
    for case in itertools.product(MODELS, [1, 2, 4], ["eager", "mixed", "nvme_both"]):
        yield pytest.param(*case, marks=[] if case in SHORT else [pytest.mark.full])


@pytest.mark.parametrize(("model", "accumulation", "way"), list(cases()))
def test_mishaps_leave_no_trace(
    model: str, accumulation: int, way: str, daemon_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT_VARIABLE, daemon_at)
    cell = Cell(model, accumulation)
    smooth, _ = train(cell, way)
    raised = 0
    for seed in range(3):
        rough, count = train(cell, way, seed)
        assert rough.differences(smooth) == [], seed
        raised += count
    assert raised
