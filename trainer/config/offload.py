"""Keys that say where shards live: offload_param, offload_optimizer, aio, and our own `offloadd` block.

Read by `trainer.swap.select`. Pool sizes are accepted and passed on as hints only: the daemon sizes its own memory.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from trainer.config.base import Block, Bytes, Count

Device = Literal["none", "cpu", "nvme"]

_ENDPOINT = re.compile(r"^(unix:///\S+|grpc://(127\.0\.0\.1|localhost):\d{1,5})$")


class _Offload(Block):
    device: Device = "none"
    """Where the shards live between uses. none and cpu are both this process's memory on a CPU rank."""
    nvme_path: str | None = None
    """Directory on the NVMe drive for the private daemon's swap files. Not needed with `endpoint`."""
    endpoint: str | None = None
    """A running daemon, `unix:///path` or `grpc://127.0.0.1:port`; None starts a private one on `nvme_path`."""
    pin_memory: bool = True
    """Accepted; the daemon pins what it can."""

    @field_validator("endpoint")
    @classmethod
    def _endpoint_form(cls, value: str | None) -> str | None:
        if value is not None and _ENDPOINT.match(value) is None:
            raise ValueError(f"{value!r} is not an endpoint; write unix:///path or grpc://127.0.0.1:port")
        return value

    @model_validator(mode="after")
    def _somewhere_to_go(self) -> _Offload:
        if self.device == "nvme" and self.nvme_path is None and self.endpoint is None:
            raise ValueError("device nvme needs nvme_path (a private daemon) or endpoint (a running one)")
        if self.device != "nvme" and self.endpoint is not None:
            raise ValueError(f"endpoint is used with device nvme only, and device is {self.device}")
        return self


class OffloadParamConfig(_Offload):
    """zero_optimization.offload_param."""

    buffer_count: Count = 5
    """Hint: slots in the parameter pool."""
    buffer_size: Count = 100_000_000
    """Hint: elements per slot. A larger shard is not an error here: it moves in tiles."""
    max_in_cpu: Count = 1_000_000_000
    """Hint: elements to keep in host memory."""


class OffloadOptimizerConfig(_Offload):
    """zero_optimization.offload_optimizer."""

    buffer_count: Count = 4
    """Hint: slots in the optimizer pool."""
    pipeline_read: bool = False
    """Accepted: fetches always overlap the arithmetic, whatever this says."""
    pipeline_write: bool = False
    """Accepted: stores never wait for the disk, whatever this says."""
    pipeline: bool = False
    """Accepted; derived from the two above elsewhere."""
    fast_init: bool = False
    """Accepted; initial states are written tile by tile in any case."""
    ratio: float = Field(default=1.0, ge=0.0, le=1.0)
    """Fraction of sub-groups updated on the CPU. Only 1.0 is built."""
    super_offload: bool = False
    """Not supported yet."""
    cpuadam_cores_perc: float = Field(default=0.8, gt=0.0, le=1.0)
    """Belongs to super_offload."""


class AioConfig(Block):
    """aio: hints for a private daemon's engine, which calibrates by itself."""

    block_size: Count = 1048576
    """Bytes per device request."""
    queue_depth: Count = 8
    """Requests in flight per file."""
    intra_op_parallelism: Count = 1
    """Threads per handle elsewhere; has no effect here."""
    single_submit: bool = False
    """Has no effect here."""
    overlap_events: bool = True
    """Has no effect here."""
    use_gds: bool = False
    """Not supported yet."""


class OffloaddConfig(Block):
    """offloadd: our own block, absent from DeepSpeed."""

    job: str | None = Field(default=None, min_length=1, max_length=128)
    """Name under which state survives a restart; None: an unnamed job that leaves nothing behind."""
    host_bytes: Bytes | None = None
    """Pinned host memory to ask the daemon for, this rank's share; None: what the daemon gives."""
    swap_bytes: Bytes | None = None
    """Swap file bytes to ask for, this rank's share; None: what the shards need."""
    timeout_s: float = Field(default=60.0, gt=0.0, le=604800.0)
    """Longest wait, in seconds, for the daemon or for another rank in one collective; a week at most."""
    token_file: str | None = None
    """File (mode 0600) with the token a grpc:// endpoint asks for."""
    engine: Literal["auto", "liburing", "native", "threads"] = "auto"
    """I/O engine of a private daemon."""
    overlap_step: bool = True
    """With anything on nvme: the optimizer updates each parameter while the next forward runs up to it. Same bits; an
    error of the update is raised by the call that needs it."""
    update_in_backward: bool = False
    """With overlap_step and no gradient clipping: begin the update of the last layers while backward runs, as soon as
    their gradients are complete. Same bits; but learning rates must be set before engine.backward(), and a backward
    that raises leaves the engine unusable. A smaller reduce_bucket_size lets it begin earlier."""
