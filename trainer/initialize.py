"""`trainer.initialize`: from a model and a configuration to an engine. The composition root of a rank.

Everything is checked before anything is allocated; whatever was built is given back when a later part fails.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from trainer import heap
from trainer.boundary import user_facing
from trainer.config import AutoReplacement, BatchSizes, ConfigError, TrainerConfig, load_config, resolve_batch
from trainer.engine import Engine
from trainer.optim.adam import choose_update
from trainer.optim.groups import groups_of
from trainer.optim.sharded import ShardedAdam
from trainer.swap.accesslog import AccessLog
from trainer.swap.backend import SwapError
from trainer.swap.select import Backends, RankPlace, select_backends
from trainer.zero.buckets import GradReducer, plan_buckets
from trainer.zero.collectives import Collectives, default_collectives
from trainer.zero.coordinator import Coordinator
from trainer.zero.group import ensure_agreement, ensure_process_group
from trainer.zero.parameter import ParamState, ZeroParam
from trainer.zero.paramset import ParamSet, choose_persistent, collect, partition
from trainer.zero.policy import Policy

log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

BackendFactory = Callable[[TrainerConfig, RankPlace], Backends]


class Initialized(NamedTuple):
    """What `initialize` returns."""

    engine: Engine
    optimizer: ShardedAdam
    loader: DataLoader[Any] | None
    scheduler: Any


@user_facing
def initialize(
    model: nn.Module,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    backends: BackendFactory = select_backends,
) -> Initialized:
    """Shard `model` over the ranks and return `(engine, optimizer, loader, scheduler)`.

    `optimizer`: torch.optim.Adam or AdamW over the model's parameters, instead of the configuration's block.
    `lr_scheduler`: a torch scheduler over that optimizer, or a function that makes one of the engine's optimizer; the
    engine steps it after each optimizer step. `backends` replaces where shards live. Raises ConfigError,
    RanksDisagree, SwapError."""
    if config is None:
        raise ConfigError("give a configuration: a dict or the path of a JSON file")
    heap.share_one_arena()
    loaded, replaced = load_config(config)
    ensure_process_group(loaded.offloadd.timeout_s)
    collectives = default_collectives(loaded.offloadd.timeout_s)
    batch = resolve_batch(loaded, collectives.world)
    groups = groups_of(model, model_parameters, optimizer, loaded.optimizer)
    _report_auto(replaced, collectives.rank)
    ensure_agreement(collectives, _facts(model, loaded, collectives.world))

    loader = _loader(training_data, batch, collectives, collate_fn)
    zeros = _shard(model, loaded, collectives, groups)
    place = RankPlace.current(collectives.rank, collectives.world)
    chosen = backends(loaded, place)
    try:
        engine = _build(model, loaded, batch, chosen, ParamSet(collectives, zeros), groups)
    except BaseException:
        chosen.close()
        raise
    try:
        engine.lr_scheduler = _scheduler(lr_scheduler, optimizer, engine.optimizer)
    except BaseException:
        with contextlib.suppress(SwapError):  # The first error says more.
            engine.close()
        raise
    heap.give_back()
    return Initialized(engine, engine.optimizer, loader, engine.lr_scheduler)


def _build(
    model: nn.Module,
    config: TrainerConfig,
    batch: BatchSizes,
    backends: Backends,
    params: ParamSet,
    groups: list[dict[str, Any]],
) -> Engine:
    zero_config, access_log = config.zero_optimization, AccessLog()
    params.attach(backends.param, access_log)
    devices = {zero_config.offload_param.device, zero_config.offload_optimizer.device}
    torch_adam = config.optimizer is not None and config.optimizer.params.torch_adam
    optimizer = ShardedAdam(
        groups,
        sub_group_size=zero_config.sub_group_size,
        param_backend=backends.param,
        state_backend=backends.optimizer,
        log=access_log,
        update=choose_update(torch_adam),
        grad_dtype=_dtype(config.data_types.grad_accum_dtype),
        overlap=config.offloadd.overlap_step and "nvme" in devices,
        early=config.offloadd.update_in_backward,
    )
    buckets = plan_buckets(params.params, zero_config.reduce_bucket_size, _dtype(config.communication_data_type))
    watched = [zero for zero in params.params if zero.param.requires_grad]
    reducer = GradReducer(buckets, params.collectives, zero_config.reduce_scatter, watched)
    coordinator = Coordinator(params, Policy.of(zero_config), zero_config.log_trace_cache_warnings)
    return Engine(
        model, config, batch, backends, params, coordinator, reducer, optimizer, access_log, lr_scheduler=None
    )


def _shard(
    model: nn.Module, config: TrainerConfig, collectives: Collectives, groups: list[dict[str, Any]]
) -> list[ZeroParam]:
    """Give every parameter its final dtype, rank 0's values and this rank's shard."""
    dtype = torch.bfloat16 if config.bf16.enabled else None
    if dtype is not None:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
    zeros = collect(model, collectives.world, dtype)
    for buffer in model.buffers():
        same = buffer.detach().clone(memory_format=torch.contiguous_format)
        collectives.broadcast(same, 0, "the broadcast of a buffer")
        buffer.detach().copy_(same)
    optimized = {id(param) for group in groups for param in group["params"]}
    for zero in zeros:
        if not zero.dtype.is_floating_point:
            zero.trainable = False
        zero.trainable = zero.trainable and id(zero.param) in optimized
        if zero.trainable and zero.dtype not in _DTYPES.values():
            raise ConfigError(f"{zero.name} is {zero.dtype}, which is not supported yet; use fp32, bf16 or fp16")
        if zero.state is ParamState.AVAILABLE:
            partition(zero, collectives)
    strangers = optimized - {id(zero.param) for zero in zeros}
    if strangers:
        raise ConfigError("the optimizer holds a parameter that is not the model's")
    limits = config.zero_optimization
    choose_persistent(zeros, limits.param_persistence_threshold, limits.model_persistence_threshold)
    return zeros


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else _DTYPES[name]


def _facts(model: nn.Module, config: TrainerConfig, world: int) -> list[str]:
    """What must be equal on all ranks, one line each."""
    named = model.named_parameters(remove_duplicate=False)
    lines = [f"world size {world}", f"torch {torch.__version__}"]
    lines += [f"parameter {n} {tuple(p.shape)} {p.dtype} grad={p.requires_grad}" for n, p in named]
    tree = config.model_dump(exclude={"offloadd": {"token_file"}})
    return lines + [f"configuration {key} = {json.dumps(tree[key], default=str)}" for key in sorted(tree)]


def _report_auto(replaced: list[AutoReplacement], rank: int) -> None:
    if replaced and rank == 0:
        log.warning('"auto" was replaced by the default: %s', ", ".join(f"{key} = {value}" for key, value in replaced))


def _scheduler(given: Any, theirs: torch.optim.Optimizer | None, ours: ShardedAdam) -> Any:
    if given is None or hasattr(given, "step"):
        if given is not None and theirs is None:
            raise ConfigError("a scheduler object needs the optimizer it was made for; pass that too, or a function")
        if theirs is not None:
            # The scheduler watches the optimizer it was made for, whose steps are taken by ours.
            theirs._opt_called = True  # type: ignore[attr-defined]
        return given
    ours._opt_called = True  # type: ignore[attr-defined]
    return given(ours)


def _loader(
    data: Dataset[Any] | None,
    batch: BatchSizes,
    collectives: Collectives,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> DataLoader[Any] | None:
    if data is None:
        return None
    sampler: DistributedSampler[Any] | None = None
    if collectives.world > 1:
        sampler = DistributedSampler(data, collectives.world, collectives.rank)
    return DataLoader(data, batch.micro, shuffle=sampler is None, sampler=sampler, collate_fn=collate_fn)
