"""The default process group: used if there is one, made if torchrun started this process, absent otherwise.

Called by `trainer.initialize` and `zero.Init`. Also checks that all ranks were started alike.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from trainer.zero.collectives import Collectives
from trainer.zero.errors import RanksDisagree

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ensure_process_group(timeout_s: float) -> None:
    """Make the default group if torchrun's environment is there and nobody made one. Taken down at exit."""
    if not dist.is_available() or dist.is_initialized():
        return
    if any(name not in os.environ for name in _TORCHRUN) or int(os.environ["WORLD_SIZE"]) == 1:
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    atexit.register(_take_down)


def _take_down() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def ensure_agreement(collectives: Collectives, facts: Sequence[str]) -> None:
    """Compare what ranks were started with: a digest first, the lines only when digests differ."""
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    what = "the comparison of model and configuration"
    if len(set(collectives.exchange(digest, what))) == 1:
        return
    everyone = collectives.exchange(list(facts), what)
    for rank, theirs in enumerate(everyone):
        for ours_line, their_line in zip([*everyone[0], ""], [*theirs, ""], strict=False):
            if ours_line != their_line:
                raise RanksDisagree(
                    f"rank {rank} was started differently from rank 0: it has {their_line or 'nothing'!r} where rank 0 "
                    f"has {ours_line or 'nothing'!r}"
                )
