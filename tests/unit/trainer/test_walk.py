"""Finding and exchanging tensors in what modules take and return."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from trainer.zero import walk

Pair = namedtuple("Pair", "left right")


@dataclass
class Box:
    inside: object


T = torch.ones(2)


@pytest.mark.parametrize(
    "tree",
    [T, (T,), [1, [T]], {"a": {"b": T}}, Pair(None, T), Box(Box([T])), OrderedDict(x=T), ("text", {3: (T, None)}), {T}],
)
def test_a_tensor_is_found_wherever_it_is(tree: object) -> None:
    assert [tensor is T for tensor in walk.tensors(tree)] == [True]


@pytest.mark.parametrize("tree", [None, "text", 3, [], {}, Box(None), Box])
def test_nothing_is_found_where_nothing_is(tree: object) -> None:
    assert list(walk.tensors(tree)) == []


def test_a_structure_that_contains_itself_ends() -> None:
    endless: list[object] = [T]
    endless.append(endless)
    assert all(tensor is T for tensor in walk.tensors(endless))


def test_only_what_gradients_flow_through_is_watchable() -> None:
    leaf = torch.ones(2, requires_grad=True)
    result = leaf * 2
    assert [t is result for t in walk.watchable((leaf, result, [result], torch.ones(2)))] == [True]


def test_replace_keeps_the_structure_and_the_identity_of_repeats() -> None:
    new = torch.zeros(2)
    pair, listed, mapped = walk.replace((Pair(T, 1), [T], {"k": T}), {id(T): new})
    assert pair == Pair(new, 1) or (pair.left is new and pair.right == 1)
    assert type(pair) is Pair
    assert listed[0] is new
    assert mapped["k"] is new


def test_replace_leaves_objects_it_does_not_know_alone() -> None:
    box = Box(T)
    assert walk.replace(box, {id(T): torch.zeros(2)}) is box
