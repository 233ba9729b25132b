"""Configuration of a rank: DeepSpeed's JSON, read strictly, plus where the daemon is.

`load_config` is called once by `trainer.initialize` (and by `zero.Init`); everything else receives a frozen part of
the tree. It never looks at the model, the environment or the network.
"""

from trainer.config.base import ConfigError
from trainer.config.load import AutoReplacement, load_config, resolve_batch
from trainer.config.offload import AioConfig, OffloaddConfig, OffloadOptimizerConfig, OffloadParamConfig
from trainer.config.tree import BatchSizes, OptimizerConfig, TrainerConfig
from trainer.config.zero import ZeroConfig

__all__ = [
    "AioConfig",
    "AutoReplacement",
    "BatchSizes",
    "ConfigError",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OffloaddConfig",
    "OptimizerConfig",
    "TrainerConfig",
    "ZeroConfig",
    "load_config",
    "resolve_batch",
]
