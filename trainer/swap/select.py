"""From configuration to backends: {none, cpu, nvme} for parameters x {none, cpu, nvme} for the optimizer.

Called by `trainer.initialize`. The daemon's client is imported only when a device is nvme, and one connection serves
both sides when they name the same daemon. Everything above sees `SwapBackend` and cannot tell which one runs.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config import OffloadOptimizerConfig, OffloadParamConfig, TrainerConfig
from trainer.swap.backend import SwapBackend
from trainer.swap.inprocess import InProcessBackend

if TYPE_CHECKING:
    from trainer.swap.daemon import DaemonBackend


@dataclass(frozen=True)
class RankPlace:
    """Which rank this is, in the job and on its node."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @classmethod
    def current(cls, rank: int, world: int) -> RankPlace:
        """torchrun says the local part in the environment; without it all ranks are on this node."""
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return cls(rank, world, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", world)))


@dataclass(frozen=True)
class Backends:
    """Where parameter shards and optimizer shards live; the same object when one daemon serves both."""

    param: SwapBackend
    optimizer: SwapBackend

    def each(self) -> list[SwapBackend]:
        """Every distinct backend."""
        return [self.param] if self.param is self.optimizer else [self.param, self.optimizer]

    def close(self) -> None:
        """Give everything back; the second one too when the first cannot."""
        with contextlib.ExitStack() as stack:
            for backend in self.each():
                stack.callback(backend.close)


def select_backends(config: TrainerConfig, place: RankPlace) -> Backends:
    """Build the backends that the two offload blocks ask for."""
    param, optimizer = config.zero_optimization.offload_param, config.zero_optimization.offload_optimizer
    if param.device == "nvme" and optimizer.device == "nvme" and _same_daemon(param, optimizer):
        shared = _connect(param, config, place)
        return Backends(shared, shared)
    first = _one(param, config, place)
    try:
        return Backends(first, _one(optimizer, config, place))
    except BaseException:
        first.close()
        raise


def _same_daemon(param: OffloadParamConfig, optimizer: OffloadOptimizerConfig) -> bool:
    """A path says nothing where an endpoint is given."""
    if param.endpoint or optimizer.endpoint:
        return param.endpoint == optimizer.endpoint
    return param.nvme_path == optimizer.nvme_path


def _one(block: OffloadParamConfig | OffloadOptimizerConfig, config: TrainerConfig, place: RankPlace) -> SwapBackend:
    return _connect(block, config, place) if block.device == "nvme" else InProcessBackend()


def _connect(
    block: OffloadParamConfig | OffloadOptimizerConfig, config: TrainerConfig, place: RankPlace
) -> DaemonBackend:
    # Imported here: a rank that offloads nothing must not need the daemon's client to be importable.
    from trainer.swap.daemon import DaemonBackend

    ours = config.offloadd
    return DaemonBackend.connect(
        block.endpoint,
        job=ours.job,
        rank=place.rank,
        world=place.world,
        local_rank=place.local_rank,
        local_world=place.local_world,
        nvme_path=block.nvme_path,
        host_bytes=ours.host_bytes,
        swap_bytes=ours.swap_bytes,
        timeout_s=ours.timeout_s,
        token_file=ours.token_file,
        engine=ours.engine,
    )
