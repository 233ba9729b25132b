"""From a dict or a JSON file to a checked tree: duplicate keys, unknown keys, "auto", the batch triangle.

Raises `ConfigError`, one sentence, before anything is allocated. Knows nothing of the model.
"""

from __future__ import annotations

import json
import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from trainer.config.base import Block, ConfigError, nearest
from trainer.config.tree import BatchSizes, TrainerConfig, unsupported

_FORMER = {"thread_count": "intra_op_parallelism", "num_threads": "intra_op_parallelism"}
"""Names that older releases and tools gave to a key."""


class AutoReplacement(NamedTuple):
    """An "auto" and the default that stands in for it."""

    key: str
    value: Any


def load_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[TrainerConfig, list[AutoReplacement]]:
    """Read, check and freeze a configuration. Also returns what "auto" was replaced by."""
    raw = dict(source) if isinstance(source, Mapping) else _read(Path(source))
    replaced: list[AutoReplacement] = []
    cleaned = _walk(TrainerConfig, raw, "", replaced)
    try:
        config = TrainerConfig.model_validate(cleaned)
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None
    refused = unsupported(config)
    if refused:
        raise ConfigError(refused[0])
    return config, replaced


def resolve_batch(config: TrainerConfig, world: int) -> BatchSizes:
    """Complete train = micro * accumulation * world from any two, or one with an accumulation of 1."""
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if train is None and micro is None:
        raise ConfigError("give train_batch_size or train_micro_batch_size_per_gpu")
    if micro is None:
        accumulation = accumulation or 1
        micro = typing.cast(int, train) // (accumulation * world)
    elif train is None:
        accumulation = accumulation or 1
    elif accumulation is None:
        accumulation = train // (micro * world)
    full = micro * accumulation * world
    if full == 0 or (train is not None and train != full):
        raise ConfigError(
            f"train_batch_size {train} is not train_micro_batch_size_per_gpu {micro} "
            f"x gradient_accumulation_steps {accumulation} x world size {world}"
        )
    return BatchSizes(train=full, micro=micro, accumulation=accumulation)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from None
    try:
        raw = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error.msg} at line {error.lineno}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return raw


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ConfigError(f"key {key} is given twice; remove one")
        result[key] = value
    return result


def _block_of(annotation: Any) -> type[Block] | None:
    """The Block inside `Block` or `Block | None`."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Block):
            return candidate
    return None


def _walk(block: type[Block], raw: Mapping[str, Any], path: str, replaced: list[AutoReplacement]) -> dict[str, Any]:
    """Name unknown keys and take out "auto", level by level."""
    known = block.known_keys()
    cleaned: dict[str, Any] = {}
    for key, value in raw.items():
        where = f"{path}{key}"
        if key not in known:
            raise ConfigError(_unknown(key, path, known))
        field = block.model_fields[known[key]]
        inner = _block_of(field.annotation)
        if isinstance(value, Mapping) and inner is not None:
            cleaned[key] = _walk(inner, value, f"{where}.", replaced)
        elif value == "auto" and field.annotation is not str and "auto" not in str(field.annotation):
            if field.default is PydanticUndefined:
                raise ConfigError(f'{where}: "auto" has no default here; give a value')
            replaced.append(AutoReplacement(where, field.default))
        elif value == "auto" and field.default is PydanticUndefined:
            raise ConfigError(f'{where}: "auto" has no default here; give a value')
        else:
            cleaned[key] = value
    return cleaned


def _unknown(key: str, path: str, known: Mapping[str, str]) -> str:
    where = f"in {path[:-1]}" if path else "at the top level"
    everywhere = dict(_all_keys(TrainerConfig, ""))
    here = _FORMER.get(key) or nearest(key, known)
    if here in known and key not in everywhere:
        return f"unknown key {key} {where}; did you mean {path}{here}?"
    elsewhere = key if key in everywhere else nearest(key, everywhere)
    hint = f"; did you mean {everywhere[elsewhere]}?" if elsewhere else ""
    return f"unknown key {key} {where}{hint}"


def _all_keys(block: type[Block], path: str) -> list[tuple[str, str]]:
    found = [(spelling, f"{path}{spelling}") for spelling in block.known_keys()]
    for name, field in block.model_fields.items():
        inner = _block_of(field.annotation)
        if inner is not None:
            found += _all_keys(inner, f"{path}{name}.")
    return found[::-1] if not path else found


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(first["input"], dict) else f" (got {first['input']!r})"
    return f"{where}: {reason}{shown}" if where else f"{reason}{shown}"
