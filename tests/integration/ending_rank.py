"""One rank of a user's script, which ends the way it is told to, where it is told to. Run by test_ranks_that_end."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainer

TASK: dict[str, Any] = json.loads(sys.argv[1])
"""`how`, `phase` and `step` of the end, if this rank has one; `rendezvous`, if the script makes the process group
itself; `config`."""
STEPS = 4


def come_to(phase: str, step: int) -> None:
    """End here, if here is where this rank ends."""
    if (phase, step) != (TASK.get("phase"), TASK.get("step")):
        return
    how = TASK["how"]
    if how == "raise":
        raise ValueError("the user's own mistake")
    if how == "exit":
        sys.exit(3)
    os.kill(os.getpid(), getattr(signal, how))


class Model(nn.Module):
    """Comes to the middle of its forward and of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.layers[:2](x)
        come_to("forward", self.step)
        step = self.step
        if half.requires_grad:
            half.register_hook(lambda _: come_to("backward", step))
        return self.layers[2:](half).square().mean()


class Schedule:
    """The user's code inside `engine.step`, where the updates of the step are under way."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def step(self) -> None:
        come_to("step", self.model.step)


def main() -> None:
    torch.set_num_threads(1)
    if "rendezvous" in TASK:
        # With torch's own bound, which is half an hour.
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=TASK["rendezvous"], rank=rank, world_size=world)
    torch.manual_seed(0)
    model = Model()
    engine = trainer.initialize(model=model, config=TASK["config"], lr_scheduler=lambda _: Schedule(model)).engine
    come_to("init", 0)
    for step in range(STEPS):
        model.step = step
        engine.backward(engine(torch.ones(1, 64)))
        engine.step()
        come_to("between", step)
    engine.close()


if __name__ == "__main__":
    main()
