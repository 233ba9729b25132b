"""`python -m trainer.demo`: train a decoder whose states do not fit its memory budget, and prove that nothing is lost.

Two ranks train twice: a short stretch without offload, then the whole run with every state on disk, served by a private
daemon. Fails unless the bits agree, the model learns, and memory stays within its budget.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn

from offloadd.core.units import MIB, human
from trainer.demo.model import DecoderSize
from trainer.demo.report import Run, draw, median_step, parity, stall_seconds, swap_deltas, table
from trainer.demo.text import Text, standard_library

WORLD = 2
BUDGET_SHARE = 0.25
LEARNED_NATS = 0.3
"""The held-out loss must be at least this much below the unigram entropy."""
DAEMON_OVERHEAD = 1.05, 100 * MIB
"""What the daemon may use beyond its budget: a factor, and bytes."""


def main() -> int:
    options = _options()
    out = Path(options.out).resolve()
    shutil.rmtree(out, ignore_errors=True)
    (swap := out / "swap").mkdir(parents=True)
    size = DecoderSize()
    dtype, reason = _faster_dtype(options.dtype)
    states = size.parameters() * (14 if dtype == "bf16" else 12)
    budget = int(states * BUDGET_SHARE) // (WORLD * MIB) * MIB
    print(f"{size.parameters() / 1e6:.1f} M parameters in {dtype} ({reason}) on {WORLD} ranks; states {human(states)}, "
          f"host budget {human(budget * WORLD)}, swap in {swap}")  # fmt: skip
    task = {
        "size": dataclasses.asdict(size),
        "seed": 1,
        "batch": options.batch,
        "digest_step": options.compare - 1,
    }
    plain = _run("without offload", out / "runs" / "plain", task, options.compare, _config(dtype, options, None))
    place = {"device": "nvme", "nvme_path": str(swap)}
    ours = _run("all on NVMe", out / "runs" / "nvme", task, options.steps, _config(dtype, options, place, budget))
    swap.rmdir()  # The private daemon has taken its files along.
    result = _result(options, size, dtype, states, budget, plain, ours)
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(out / "demo.png", ours, plain, result["unigram_entropy"], result["held_out_loss"])
    print(table(result))
    print(f"  written: {out / 'result.json'}, {out / 'demo.png'}")
    for failure in result["failures"]:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if result["failures"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer.demo", description=__doc__)
    parser.add_argument("--out", default="demo-out", help="directory for results and swap files (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="steps with offload (default: %(default)s)")
    parser.add_argument("--compare", type=int, default=12, help="steps without offload (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--dtype", choices=["auto", "bf16", "fp32"], default="auto", help="default: what this CPU is "
                        "fast in")  # fmt: skip
    return parser.parse_args()


def _faster_dtype(asked: str) -> tuple[str, str]:
    """The dtype, and why."""
    if asked != "auto":
        return asked, "as asked"
    speed = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a = torch.ones(512, 512, dtype=dtype)
        a @ a
        started = time.perf_counter()
        for _ in range(8):
            a @ a
        speed[name] = time.perf_counter() - started
    best = min(speed, key=lambda name: speed[name])
    other = max(speed, key=lambda name: speed[name])
    return best, f"this CPU multiplies matrices {speed[other] / speed[best]:.1f} times faster in {best} than in {other}"


def _config(dtype: str, options: argparse.Namespace, place: dict[str, str] | None, budget: int = 0) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 1000, "sub_group_size": 10**7}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "weight_decay": 0.01}},
        "zero_optimization": zero,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if place is not None:
        zero |= {"offload_param": place, "offload_optimizer": place}
        config["offloadd"] = {"host_bytes": budget}
    return config


def _run(title: str, out: Path, task: dict[str, Any], steps: int, config: dict[str, Any]) -> Run:
    out.mkdir(parents=True)
    file = out / "task.json"
    file.write_text(json.dumps(task | {"steps": steps, "config": config, "out": str(out)}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD}"]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // WORLD))}
    with (out / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "-m", "trainer.demo.rank", str(file)], stdout=log, stderr=log, env=environment
        )
        try:
            _follow(title, process, out / "rank0.jsonl", steps)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)
    if process.returncode:
        tail = "\n".join((out / "log").read_text().splitlines()[-15:])
        raise SystemExit(f"the run {title} failed:\n{tail}")
    return Run.read(out, WORLD)


def _follow(title: str, process: subprocess.Popen[bytes], log: Path, steps: int) -> None:
    """Show a bar with loss, tokens/s, disk rates and stall share until the run ends."""
    # Narrow enough for a terminal of 80 columns.
    columns = (TextColumn("{task.description}"), BarColumn(8), TextColumn("{task.completed}/{task.total}"),
               TextColumn("{task.fields[figures]}"))  # fmt: skip
    with Progress(*columns) as progress:
        bar = progress.add_task(title, total=steps, figures="starting")
        while True:
            ended = _ended(process)
            rows = _rows(log)
            if rows:
                progress.update(bar, completed=rows[-1]["step"] + 1, figures=_figures(rows))
            if ended:
                return


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(0.3)
    except subprocess.TimeoutExpired:
        return False
    return True


def _rows(log: Path) -> list[dict[str, Any]]:
    if not log.exists():
        return []
    lines = log.read_text().splitlines()
    whole = [json.loads(line) for line in lines[-3:] if line.endswith("}")]
    return [row for row in whole if "step" in row]


def _figures(rows: list[dict[str, Any]]) -> str:
    last = rows[-1]
    text = f"loss {last['mean_loss']:.3f} {WORLD * 8 * 64 / last['seconds']:.0f} tokens/s"
    if len(rows) > 1 and "disk_read_bytes" in last["swap"]:
        before, seconds = rows[-2], last["seconds"]
        read, written = (
            (last["swap"][key] - before["swap"][key]) * WORLD / seconds / 1e6
            for key in ("disk_read_bytes", "disk_written_bytes")
        )
        stalled = sum(v - before["swap"][k] for k, v in last["swap"].items() if k.startswith("stall_seconds_"))
        text += f" r {read:.0f} w {written:.0f} MB/s stalled {min(1.0, stalled / seconds):.0%}"
    return text


def _result(
    options: argparse.Namespace, size: DecoderSize, dtype: str, states: int, budget: int, plain: Run, ours: Run
) -> dict[str, Any]:
    text = Text(standard_library(), size.sequence, 1)
    rows = ours.steps[0]
    moved = [r + w for r, w in zip(swap_deltas(ours.steps, "disk_read_bytes"),
                                   swap_deltas(ours.steps, "disk_written_bytes"), strict=True)]  # fmt: skip
    later = moved[3:] or moved
    stalls = stall_seconds(ours.steps)
    seconds = sum(row["seconds"] for row in rows)
    step, plain_step = median_step(rows), median_step(plain.steps[0])
    io_utilisation = sum(log[-1]["swap"].get("io_utilisation", 0.0) for log in ours.steps)
    daemon = ours.opening[0]["daemon"]
    daemon_peak = max(row["daemon_memory"].get("peak", 0) for row in rows)
    result: dict[str, Any] = {
        "parameters": size.parameters(),
        "dtype": dtype,
        "world": WORLD,
        "states_bytes": states,
        "budget_bytes": budget * WORLD,
        "budget_share": budget * WORLD / states,
        "engine": daemon["engine"],
        "driver": daemon["driver"],
        "tile_bytes": daemon["tile_bytes"],
        "losses": [row["mean_loss"] for row in rows],
        "held_out_loss": ours.closing[0]["held_out"],
        "unigram_entropy": text.unigram_entropy(),
        "parity": parity(plain, ours),
        "step_seconds": step,
        "plain_step_seconds": plain_step,
        "bytes_per_parameter_step": sum(later) / len(later) / size.parameters(),
        "io_utilisation": io_utilisation,
        "step_efficiency": max(plain_step / step, io_utilisation),
        "stall_share": sum(map(sum, stalls.values())) / seconds,
        "stall_seconds": {cause: sum(values) for cause, values in stalls.items()},
        "memory": {
            "daemon_peak": daemon_peak,
            "daemon_allowed": int(budget * WORLD * DAEMON_OVERHEAD[0]) + DAEMON_OVERHEAD[1],
            "rank_anonymous": [log["peak"].get("anonymous", 0) for log in ours.closing],
        },
    }
    result["failures"] = _failures(result)
    return result


def _failures(result: dict[str, Any]) -> list[str]:
    failures = []
    if not result["parity"]["equal"]:
        failures.append(f"bits differ from the run without offload: {', '.join(result['parity']['differences'])}")
    if result["held_out_loss"] > result["unigram_entropy"] - LEARNED_NATS:
        failures.append(
            f"held-out loss {result['held_out_loss']:.3f} is not {LEARNED_NATS} nats below the unigram entropy "
            f"{result['unigram_entropy']:.3f}"
        )
    memory = result["memory"]
    if memory["daemon_peak"] > memory["daemon_allowed"]:
        failures.append(f"the daemon used {human(memory['daemon_peak'])}, allowed {human(memory['daemon_allowed'])}")
    return failures


if __name__ == "__main__":
    raise SystemExit(main())
