"""The whole tree, and what the parts must agree on.

Built by `trainer.config.load`. Every field has DeepSpeed 0.19's default unless its docstring says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from trainer.config import blocks
from trainer.config.base import Block, Count
from trainer.config.blocks import DtypeName, OptimizerConfig
from trainer.config.offload import AioConfig, OffloaddConfig
from trainer.config.zero import ZeroConfig, refusals

__all__ = ["BatchSizes", "OptimizerConfig", "TrainerConfig", "unsupported"]


@dataclass(frozen=True)
class BatchSizes:
    """train == micro * accumulation * world, always."""

    train: int
    micro: int
    accumulation: int


class TrainerConfig(Block):
    """The top level."""

    train_batch_size: Count | None = Field(default=None, ge=1)
    """Samples per step over all ranks: the micro-batch times accumulation times ranks. What is not given follows."""
    train_micro_batch_size_per_gpu: Count | None = Field(default=None, ge=1)
    """Samples per rank and micro-step. Give this or train_batch_size."""
    gradient_accumulation_steps: Count | None = Field(default=None, ge=1)
    """Micro-steps per step; None: what the batch sizes say, or 1."""
    gradient_clipping: float = Field(default=1.0, ge=0.0)
    """Largest gradient norm; 0 turns clipping off. 1.0 as in DeepSpeed 0.19; older releases had 0."""
    zero_optimization: ZeroConfig = ZeroConfig()
    optimizer: OptimizerConfig | None = None
    scheduler: blocks.SchedulerConfig | None = None
    fp16: blocks.Fp16Config = blocks.Fp16Config()
    bf16: blocks.Bf16Config = blocks.Bf16Config()
    data_types: blocks.DataTypesConfig = blocks.DataTypesConfig()
    communication_data_type: DtypeName | None = None
    """Type in which gradients cross ranks; None: the gradient's own."""
    offloadd: OffloaddConfig = OffloaddConfig()
    aio: AioConfig = AioConfig()
    checkpoint: blocks.CheckpointConfig = blocks.CheckpointConfig()
    steps_per_print: Count | None = None
    """Accepted; nothing is printed."""
    wall_clock_breakdown: bool = False
    """Not supported yet."""
    memory_breakdown: bool = False
    """Not supported yet."""
    dump_state: bool = False
    """Accepted; nothing is printed."""
    seed: Count | None = None
    """Accepted; seeding is the caller's business."""
    prescale_gradients: bool = False
    """Not supported yet."""
    gradient_predivide_factor: float = 1.0
    """Not supported yet."""
    sparse_gradients: bool = False
    """Not supported yet."""
    disable_allgather: bool = False
    """Accepted; has no effect at stage 3."""
    zero_allow_untested_optimizer: bool = False
    """Accepted; Adam and AdamW are what there is."""
    zero_force_ds_cpu_optimizer: bool = True
    """Accepted; the optimizer is always our own."""
    managed_gradient_accumulation: bool = True
    """False is not supported yet."""
    activation_checkpointing: blocks.ActivationCheckpointingConfig = blocks.ActivationCheckpointingConfig()
    flops_profiler: blocks.FlopsProfilerConfig = blocks.FlopsProfilerConfig()
    comms_logger: blocks.CommsLoggerConfig = blocks.CommsLoggerConfig()
    tensorboard: blocks.MonitorConfig = blocks.MonitorConfig()
    wandb: blocks.MonitorConfig = blocks.MonitorConfig()
    csv_monitor: blocks.MonitorConfig = blocks.MonitorConfig()
    comet: blocks.MonitorConfig = blocks.MonitorConfig()
    elasticity: blocks.ElasticityConfig = blocks.ElasticityConfig()
    amp: blocks.SwitchConfig = blocks.SwitchConfig()
    torch_autocast: blocks.SwitchConfig = blocks.SwitchConfig()
    data_efficiency: blocks.SwitchConfig = blocks.SwitchConfig()
    curriculum_learning: blocks.SwitchConfig = blocks.SwitchConfig()
    hybrid_engine: blocks.SwitchConfig = blocks.SwitchConfig()
    autotuning: blocks.SwitchConfig = blocks.SwitchConfig()
    nebula: blocks.SwitchConfig = blocks.SwitchConfig()
    tensor_parallel: dict[str, Any] | None = None
    """Not supported yet."""
    sequence_parallel_size: Count = 1
    """Not supported yet."""
    compile: dict[str, Any] | None = None
    """Not supported yet."""


_SWITCHES = (
    *("fp16", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet", "elasticity"),
    *("amp", "torch_autocast", "data_efficiency", "curriculum_learning", "hybrid_engine", "autotuning", "nebula"),
)

_UNBUILT: dict[str, Any] = {
    "scheduler": None,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "sparse_gradients": False,
    "managed_gradient_accumulation": True,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "activation_checkpointing": blocks.ActivationCheckpointingConfig(),
    "tensor_parallel": None,
    "sequence_parallel_size": 1,
    "compile": None,
}

_HINTS = {
    "scheduler": "; pass a torch scheduler as lr_scheduler to trainer.initialize",
    "fp16": "; use bf16",
    "activation_checkpointing": "; torch.utils.checkpoint works",
}


def unsupported(config: TrainerConfig) -> list[str]:
    """One sentence for each thing asked for that is not built."""
    found = []
    for name in _SWITCHES:
        if getattr(config, name).enabled:
            found.append(f"{name}.enabled is not supported yet{_HINTS.get(name, '')}")
    for name, neutral in _UNBUILT.items():
        if getattr(config, name) != neutral:
            found.append(f"{name} is not supported yet{_HINTS.get(name, '')}")
    for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if getattr(config.bf16, name):
            found.append(f"bf16.{name} is not supported yet")
    if config.aio.use_gds:
        found.append("aio.use_gds is not supported yet")
    if config.checkpoint.writer is not None or config.checkpoint.load_universal:
        found.append("checkpoint.writer and checkpoint.load_universal are not supported yet")
    if config.offloadd.update_in_backward and config.gradient_clipping:
        found.append(
            "offloadd.update_in_backward works without clipping only, as the norm is not known before backward is "
            f"over; set gradient_clipping to 0 instead of {config.gradient_clipping:g}"
        )
    if config.optimizer is not None:
        found += _optimizer_refusals(config.optimizer)
    return found + refusals(config.zero_optimization)


def _optimizer_refusals(optimizer: OptimizerConfig) -> list[str]:
    found = []
    if optimizer.type.lower() not in ("adam", "adamw"):
        found.append(f"optimizer.type {optimizer.type} is not supported yet; use Adam or AdamW")
    if not optimizer.params.bias_correction:
        found.append("optimizer.params.bias_correction false is not supported yet")
    if optimizer.params.amsgrad:
        found.append("optimizer.params.amsgrad is not supported yet")
    return found
