"""Where a training script meets this package: an error that its author can mend leaves without our own frames.

Applied to every function that scripts call. What remains of the traceback is the script's own lines and one line of
this file; TRAINER_TRACEBACK=full in the environment keeps everything. Errors of any other type are never touched: a bug
of ours keeps its whole traceback.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from offloadd.core.errors import Code, OffloadError
from trainer.config.base import ConfigError
from trainer.swap.backend import SwapError
from trainer.zero.errors import CollectiveError, RanksDisagree, UsageError

VARIABLE = "TRAINER_TRACEBACK"

_MENDABLE = (ConfigError, SwapError, CollectiveError, RanksDisagree, UsageError)
_PACKAGES = {"trainer", "offloadd", "offloadd_native", "torch"}

P = ParamSpec("P")
R = TypeVar("R")


def user_facing(function: Callable[P, R]) -> Callable[P, R]:
    """Cut our frames off the errors that leave `function`, if they are the user's to mend."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except _MENDABLE as error:
            if os.environ.get(VARIABLE) == "full" or _is_bug(error):
                raise
            shortened = _shortened(error)
        try:
            raise shortened  # TRAINER_TRACEBACK=full shows what is cut here
        finally:
            del shortened  # Or the error and this frame would keep each other, and the arguments, alive.

    return call


def _is_bug(error: BaseException) -> bool:
    cause = error.__cause__
    return isinstance(cause, OffloadError) and cause.code is Code.INTERNAL


def _shortened(error: BaseException) -> BaseException:
    before = _before(error)
    while before is not None and _begins_here(before):
        before = _before(before)
    # What the script itself was handling stays; what we met on the way is in the sentence.
    error.__cause__, error.__context__, error.__suppress_context__ = None, before, before is None
    frames = []
    trace = error.__traceback__
    while trace is not None:
        if not _is_ours(trace.tb_frame):
            frames.append(trace)
        trace = trace.tb_next
    short: TracebackType | None = None
    for kept in reversed(frames):
        short = TracebackType(short, kept.tb_frame, kept.tb_lasti, kept.tb_lineno)
    return error.with_traceback(short)


def _before(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _begins_here(error: BaseException) -> bool:
    return error.__traceback__ is None or _is_ours(error.__traceback__.tb_frame)


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in _PACKAGES and not name.startswith("trainer.demo")
