"""How optimizer state is laid out: flat sub-groups of consecutive shards, and the tiles in which they are updated.

A pure function of parameters, groups and sizes; used by `ShardedAdam`. A 16-bit parameter has its fp32 master beside
the moments in the sub-group; an fp32 parameter's shard is the master itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from trainer.swap.backend import SwapShard, Tile
from trainer.zero.parameter import ZeroParam


@dataclass(frozen=True, eq=False)
class SubGroup:
    """Consecutive shards with equal hyper-parameters and dtype, seen as one flat tensor."""

    index: int
    group: int
    """Which of the optimizer's param_groups."""
    dtype: torch.dtype
    entries: tuple[tuple[ZeroParam, int], ...]
    """Parameters, and where their shards start in the flat tensor."""
    numel: int

    @property
    def persistent(self) -> bool:
        """Whether its parameters stay gathered between steps: all of them do, or none."""
        return self.entries[0][0].persistent

    @property
    def has_master(self) -> bool:
        """Whether an fp32 master is kept beside the parameters."""
        return self.dtype is not torch.float32


@dataclass(frozen=True, eq=False)
class Piece:
    """Where one tile of optimizer state and one tile of a parameter shard overlap."""

    zero: ZeroParam
    tile: Tile
    """Of the parameter's shard."""
    in_state: int
    """First element within the tile of optimizer state."""
    in_param: int
    """First element within the tile of the parameter's shard."""
    numel: int


@dataclass(frozen=True, eq=False)
class Work:
    """One tile of a sub-group: what is fetched, updated and stored together."""

    subgroup: SubGroup
    states: tuple[tuple[str, Tile], ...]
    """(kind, tile) of master (if any), exp_avg, exp_avg_sq: the same range of each."""
    pieces: tuple[Piece, ...]

    @cached_property
    def params(self) -> tuple[ZeroParam, ...]:
        """The parameters under it, each once."""
        return tuple(dict.fromkeys(piece.zero for piece in self.pieces))


def plan_subgroups(groups: Sequence[Sequence[ZeroParam]], numel_max: int) -> list[SubGroup]:
    """Cut each group's trainable parameters, in registration order, into sub-groups of at most `numel_max` shard
    elements. A larger single shard is a sub-group of its own; empty shards belong nowhere."""
    found: list[SubGroup] = []
    for number, group in enumerate(groups):
        entries: list[tuple[ZeroParam, int]] = []
        numel = 0
        # Persistent ones first, in sub-groups of their own: they are wanted again at once.
        ordered = sorted((z for z in group if z.trainable and z.numel), key=lambda z: (not z.persistent, z.index))
        for zero in ordered:
            size = zero.layout.shard_numel
            first = entries[0][0] if entries else zero
            differs = (zero.dtype, zero.persistent) != (first.dtype, first.persistent)
            if entries and (numel + size > numel_max or differs):
                found.append(SubGroup(len(found), number, entries[0][0].dtype, tuple(entries), numel))
                entries, numel = [], 0
            entries.append((zero, numel))
            numel += size
        if entries:
            found.append(SubGroup(len(found), number, entries[0][0].dtype, tuple(entries), numel))
    return found


def plan_work(subgroup: SubGroup, states: Sequence[tuple[str, SwapShard]]) -> list[Work]:
    """The tiles of one sub-group, in order, with the pieces of parameter shards that each covers."""
    works = []
    for number, first in enumerate(states[0][1].tiles):
        tiles = tuple((kind, shard.tiles[number]) for kind, shard in states)
        works.append(Work(subgroup, tiles, tuple(_pieces(subgroup, first.start, first.numel))))
    return works


def _pieces(subgroup: SubGroup, start: int, numel: int) -> list[Piece]:
    found = []
    for zero, offset in subgroup.entries:
        if zero.shard is None:
            raise AssertionError(f"{zero.name} has no shard yet")
        for tile in zero.shard.tiles:
            first = max(start, offset + tile.start)
            last = min(start + numel, offset + tile.start + tile.numel)
            if first < last:
                found.append(Piece(zero, tile, first - start, first - offset - tile.start, last - first))
    return found
