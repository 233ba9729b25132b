"""fio as the reference: the same file, io_uring, O_DIRECT."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass

from offloadd.core.errors import Code, OffloadError
from offloadd.core.units import KIB, MIB
from offloadd.ctl.bench.harness import Sample

BLOCKS = (128 * KIB, MIB, 4 * MIB)
DEPTHS = (8, 32, 128)
_RW = {"read": "read", "write": "write", "mixed": "rw"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting of fio."""

    block_bytes: int
    depth: int


def require() -> None:
    """OffloadError if fio is not installed."""
    if shutil.which("fio") is None:
        raise OffloadError(Code.BAD_CONFIG, "--compare fio needs fio; install it with your distribution's package fio")


def run(file: str, file_bytes: int, mode: str, cell: Cell, seconds: float) -> Sample:
    """Sequential, over the whole file, buffers registered as the daemon's are."""
    command = [
        *("fio", "--name=reference", f"--filename={file}", f"--size={file_bytes}", f"--rw={_RW[mode]}"),
        *(f"--bs={cell.block_bytes}", f"--iodepth={cell.depth}", "--ioengine=io_uring", "--direct=1"),
        *("--fixedbufs=1", "--registerfiles=1", "--time_based", f"--runtime={seconds}", "--overwrite=1"),
        *("--norandommap=1", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False)
    try:
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    except (ValueError, KeyError, IndexError) as error:
        raise OffloadError(Code.INTERNAL, f"fio failed: {done.stderr.strip() or done.stdout.strip()}") from error
    read, written = int(job["read"]["io_bytes"]), int(job["write"]["io_bytes"])
    elapsed = max(job["read"]["runtime"], job["write"]["runtime"]) / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100
    return Sample(mode, (read + written) / elapsed, read, written, elapsed, cpu)


def best_cell(file: str, file_bytes: int, mode: str, seconds: float) -> Cell:
    """The fastest of the grid."""
    cells = [Cell(block, depth) for block in BLOCKS for depth in DEPTHS]
    return max(cells, key=lambda cell: run(file, file_bytes, mode, cell, seconds).rate)
