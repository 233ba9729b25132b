"""The zero_optimization block, and what of it is not built.

Read by `trainer.engine` and the files under `trainer.zero`. Keys that act at stages 1 and 2 only are accepted and
have no effect, so that an existing file loads.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from pydantic import Field, model_validator

from trainer.config.base import Block, Count
from trainer.config.offload import OffloadOptimizerConfig, OffloadParamConfig


class LeafModuleConfig(Block):
    """zero_optimization.leaf_module: not built; empty lists are accepted."""

    built: ClassVar[bool] = False

    classes: list[str] = Field(default_factory=list)
    names: list[str] = Field(default_factory=list)
    name_suffixes: list[str] = Field(default_factory=list)


class LoCoConfig(Block):
    """zero_optimization.zeropp_loco_param: known, not built."""

    built: ClassVar[bool] = False

    err_beta: float = 0.8
    reset_T: Count = 1024


class ZenFlowConfig(Block):
    """zero_optimization.zenflow: known, not built."""

    built: ClassVar[bool] = False

    topk_ratio: float = 0.1
    select_strategy: str = "auto"
    select_interval: int | str = "auto"
    update_interval: int | str = "auto"
    overlap_step: bool = False
    offload: bool = False
    auto_ratio: float = 0.99
    full_warm_up_rounds: Count = 0
    pt_reserved_cores_perc: float = 0.5
    steps_per_epoch: Count | None = None


class ZeroConfig(Block):
    """zero_optimization."""

    stage: Count = 0
    """Only 3 is built; DeepSpeed's default of 0 is kept so that forgetting it is an error, not a surprise."""
    offload_param: OffloadParamConfig = OffloadParamConfig()
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    sub_group_size: Count = Field(default=1_000_000_000, ge=1)
    """Upper bound on partition elements updated as one flat sub-group; a larger single shard is a group of its own."""
    reduce_bucket_size: Count = Field(default=500_000_000, ge=1)
    """Elements of gradient gathered before a reduction; a larger single gradient travels alone."""
    reduce_scatter: bool = True
    """False: all-reduce the bucket and keep a slice."""
    contiguous_gradients: bool = True
    """Accepted; gradients are always reduced from one contiguous buffer."""
    overlap_comm: bool | None = None
    """Accepted; no effect on a CPU."""
    prefetch_bucket_size: Count = Field(default=50_000_000, alias="stage3_prefetch_bucket_size")
    """Elements fetched ahead of their use; 0 turns prefetching off."""
    param_persistence_threshold: Count = Field(default=100_000, alias="stage3_param_persistence_threshold")
    """Parameters of at most this many elements stay gathered between steps."""
    model_persistence_threshold: Count = Field(default=sys.maxsize, alias="stage3_model_persistence_threshold")
    """Upper bound on the elements that stay gathered, in registration order."""
    max_live_parameters: Count = Field(default=1_000_000_000, alias="stage3_max_live_parameters")
    """Gathered elements above which nothing more is prefetched; never refuses a use."""
    max_reuse_distance: Count = Field(default=1_000_000_000, alias="stage3_max_reuse_distance")
    """A parameter used again within this many elements of parameters stays gathered; 0 releases always."""
    gather_16bit_weights_on_model_save: bool = Field(default=False, alias="stage3_gather_16bit_weights_on_model_save")
    """Accepted; there are no checkpoints yet."""
    use_all_reduce_for_fetch_params: bool = Field(default=False, alias="stage3_use_all_reduce_for_fetch_params")
    """Not supported yet."""
    allgather_sequential: bool = Field(default=False, alias="stage3_allgather_sequential")
    """Accepted; each parameter is a gather of its own here."""
    module_granularity_threshold: Count = Field(default=0, alias="stage3_module_granularity_threshold")
    """Not supported yet."""
    memory_efficient_linear: bool = True
    """Accepted; a released weight's bytes are given back whatever autograd saved of it."""
    load_from_fp32_weights: bool = True
    """Accepted; there are no checkpoints yet."""
    pipeline_loading_checkpoint: bool = False
    """Not supported yet."""
    override_module_apply: bool = True
    """Inside zero.Init, Module.apply sees gathered parameters and its edits are kept."""
    log_trace_cache_warnings: bool = False
    """Log each time the access trace did not match."""
    enable_sanity_checks: bool = False
    """Accepted; ranks compare what they are about to gather or reduce in any case."""
    elastic_checkpoint: bool = False
    """Not supported yet."""
    zenflow: ZenFlowConfig | None = None
    zero_hpz_partition_size: Count = 1
    """Not supported yet."""
    zero_quantized_weights: bool = False
    """Not supported yet."""
    zero_quantized_nontrainable_weights: bool = False
    """Not supported yet."""
    zero_quantized_gradients: bool = False
    """Not supported yet."""
    zeropp_loco_param: LoCoConfig | None = None
    mics_shard_size: int = -1
    """Not supported yet."""
    mics_hierarchical_params_gather: bool = False
    """Not supported yet."""
    save_muon_momentum_buffer_in_memory: bool = False
    """Not supported yet."""
    leaf_module: LeafModuleConfig = LeafModuleConfig()
    allgather_partitions: bool = True
    """Accepted; acts at stages 1 and 2 only."""
    allgather_bucket_size: Count = 500_000_000
    """Accepted; acts at stages 1 and 2 only."""
    use_multi_rank_bucket_allreduce: bool = True
    """Accepted; acts at stages 1 and 2 only."""
    ignore_unused_parameters: bool = True
    """Accepted; acts at stages 1 and 2 only."""
    round_robin_gradients: bool = False
    """Accepted; acts at stages 1 and 2 only."""
    legacy_stage1: bool = False
    """Accepted; acts at stages 1 and 2 only."""
    cpu_offload: bool | None = None
    """Deprecated and refused; write offload_optimizer.device: cpu."""
    cpu_offload_param: bool | None = None
    """Deprecated and refused; write offload_param.device: cpu."""
    cpu_offload_use_pin_memory: bool | None = None
    """Deprecated and refused; write offload_param.pin_memory."""
    gather_fp16_weights_on_model_save: bool | None = Field(
        default=None, alias="stage3_gather_fp16_weights_on_model_save"
    )
    """Deprecated and refused; write stage3_gather_16bit_weights_on_model_save."""

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, raw: Any) -> Any:
        """Both spellings of one key: pydantic would call the second an unknown key."""
        if isinstance(raw, dict):
            raw = {key: value for key, value in raw.items() if value is not None or not key.startswith("offload_")}
            for name, field in cls.model_fields.items():
                if field.alias is not None and field.alias in raw and name in raw:
                    raise ValueError(f"{name} and {field.alias} are the same key; give one")
        return raw


_RENAMED = {
    "cpu_offload": "offload_optimizer.device: cpu",
    "cpu_offload_param": "offload_param.device: cpu",
    "cpu_offload_use_pin_memory": "offload_param.pin_memory",
    "gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}

_UNBUILT: dict[str, Any] = {
    "use_all_reduce_for_fetch_params": False,
    "module_granularity_threshold": 0,
    "elastic_checkpoint": False,
    "zenflow": None,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "zeropp_loco_param": None,
    "mics_shard_size": -1,
    "mics_hierarchical_params_gather": False,
    "save_muon_momentum_buffer_in_memory": False,
    "pipeline_loading_checkpoint": False,
    "leaf_module": LeafModuleConfig(),
}


def refusals(zero: ZeroConfig) -> list[str]:
    """One sentence for each key that asks for something that is not built."""
    found = []
    if zero.stage != 3:
        found.append(f"zero_optimization.stage {zero.stage} is not supported yet; set it to 3")
    for name, instead in _RENAMED.items():
        if getattr(zero, name) is not None:
            found.append(f"zero_optimization.{name} is deprecated; write {instead}")
    for name, neutral in _UNBUILT.items():
        if getattr(zero, name) != neutral:
            found.append(f"zero_optimization.{name} is not supported yet")
    if zero.offload_optimizer.super_offload:
        found.append("zero_optimization.offload_optimizer.super_offload is not supported yet")
    if zero.offload_optimizer.ratio != 1.0:
        found.append("zero_optimization.offload_optimizer.ratio below 1 is not supported yet")
    return found
