"""What a training script can meet from this package. Raised here, caught by callers."""

from __future__ import annotations


class UsageError(RuntimeError):
    """Something was asked for at the wrong time or place. Says what to do instead."""


class ParameterNotGathered(UsageError):
    """A parameter's values were used while only this rank's shard of them exists."""


class CollectiveError(RuntimeError):
    """Ranks did not meet: one died, one was late, or they wanted different things. Names what was waited for."""


class RanksDisagree(RuntimeError):
    """Ranks were started with different models or configurations. Names the first difference."""
