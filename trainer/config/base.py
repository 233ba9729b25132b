"""What every block of the configuration shares: strictness, number and size syntax, and one-sentence errors.

Used by the other files of this package only. Owns no key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\s*$", re.IGNORECASE)
_UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


class ConfigError(ValueError):
    """A configuration that cannot be used: one sentence naming the key and what to write instead."""


class Block(BaseModel):
    """One level of the tree: frozen, no unknown key, no silent conversion, every number finite."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        populate_by_name=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    built: ClassVar[bool] = True
    """False: the keys are known so that existing files load, and asking for anything is refused."""

    @classmethod
    def known_keys(cls) -> dict[str, str]:
        """Every spelling that is accepted at this level, mapped to its field."""
        spellings: dict[str, str] = {}
        for name, field in cls.model_fields.items():
            spellings[name] = name
            if field.alias is not None:
                spellings[field.alias] = name
        return spellings


def _integral(value: Any) -> Any:
    """5e8 is how people write 500000000 in JSON; 0.5 is still refused by the strict int that follows."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def parse_bytes(value: Any) -> Any:
    """`512MiB`, `2 GB` or a plain number of bytes."""
    if not isinstance(value, str):
        return _integral(value)
    match = _SIZE.match(value)
    if match is None:
        raise ValueError(f"{value!r} is not a size; write bytes as a number or like '512MiB'")
    return int(float(match[1]) * _UNITS[(match[2] or "B").lower()])


Count = Annotated[int, BeforeValidator(_integral), Field(ge=0)]
"""A non-negative whole number; 5e8 is accepted."""
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
"""Bytes, as a number or with a unit."""


def nearest(key: str, candidates: Iterable[str]) -> str | None:
    """The known key most like `key`, if any is like it at all."""
    found = difflib.get_close_matches(key, list(candidates), n=1, cutoff=0.6)
    return found[0] if found else None
