"""When to fetch ahead and when to keep: decisions only, on what the trace expects.

Called by the coordinator, which carries them out. Never moves a byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import ZeroConfig
from trainer.zero.parameter import ParamState, ZeroParam
from trainer.zero.trace import Trace


@dataclass(frozen=True)
class Policy:
    """The four limits, all in elements."""

    prefetch_bucket: int
    max_live: int
    max_reuse_distance: int

    @classmethod
    def of(cls, config: ZeroConfig) -> Policy:
        """From the configuration."""
        return cls(config.prefetch_bucket_size, config.max_live_parameters, config.max_reuse_distance)

    def prefetch(self, trace: Trace, live: int) -> list[ZeroParam]:
        """Parameters to start fetching now, in the order of their use. May exceed the bucket by one parameter.

        One that is gathered already is counted on: it is marked to stay until the use that was looked at, because a
        later demand for it would have to wait behind what is fetched ahead here. Where nothing may stay (a reuse
        distance of 0), looking ahead ends there instead."""
        limit = min(self.max_live - live, self.prefetch_bucket)
        chosen: dict[ZeroParam, None] = {}
        ahead = 0
        for offset, event in enumerate(trace.upcoming()):
            if ahead >= limit:
                break
            for zero in event.params:
                if zero.persistent or zero in chosen:
                    continue
                if zero.state is ParamState.AVAILABLE:
                    if self.max_reuse_distance == 0:
                        return list(chosen)
                    zero.kept_until = max(zero.kept_until, trace.position + offset)
                ahead += zero.numel
                if zero.state is ParamState.NOT_AVAILABLE:
                    chosen[zero] = None
                if ahead >= limit:
                    break
        return list(chosen)

    def keep(self, trace: Trace, zero: ZeroParam, live: int) -> bool:
        """Whether a parameter nobody uses right now stays gathered."""
        if zero.persistent or (trace.matching and zero.kept_until >= trace.position):
            return True
        if self.max_reuse_distance == 0 or live > self.max_live:
            return False
        return trace.reuse_distance(zero, self.max_reuse_distance) <= self.max_reuse_distance
