"""The smaller top-level blocks: precision, data types, optimizer, checkpoint, and features known but not built.

A block that is not built may be present as long as it asks for nothing (enabled false, or only neutral values).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from trainer.config.base import Block, Bytes, Count

DtypeName = Literal["fp32", "fp16", "bf16"]


class Fp16Config(Block):
    """fp16: known, not built."""

    built: ClassVar[bool] = False

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0.0
    initial_scale_power: Count = 16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Count = 1
    fp16_master_weights_and_grads: bool = False


class Bf16Config(Block):
    """bf16: the model runs in bfloat16, with fp32 master weights and moments."""

    enabled: bool = False
    """Train in bfloat16; parameters are cast when the model is sharded."""
    immediate_grad_update: bool = False
    """Accepted; gradients are always accumulated right away."""
    check_grad_overflow: bool = True
    """Accepted; as in DeepSpeed's stage 3, a non-finite gradient does not skip the step. It is counted and named."""
    bf16_master_weights_and_grads: bool = False
    """Not supported yet."""
    bf16_optimizer_states: bool = False
    """Not supported yet."""


class DataTypesConfig(Block):
    """data_types."""

    grad_accum_dtype: DtypeName | None = None
    """Type in which this rank's gradients are accumulated; None: the model's."""


class OptimizerParams(Block):
    """optimizer.params, of Adam and AdamW."""

    lr: float = 1e-3
    """Learning rate."""
    betas: list[float] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    """Decay of the two moments per step."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """DeepSpeed's default. torch.optim.AdamW's is 0.01."""
    bias_correction: bool = True
    """False is not supported yet."""
    adam_w_mode: bool = True
    """For type Adam: decoupled weight decay, as DeepSpeed does unless told otherwise."""
    torch_adam: bool = False
    """Use the torch reference instead of the native kernel. Same bits, slower."""
    amsgrad: bool = False
    """Not supported yet."""
    fused: bool | None = None
    """Accepted; the update is always fused."""
    foreach: bool | None = None
    """Accepted; the update is always fused."""


class OptimizerConfig(Block):
    """optimizer."""

    type: str
    """Adam or AdamW, in any case."""
    params: OptimizerParams = OptimizerParams()
    legacy_fusion: bool = False
    """Accepted; has no effect here."""


class SchedulerConfig(Block):
    """scheduler: known, not built; pass a torch scheduler object to `initialize`."""

    built: ClassVar[bool] = False

    type: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)


class ActivationCheckpointingConfig(Block):
    """activation_checkpointing: known, not built; torch.utils.checkpoint works."""

    built: ClassVar[bool] = False

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: Count | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


class ParallelWriteConfig(Block):
    """checkpoint.parallel_write."""

    pipeline_stage: bool = False
    """Accepted; there are no checkpoints yet."""


class CheckpointWriterConfig(Block):
    """checkpoint.writer."""

    built: ClassVar[bool] = False

    type: str = "FAST"
    io_buffer_size: Bytes = 64 << 20
    io_buffer_double: bool = True
    show_statistics: bool = False
    data_parallel: str | None = None
    decoupled: bool = False
    io_multiplier: Count = 1


class CheckpointConfig(Block):
    """checkpoint."""

    tag_validation: str = "Warn"
    """Accepted; there are no checkpoints yet."""
    load_universal: bool = False
    """Not supported yet."""
    use_node_local_storage: bool = False
    """Accepted; there are no checkpoints yet."""
    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    checkpoint_serialization: bool = True
    """Accepted; there are no checkpoints yet."""
    writer: CheckpointWriterConfig | None = None


class FlopsProfilerConfig(Block):
    """flops_profiler: known, not built."""

    built: ClassVar[bool] = False

    enabled: bool = False
    profile_step: Count = 1
    module_depth: int = -1
    top_modules: Count = 1
    detailed: bool = True
    output_file: str | None = None
    recompute_fwd_factor: float = 0.0


class CommsLoggerConfig(Block):
    """comms_logger: known, not built."""

    built: ClassVar[bool] = False

    enabled: bool = False
    prof_all: bool = True
    prof_ops: list[str] = Field(default_factory=list)
    verbose: bool = False
    debug: bool = False


class MonitorConfig(Block):
    """tensorboard, wandb, csv_monitor, comet: known, not built."""

    built: ClassVar[bool] = False

    enabled: bool = False
    output_path: str | None = None
    job_name: str | None = None
    group: str | None = None
    team: str | None = None
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None
    samples_log_interval: Count = 100


class ElasticityConfig(Block):
    """elasticity: known, not built."""

    built: ClassVar[bool] = False

    enabled: bool = False
    max_train_batch_size: Count = 2000
    micro_batch_sizes: list[int] = Field(default_factory=lambda: [2, 4, 6])
    min_gpus: Count = 1
    max_gpus: Count = 10000
    min_time: Count = 0
    prefer_larger_batch: bool = True
    prefer_larger_batch_size: bool = True
    ignore_non_elastic_batch_info: bool = False
    num_gpus_per_node: Count = 1
    model_parallel_size: Count = 1
    version: float = 0.2


class SwitchConfig(Block):
    """A feature with an `enabled` switch whose other keys are not known here because it is not built."""

    built: ClassVar[bool] = False

    enabled: bool = False
