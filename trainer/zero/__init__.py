"""ZeRO stage 3 on a CPU rank: partitioning, gathering, releasing, reducing. One file per noun.

Training scripts use `Init`, `GatheredParameters` and the errors; the engine uses the rest.
"""

from trainer.zero.errors import CollectiveError, ParameterNotGathered, RanksDisagree, UsageError
from trainer.zero.gathered import GatheredParameters
from trainer.zero.init import Init

__all__ = ["CollectiveError", "GatheredParameters", "Init", "ParameterNotGathered", "RanksDisagree", "UsageError"]
