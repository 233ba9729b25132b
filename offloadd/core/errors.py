"""The error table: every code that can cross the wire, and the exception that carries it.

The same numbers stand in proto/offloadd/v1/errors.proto; a test compares the two. The data path returns codes,
the control path raises `OffloadError`. 1xx: the caller's mistake. 2xx: pressure, retry later or ask for less.
3xx: device or data. 9xx: our bug.
"""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Wire code of an outcome. Keep in step with errors.proto."""

    OK = 0
    # 1xx: the caller's mistake; retrying the same call gives the same answer.
    BAD_REQUEST = 100
    UNKNOWN_SHARD = 101
    BAD_RANGE = 102
    NOT_STORED = 103
    LEASE_CONFLICT = 104
    BAD_LEASE = 105
    STALE_SESSION = 110
    WRONG_USER = 111
    WRONG_WORLD = 112
    WRONG_VERSION = 113
    BAD_TOKEN = 114
    RANKS_DISAGREE = 115
    NO_SESSION = 116
    BAD_CONFIG = 120
    # 2xx: pressure.
    NO_HOST_BUDGET = 200
    NO_SWAP_BUDGET = 201
    SLOTS_EXHAUSTED = 202
    RING_FULL = 203
    DRAINING = 204
    CANCELLED = 205
    TIMED_OUT = 206
    RANK_LOST = 207
    UNAVAILABLE = 208
    # 3xx: device or data.
    IO_ERROR = 300
    NO_SPACE = 301
    SHORT_IO = 302
    CORRUPT = 303
    PATH_UNUSABLE = 304
    # 9xx: ours.
    INTERNAL = 900


def known_code(number: int) -> Code:
    """The code with this number; INTERNAL for one that this version does not know."""
    return _BY_NUMBER.get(number, Code.INTERNAL)


_BY_NUMBER = {int(code): code for code in Code}


class OffloadError(Exception):
    """A refusal or failure with its wire code. `str(error)` is one sentence: what, where, how much, what to do."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def message(self) -> str:
        """The sentence, without the code."""
        return str(self.args[0])


class ConfigError(OffloadError):
    """A configuration that cannot be used; raised before anything is allocated."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.BAD_CONFIG, message)
