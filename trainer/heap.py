"""glibc's heap, where torch's CPU tensors live. Elsewhere these do nothing."""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8  # malloc.h


def share_one_arena() -> None:
    """Let threads that start from now on allocate where the others do. Each arena keeps the pages of what it freed, so
    that a rank of 123 M parameters holds 30 MB more with several; tensors are too large for their lock to matter."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """What building and partitioning the model freed is still the process's: a quarter of a GB for 123 M parameters."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
