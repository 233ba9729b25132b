"""How tensors are cut over ranks, gradients into buckets, shards into sub-groups and tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.optim.subgroups import plan_subgroups, plan_work
from trainer.swap.backend import SwapSpec
from trainer.swap.inprocess import InProcessBackend
from trainer.zero.buckets import plan_buckets
from trainer.zero.layout import ShardLayout
from trainer.zero.parameter import ZeroParam


def zeros_of(*numels: int, world: int = 1, dtype: torch.dtype = torch.float32) -> list[ZeroParam]:
    found = []
    for index, numel in enumerate(numels):
        zero = ZeroParam(nn.Parameter(torch.zeros(numel, dtype=dtype)), f"p{index}", world)
        zero.index = index
        found.append(zero)
    return found


@given(st.integers(0, 10_000), st.integers(1, 16))
def test_shards_cover_a_tensor_once_and_padding_is_less_than_the_world(numel: int, world: int) -> None:
    layout = ShardLayout(numel, world)
    assert sum(layout.logical(rank) for rank in range(world)) == numel
    assert 0 <= layout.padded_numel - numel < world
    assert all(0 <= layout.logical(rank) <= layout.shard_numel for rank in range(world))


def test_buckets_hold_the_last_parameters_first() -> None:
    params = zeros_of(10, 20, 30, 40)
    buckets = plan_buckets(params, 60, None)
    assert [[entry.zero.name for entry in bucket.entries] for bucket in buckets] == [["p3"], ["p2", "p1", "p0"]]


def test_a_parameter_larger_than_the_bucket_travels_alone() -> None:
    buckets = plan_buckets(zeros_of(5, 500, 5), 100, None)
    assert [len(bucket.entries) for bucket in buckets] == [1, 1, 1]


def test_buckets_of_different_types_do_not_mix() -> None:
    mixed = [*zeros_of(4), *zeros_of(4, dtype=torch.bfloat16)]
    assert [bucket.dtype for bucket in plan_buckets(mixed, 100, None)] == [torch.bfloat16, torch.float32]
    assert [bucket.dtype for bucket in plan_buckets(mixed, 100, torch.float32)] == [torch.float32]


def test_frozen_and_empty_parameters_are_in_no_bucket() -> None:
    params = zeros_of(4, 0, 4)
    params[0].trainable = False
    assert [entry.zero.name for bucket in plan_buckets(params, 100, None) for entry in bucket.entries] == ["p2"]


def test_sub_groups_are_consecutive_and_bounded_in_shard_elements() -> None:
    groups = plan_subgroups([zeros_of(100, 100, 900, 60, world=2)], 120)
    assert [[zero.name for zero, _ in group.entries] for group in groups] == [["p0", "p1"], ["p2"], ["p3"]]
    assert [group.numel for group in groups] == [100, 450, 30]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_cover_every_parameter_tile_exactly_once(dtype: torch.dtype) -> None:
    params = zeros_of(3000, 1, 1024, 5000, 7, dtype=dtype)
    param_backend, state_backend = InProcessBackend(tile_numel=1024), InProcessBackend(tile_numel=2048)
    for zero in params:
        (zero.shard,) = param_backend.register([SwapSpec(zero.name, zero.numel, dtype, "param")])
    (group,) = plan_subgroups([params], 10**6)
    states = state_backend.register([SwapSpec(kind, group.numel, torch.float32, kind) for kind in ("a", "b", "c")])
    covered = {zero: torch.zeros(zero.numel, dtype=torch.int32) for zero in params}
    for work in plan_work(group, list(zip("abc", states, strict=True))):
        for piece in work.pieces:
            start = piece.tile.start + piece.in_param
            covered[piece.zero][start : start + piece.numel] += 1
    assert all(torch.equal(seen, torch.ones_like(seen)) for seen in covered.values())
