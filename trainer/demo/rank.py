"""One rank of the demonstration: train, and write down every step. Started by torchrun from `trainer.demo`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainer
from trainer.demo.memory import peak_bytes
from trainer.demo.model import Decoder, DecoderSize
from trainer.demo.text import Text, standard_library

EVALUATION_BATCHES = 8


def main(task_file: str) -> None:
    """`task_file`: JSON with size, seed, batch, steps, config, digest_step, out (a directory)."""
    task = json.loads(Path(task_file).read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group("gloo")
    size = DecoderSize(**task["size"])
    text = Text(standard_library(), size.sequence, task["seed"])
    torch.manual_seed(task["seed"])
    with trainer.zero.Init(config_dict_or_path=task["config"]):
        model = Decoder(size)
    engine, _, _, _ = trainer.initialize(model=model, config=task["config"])
    baseline = peak_bytes(os.getpid())
    with Path(task["out"], f"rank{rank}.jsonl").open("w", buffering=1) as log:
        log.write(json.dumps(_opening(engine, baseline, rank)) + "\n")
        for step in range(task["steps"]):
            log.write(json.dumps(_step(engine, text, step, rank, task)) + "\n")
        log.write(json.dumps({"held_out": _held_out(engine, text, task), "peak": peak_bytes(os.getpid())}) + "\n")
    dist.barrier()
    engine.close()
    dist.destroy_process_group()


def _opening(engine: Any, baseline: dict[str, int], rank: int) -> dict[str, Any]:
    daemon = getattr(engine.backends.param, "daemon", None)
    return {"rank": rank, "after_initialize": baseline, "daemon": daemon}


def _step(engine: Any, text: Text, step: int, rank: int, task: dict[str, Any]) -> dict[str, Any]:
    tokens, targets = text.batch(step, rank, task["batch"])
    started = time.perf_counter()
    loss = engine(tokens, targets)
    engine.backward(loss)
    engine.step()
    seconds = time.perf_counter() - started
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    row: dict[str, Any] = {
        "step": step,
        "seconds": seconds,
        "at": time.time(),
        # repr keeps every bit, so that two runs can be compared exactly.
        "loss": repr(loss.item()),
        "mean_loss": mean.item() / dist.get_world_size(),
        "norm": repr(engine.get_global_grad_norm()),
        "swap": engine.backends.param.statistics(),
    }
    if step == task["digest_step"]:
        row["digest"] = _digest(engine)
    daemon = getattr(engine.backends.param, "daemon", None)
    if daemon is not None and rank == 0:
        row["daemon_memory"] = peak_bytes(daemon["pid"])
    return row


def _digest(engine: Any) -> str:
    """SHA-256 over this rank's parameters, masters and moments, in registration order."""
    digest = hashlib.sha256()
    for zero, states in engine.optimizer.shard_states():
        digest.update(zero.name.encode())
        for kind in sorted(states):
            digest.update(kind.encode() + states[kind].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _held_out(engine: Any, text: Text, task: dict[str, Any]) -> float:
    engine.eval()
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for tokens, targets in text.held_out_batches(EVALUATION_BATCHES, task["batch"]):
            total += engine(tokens, targets).double()
    engine.train()
    return float(total) / EVALUATION_BATCHES


if __name__ == "__main__":
    main(sys.argv[1])
