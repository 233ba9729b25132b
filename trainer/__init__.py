"""A ZeRO-3 engine for PyTorch whose parameters and optimizer state may live in offloadd.

`engine, optimizer, loader, scheduler = trainer.initialize(model=model, config="ds.json")`
"""

from trainer import zero
from trainer.config import ConfigError
from trainer.engine import Engine
from trainer.initialize import Initialized, initialize
from trainer.swap.backend import SwapError

__all__ = ["ConfigError", "Engine", "Initialized", "SwapError", "initialize", "zero"]
