"""How a tensor is cut over ranks: a pure function of its element count and the world size.

Used by everything in `trainer.zero` and by checkpoints. Every rank holds ceil(numel / world) elements; what lies
beyond the tensor's end is zero.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One tensor over `world` ranks."""

    numel: int
    world: int

    @property
    def shard_numel(self) -> int:
        """Elements of each rank's shard, padding included."""
        return -(-self.numel // self.world)

    @property
    def padded_numel(self) -> int:
        """Elements of all shards together."""
        return self.shard_numel * self.world

    def start(self, rank: int) -> int:
        """First element of a rank's shard in the padded tensor."""
        return rank * self.shard_numel

    def logical(self, rank: int) -> int:
        """Elements of a rank's shard that belong to the tensor; the rest is padding."""
        return max(0, min(self.shard_numel, self.numel - self.start(rank)))
