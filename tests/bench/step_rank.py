"""One rank of tests.bench.step: a learnable synthetic sequence, timed step by step. Started by torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainer
from trainer.demo.memory import peak_bytes
from trainer.demo.model import Decoder, DecoderSize


def batch(size: DecoderSize, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """x[t+1] = 5 x[t] + 7 modulo a small number, from random starts."""
    modulus = min(size.vocabulary, 257)
    column = torch.randint(0, modulus, (count, 1), generator=generator)
    columns = [column]
    for _ in range(size.sequence):
        columns.append((5 * columns[-1] + 7) % modulus)
    tokens = torch.cat(columns, 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class PeakAnonymous:
    """This process's anonymous memory, sampled by a thread until the block ends."""

    def __init__(self) -> None:
        self.bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> PeakAnonymous:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._end.wait(0.002):
            self.bytes = max(self.bytes, peak_bytes(os.getpid())["anonymous"])


@contextlib.contextmanager
def saved_bytes(engine: trainer.Engine) -> Iterator[list[int]]:
    """Bytes that autograd saves in the block, each storage once, parameters left out."""
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in {zero.storage.data_ptr() for zero in engine.params.params}:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    total: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    total.append(sum(seen.values()))


def memory_step(engine: trainer.Engine, tokens: torch.Tensor, targets: torch.Tensor, before: int) -> dict[str, int]:
    """One step more, for memory: its peak of anonymous bytes, and what that should be made of. What autograd has just
    made of a gradient lies beside its place among the accumulated ones: at most one parameter's at a time."""
    with PeakAnonymous() as peak:
        with saved_bytes(engine) as activations:
            loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
    statistics = engine.statistics()
    itemsize = engine.params.params[0].dtype.itemsize
    return {
        "anonymous_peak": peak.bytes,
        "anonymous_after_initialize": before,
        "gathered_parameters_max": int(engine.params.live_numel_max) * itemsize,
        "activations": activations[0],
        "gradients": int(statistics["gradient_bytes"]),
        "gradient_in_flight": max(zero.numel for zero in engine.params.params) * itemsize,
    }


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group("gloo")
    size = DecoderSize(**task["size"])
    torch.manual_seed(1234)
    with trainer.zero.Init(config_dict_or_path=task["config"]):
        model = Decoder(size)
    engine, _, _, _ = trainer.initialize(model=model, config=task["config"])
    after_initialize = peak_bytes(os.getpid())["anonymous"]
    generator = torch.Generator().manual_seed(1234 + 17 * rank)
    backend = engine.backends.param
    rows: list[dict[str, Any]] = []
    for _ in range(task["steps"]):
        tokens, targets = batch(size, task["batch"], generator)
        before = backend.statistics()
        dist.barrier()
        t0 = time.perf_counter()
        loss = engine(tokens, targets)
        t1 = time.perf_counter()
        engine.backward(loss)
        t2 = time.perf_counter()
        engine.step()
        t3 = time.perf_counter()
        after = backend.statistics()
        moved = {
            key: after.get(key, 0.0) - before.get(key, 0.0)
            for key in after
            if key.endswith("_bytes") or key.startswith("stall") or key == "fetch_wait_seconds"
        }
        rows.append({"seconds": t3 - t0, "forward": t1 - t0, "backward": t2 - t1, "optimizer": t3 - t2, **moved})
    memory = memory_step(engine, *batch(size, task["batch"], generator), after_initialize)
    _add_bytes(rows, world, size.parameters())
    document = {"steps": rows, "mixed_bps": _mixed_bandwidth(backend), "memory": memory}
    if rank == 0:
        Path(task["out"]).write_text(json.dumps(document))
    dist.barrier()
    engine.close()
    dist.destroy_process_group()


def _add_bytes(rows: list[dict[str, Any]], world: int, parameters: int) -> None:
    """Disk bytes of all ranks, per step and per parameter."""
    moved = torch.tensor(
        [row.get("disk_read_bytes", 0.0) + row.get("disk_written_bytes", 0.0) for row in rows], dtype=torch.float64
    )
    if world > 1:
        dist.all_reduce(moved)
    for row, total in zip(rows, moved.tolist(), strict=True):
        row["bytes"], row["bytes_per_parameter"] = total, total / parameters


def _mixed_bandwidth(backend: Any) -> float:
    daemon = getattr(backend, "daemon", None)
    if daemon is None:
        return 1.0
    command = [sys.executable, "-m", "offloadd.ctl.main", "status", "-o", "json", "--endpoint", daemon["endpoint"]]
    paths = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["paths"]
    return float(sum(path["calibrated"]["mixed_bps"] for path in paths))


if __name__ == "__main__":
    main()
