"""Finding tensors in whatever a module takes and returns.

Used by the hooks. Knows tuples, lists, dicts (and their subclasses), dataclasses, and objects that carry their fields
in `__dict__` beside a mapping, as model outputs of popular libraries do. Never calls user code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_DEPTH_MAX = 12


def tensors(tree: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in `tree`, in a fixed order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif depth >= _DEPTH_MAX or tree is None or isinstance(tree, (str, bytes, int, float, bool)):
        return
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value, depth + 1)
    elif isinstance(tree, (tuple, list, set, frozenset)):
        for value in tree:
            yield from tensors(value, depth + 1)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors(getattr(tree, field.name, None), depth + 1)


def watchable(tree: Any) -> list[torch.Tensor]:
    """Tensors that gradients will flow through, each once. A leaf is none: what flows into it ends there."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors(tree):
        if tensor.requires_grad and not tensor.is_leaf:
            found[id(tensor)] = tensor
    return list(found.values())


def replace(tree: Any, new: dict[int, torch.Tensor]) -> Any:
    """`tree` with tensors exchanged by identity, in plain tuples, lists, dicts and named tuples only; whatever else
    holds tensors is left as it is, for it may compare, hash or own them."""
    if isinstance(tree, torch.Tensor):
        return new.get(id(tree), tree)
    if type(tree) is list:
        return [replace(item, new) for item in tree]
    if type(tree) is dict:
        return {key: replace(value, new) for key, value in tree.items()}
    if type(tree) is tuple:
        return tuple(replace(item, new) for item in tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(replace(item, new) for item in tree))
    return tree


def replaceable(tree: Any) -> Iterator[torch.Tensor]:
    """Tensors that `replace` can reach."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif type(tree) is dict:
        for value in tree.values():
            yield from replaceable(value)
    elif type(tree) in (list, tuple) or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        for value in tree:
            yield from replaceable(value)
