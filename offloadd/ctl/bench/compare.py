"""Alternate daemon and fio, and report medians and ratios."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from offloadd.ctl.bench import fio
from offloadd.ctl.bench.harness import Load, Sample

MODES = ("read", "write", "mixed")
CHOOSING_SECONDS = 1.0


def measure(load: Load, seconds: float, runs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The daemon alone."""
    out: dict[str, Any] = {}
    for mode in MODES:
        samples = [load.run(mode, seconds) for _ in range(runs)]
        out[mode] = summary(samples)
        say(f"{mode:5}  {out[mode]['rate'] / 1e9:6.2f} GB/s  {out[mode]['cpu_per_gbps']:6.1%} of a core per GB/s")
    return out


def beside_fio(load: Load, seconds: float, pairs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Daemon and fio in turn on the same file: first fio's best setting, then `pairs` pairs. The file is the daemon's
    own, so its checksums must be off. CPU depends on the block before all else, so that fio's is taken at the daemon's
    block as well, if its best setting has another."""
    length = os.stat(load.file).st_size
    tile = int(load.facts[0]["tile_bytes"])
    out: dict[str, Any] = {}
    for mode in MODES:
        cell = fio.best_cell(load.file, length, mode, CHOOSING_SECONDS)
        same = fio.Cell(tile, cell.depth)
        ours: list[Sample] = []
        theirs: list[Sample] = []
        at_our_block: list[Sample] = []
        for pair in range(pairs):
            # Who goes first changes, so that a device which slows down is unfair to nobody.
            for who in (ours, theirs) if pair % 2 else (theirs, ours):
                if who is ours:
                    ours.append(load.run(mode, seconds))
                else:
                    theirs.append(fio.run(load.file, length, mode, cell, seconds))
            at_our_block.append(theirs[-1] if same == cell else fio.run(load.file, length, mode, same, seconds))
        ratios = [a.rate / b.rate for a, b in zip(ours, theirs, strict=True)]
        out[mode] = {
            "daemon": summary(ours),
            "fio": summary(theirs) | asdict(cell),
            "fio_at_our_block": summary(at_our_block) | asdict(same),
            "ratio": median(ratios),
            "ratios": ratios,
        }
        rates = [out[mode][who]["rate"] / 1e9 for who in ("daemon", "fio")]
        cpu = [out[mode][who]["cpu_per_gbps"] for who in ("daemon", "fio_at_our_block")]
        setting = f"{cell.block_bytes >> 10} KiB x {cell.depth}"
        say(
            f"{mode:5}  daemon {rates[0]:6.2f} GB/s  fio {rates[1]:6.2f} GB/s ({setting})  "
            f"ratio {out[mode]['ratio']:.3f}  CPU per GB/s {cpu[0]:.1%}, fio {cpu[1]:.1%} at {tile >> 10} KiB"
        )
    return out


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians, and every run's rate."""
    return {
        "rate": median(s.rate for s in samples),
        "rates": [s.rate for s in samples],
        "cpu": median(s.cpu for s in samples),
        "cpu_per_gbps": median(s.cpu_per_gbps() for s in samples),
    }
