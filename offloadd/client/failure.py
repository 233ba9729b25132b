"""From a completion's code to one sentence: what, where, how much, what to do."""

from __future__ import annotations

import os
from collections.abc import Sequence

from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import CATALOG_PATH, Op
from offloadd.core.units import GRANULE_BYTES, human
from offloadd.wire.layout import Completion


def explain(
    who: str,
    op: Op,
    title: str,
    completion: Completion,
    paths: Sequence[str],
    held: Sequence[str],
    stuck: Sequence[str],
) -> OffloadError:
    """`held`: tiles fetched and not handed back; `stuck`: handed back, but a tensor over them still lives."""
    reason = os.strerror(completion.errno) if completion.errno else "no further detail"
    if completion.path == CATALOG_PATH:
        return OffloadError(
            completion.code,
            f"{who}: {op.name.lower()} of {title} failed: the daemon's catalog could not be written ({reason}); the "
            "daemon's log names the file, which needs free space on a sound device",
        )
    path = paths[completion.path] if completion.path < len(paths) else "its swap path"
    what = {
        Code.BAD_REQUEST: "the daemon does not understand the request",
        Code.UNKNOWN_SHARD: "no such shard or tile is registered in this session",
        Code.NOT_STORED: "its bytes were never stored; store it once before fetching it for reading or update",
        Code.LEASE_CONFLICT: "it is already fetched in a mode that excludes this one; hand that slot back first",
        Code.BAD_LEASE: "the lease is not open in this session",
        Code.STALE_SESSION: "the session was replaced by a newer one of the same rank",
        Code.CANCELLED: "the session ended before the request was served",
        Code.SLOTS_EXHAUSTED: f"its memory is full of stored tiles that {path} does not take: it reports {reason}; "
        "free space there or check the device's log (dmesg)"
        if completion.errno
        else _exhausted(held, stuck),
        Code.IO_ERROR: f"{path} reports {reason}; check the device's log (dmesg)",
        Code.NO_SPACE: f"{path} has no space left ({reason}); free some or add another path",
        Code.SHORT_IO: f"{path} moved fewer bytes than asked, twice; check the device's log (dmesg)",
        Code.CORRUPT: f"what {path} gave back at bytes {human(completion.granule * GRANULE_BYTES)} and on is not what "
        "was stored there (checksum); the device is not to be trusted, restore from a checkpoint",
    }.get(completion.code, f"the daemon answered {completion.code.name} ({reason})")
    return OffloadError(completion.code, f"{who}: {op.name.lower()} of {title} failed: {what}")


def _exhausted(held: Sequence[str], stuck: Sequence[str]) -> str:
    text = f"all of the session's memory is on loan, {len(held)} tiles fetched and not handed back"
    if stuck:
        shown = ", ".join(stuck[:5]) + (" and more" if len(stuck) > 5 else "")
        text += f", and {len(stuck)} handed back whose tensors still live ({shown}): drop those tensors"
    return text + "; or raise the host budget"
