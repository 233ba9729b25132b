"""What an engine's result means: code, errno, and the first granule that differs.

Used by the store when it settles. Pure.
"""

from __future__ import annotations

import errno as errno_names
from typing import NamedTuple

from offloadd.core.errors import Code
from offloadd.core.records import Outcome

_SHORT = frozenset({errno_names.ENODATA})
_SPACE = frozenset({errno_names.ENOSPC, errno_names.EDQUOT})


class Settled(NamedTuple):
    """How a transfer ended, in the words of a reply."""

    code: Code
    errno: int = 0
    granule: int = 0


SETTLED_OK = Settled(Code.OK)


def classify(outcome: Outcome, expected: int) -> Settled:
    """Look at a result: OK only if every byte moved."""
    if outcome.result == expected:
        return SETTLED_OK
    if outcome.result >= 0:
        return Settled(Code.SHORT_IO)
    number = -outcome.result
    if number in _SPACE:
        return Settled(Code.NO_SPACE, number)
    if number in _SHORT:
        return Settled(Code.SHORT_IO, number)
    if number == errno_names.EINVAL:
        # Regions, files and bounds are ours: the engine says this when we named what it does not have.
        return Settled(Code.INTERNAL, number)
    return Settled(Code.IO_ERROR, number)


def first_difference(expected: bytes, found: bytes) -> int:
    """Index of the first granule (4 bytes each) that differs, or -1."""
    if expected == found:
        return -1
    for index in range(0, max(len(expected), len(found)), 4):
        if expected[index : index + 4] != found[index : index + 4]:
            return index // 4
    return -1
