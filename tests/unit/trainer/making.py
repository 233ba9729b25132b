"""Engines for tests: one process, small tiles, slots that are poisoned when their lease ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

import trainer
from trainer.config import TrainerConfig
from trainer.swap.inprocess import InProcessBackend
from trainer.swap.select import Backends, RankPlace


def guarded(config: TrainerConfig, place: RankPlace) -> Backends:
    return Backends(InProcessBackend(tile_numel=1024, guarded=True), InProcessBackend(tile_numel=1024, guarded=True))


def config_of(zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Everything is released as soon as it can be, unless `zero` says otherwise."""
    eager = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, **eager, **(zero or {})},
        **more,
    }


@contextmanager
def engine_of(model: nn.Module, zero: dict[str, Any] | None = None, **more: Any) -> Iterator[trainer.Engine]:
    """An engine that is closed at the end."""
    arguments = {key: more.pop(key) for key in ("optimizer_object", "lr_scheduler", "model_parameters") if key in more}
    if "optimizer_object" in arguments:
        arguments["optimizer"] = arguments.pop("optimizer_object")
    engine = trainer.initialize(model=model, config=config_of(zero, **more), backends=guarded, **arguments).engine
    try:
        yield engine
    finally:
        engine.close()
