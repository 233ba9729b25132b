"""One spawn per world size: every rank runs all cells in every way and writes down how they differ.

The parent reads the ranks' files; one failing cell fails its own test, a rank that dies fails all of its world.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.daemon import running
from tests.numerics.parity.cells import ENDPOINT_VARIABLE, WAYS, Cell, run, run_plain

JOIN_SECONDS_MAX = 1800.0


def spawn(world: int, target: Callable[..., None], arguments: Sequence[Any], folder: Path) -> list[int | None]:
    """Run `target(rank, world, folder, *arguments)` on every rank, bounded; returns exit codes. Nobody is left over."""
    # A server that has imported torch once and forks each rank from there: a rank starts in no time. The server runs
    # no tensor operation, so that no thread pool is forked.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.numerics.parity.world", "torch._dynamo"])
    ranks = [
        context.Process(target=_rank, args=(target, rank, world, folder, tuple(arguments)), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + JOIN_SECONDS_MAX
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join(10.0)
    return [process.exitcode for process in ranks]


def _rank(target: Callable[..., None], rank: int, world: int, folder: Path, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        target(rank, world, folder, *arguments)
        if world > 1:
            # Nobody takes connections down while another still uses them.
            dist.barrier()
    except BaseException:
        (folder / f"error{rank}.txt").write_text(traceback.format_exc())
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_cells(rank: int, world: int, folder: Path, cells: Sequence[Cell], ways: Sequence[str], endpoint: str) -> None:
    """On one rank: each cell in every way, against the reference."""
    os.environ[ENDPOINT_VARIABLE] = endpoint
    found = {}
    for cell in cells:
        reference = run(cell, "reference", rank)
        entry: dict[str, Any] = {"losses": reference.losses, "norms": reference.norms}
        entry["far_from_plain"] = _far_from_plain(cell, world, reference) if rank == 0 and not cell.bf16 else []
        for way in [way for way in ways if WAYS[way].suits(cell)]:
            record = run(cell, way, rank)
            entry[way] = {
                "differences": record.differences(reference),
                "live": record.live,
                "statistics": record.statistics,
            }
        found[cell.id] = entry
    (folder / f"result{rank}.json").write_text(json.dumps(found))


def _far_from_plain(cell: Cell, world: int, reference: Any) -> list[str]:
    plain = run_plain(cell, world)
    far = []
    for name in ("losses", "norms"):
        ours, theirs = torch.tensor(getattr(reference, name)), torch.tensor(getattr(plain, name))
        if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6):
            far.append(f"{name}: {ours.tolist()} instead of {theirs.tolist()}")
    for name, tensor in plain.tensors.items():
        if not torch.allclose(reference.tensors[name], tensor, rtol=1e-3, atol=2e-5):
            far.append(f"{name}: off by {(reference.tensors[name] - tensor).abs().max().item():.3g}")
    return far


class WorldResult:
    """What the ranks of one world wrote."""

    def __init__(self, world: int, cells: Sequence[Cell], ways: Sequence[str], folder: Path) -> None:
        needed = any("nvme" in (WAYS[way].param, WAYS[way].optimizer) for way in ways)
        with running() if needed else contextlib.nullcontext() as daemon:
            endpoint = daemon.endpoint if daemon is not None else ""
            self.codes = spawn(world, run_cells, (list(cells), list(ways), endpoint), folder)
        self.errors = [path.read_text() for path in sorted(folder.glob("error*.txt"))]
        self.ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("result*.json"))]
        self.world = world

    def of(self, cell: Cell) -> list[dict[str, Any]]:
        """One entry per rank; raises what a rank raised."""
        if self.errors or len(self.ranks) != self.world:
            raise AssertionError(f"world {self.world} exited with {self.codes}\n" + "\n".join(self.errors))
        return [rank[cell.id] for rank in self.ranks]
