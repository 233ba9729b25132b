"""From what the caller gave (an optimizer object, parameter groups, or the JSON block) to Adam's param_groups.

Called by `trainer.initialize`. Refuses whatever Adam and AdamW here would not do bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trainer.config import ConfigError, OptimizerConfig

_UNBUILT = {"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False}


def groups_of(
    model: nn.Module,
    model_parameters: Iterable[Any] | None,
    optimizer: torch.optim.Optimizer | None,
    config: OptimizerConfig | None,
) -> list[dict[str, Any]]:
    """Groups with lr, betas, eps, weight_decay, adamw and params. A given optimizer's own group dicts are returned, so
    that a scheduler built over that optimizer keeps acting on what is used."""
    if optimizer is not None:
        return _of_optimizer(optimizer)
    if config is None:
        raise ConfigError("give an optimizer: a block in the configuration, or an object to trainer.initialize")
    adamw = config.type.lower() == "adamw" or config.params.adam_w_mode
    defaults = {
        "lr": config.params.lr,
        "betas": tuple(config.params.betas),
        "eps": config.params.eps,
        "weight_decay": config.params.weight_decay,
        "adamw": adamw,
    }
    given: list[Any] = list(model_parameters) if model_parameters is not None else list(model.parameters())
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [{**defaults, **group, "params": list(group["params"])} for group in groups]


def _of_optimizer(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigError(f"optimizer {type(optimizer).__name__} is not supported yet; use torch.optim.Adam or AdamW")
    if optimizer.state:
        raise ConfigError("the optimizer has taken steps already; give a fresh one")
    for group in optimizer.param_groups:
        for key, neutral in _UNBUILT.items():
            if group.get(key, neutral) != neutral:
                raise ConfigError(f"optimizer option {key} is not supported yet")
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        group["adamw"] = bool(decoupled)
    return optimizer.param_groups
