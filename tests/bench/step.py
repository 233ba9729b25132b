"""Step time of a decoder with everything on NVMe, beside its own run without offload, and beside a peer's command.

`python -m tests.bench.step [--size 123m] [--world 1] [--share 0.17] [--dtype bf16] [--steps 8] [--pairs 3]
[--peer 'COMMAND with {device}'] [-o FILE]`. The peer's command is run with {device} = none and nvme, and must leave
JSON with the medians of its steps in the file that {out} names: [{"med": {"t": seconds}}].
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from trainer.demo.model import DecoderSize

SIZES = {
    "10m": DecoderSize(8, 256, 4, 8192, 64),
    "123m": DecoderSize(12, 768, 12, 24576, 64),
    "350m": DecoderSize(24, 1024, 16, 24576, 64),
}
WARM_UP = 7
"""Steps not counted: two to know the order, one to rehearse updates in backward, two to record the accesses, two to
follow them."""


def config(options: argparse.Namespace, device: str, path: str, budget: int) -> dict[str, Any]:
    place = {"device": device, **({"nvme_path": path} if device == "nvme" else {})}
    tree: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": options.bucket,
            "offload_param": place,
            "offload_optimizer": place,
        },
        "offloadd": {"host_bytes": budget, "timeout_s": 120, "update_in_backward": not options.no_early},
    }
    if options.dtype == "bf16":
        tree["bf16"] = {"enabled": True}
    return tree


def run(options: argparse.Namespace, device: str, scratch: Path, budget: int) -> dict[str, Any]:
    """One run of ours in fresh processes: medians over the counted steps, and where the time went."""
    task = {
        "size": dataclasses.asdict(SIZES[options.size]),
        "batch": options.batch,
        "steps": options.steps + WARM_UP,
        "config": config(options, device, str(scratch), budget),
        "out": str(scratch / "out.json"),
    }
    file = scratch / "task.json"
    file.write_text(json.dumps(task))
    threads = str(max(1, (os.cpu_count() or 1) // options.world))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.world}"]
    command += ["-m", "tests.bench.step_rank", str(file)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": threads}, capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise SystemExit(f"the run on {device} failed:\n{done.stderr[-9000:]}")
    rows = json.loads(Path(task["out"]).read_text())
    counted = rows["steps"][WARM_UP:]
    out = {key: median(row[key] for row in counted) for key in counted[0]}
    return out | {key: rows[key] for key in rows if key != "steps"}


def peer(command: str, device: str, scratch: Path) -> float:
    """The peer's median step in seconds."""
    out = scratch / "peer.json"
    out.unlink(missing_ok=True)
    text = command.replace("{device}", device).replace("{out}", str(out)).replace("{nvme}", str(scratch))
    done = subprocess.run(shlex.split(text), capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"the peer's run on {device} failed:\n{done.stderr[-9000:]}")
    return float(json.loads(out.read_text())[0]["med"]["t"])


def drop_caches() -> None:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        print("cannot drop caches (not root): both sides keep theirs", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="123m")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--share", type=float, nargs="+", default=[0.17, 0.5], help="host budget / bytes of the states")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--bucket", type=int, default=10_000_000, help="reduce_bucket_size")
    parser.add_argument("--no-early", action="store_true", help="without update_in_backward")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--dir", default=".", help="directory on the device to measure")
    parser.add_argument("--peer", help="command of the peer, with {device}, {nvme} and {out}")
    parser.add_argument("-o", "--output", default="-")
    options = parser.parse_args()
    states = SIZES[options.size].parameters() * (14 if options.dtype == "bf16" else 12)
    document: dict[str, Any] = {"options": vars(options), "parameters": SIZES[options.size].parameters(), "pairs": []}
    for number in range(options.pairs):
        pair: dict[str, Any] = {}
        with tempfile.TemporaryDirectory(prefix="step-", dir=options.dir) as name:
            scratch = Path(name)
            drop_caches()
            pair["none"] = run(options, "none", scratch, 0)
            for share in options.share:
                drop_caches()
                pair[f"nvme {share:g}"] = run(options, "nvme", scratch, int(states * share) // options.world)
            if options.peer:
                for device in ("none", "nvme"):
                    drop_caches()
                    pair[f"peer {device}"] = peer(options.peer, device, scratch)
        document["pairs"].append(pair)
        print(f"pair {number}: {json.dumps(_brief(pair))}", file=sys.stderr)
    document["summary"] = _summary(document["pairs"], options)
    text = json.dumps(document, indent=2)
    if options.output == "-":
        print(text)
    else:
        Path(options.output).write_text(text + "\n")
        print(json.dumps(document["summary"], indent=2))


def _brief(pair: dict[str, Any]) -> dict[str, float]:
    return {name: round(run["seconds"] if isinstance(run, dict) else run, 3) for name, run in pair.items()}


def _memory_ratio(memory: dict[str, int]) -> float:
    """A rank's peak of anonymous bytes over what its step needs: gathered parameters, activations and gradients, which
    were there after initialize already. What else was there then (interpreter, torch, tables) is left out."""
    grown = memory["anonymous_peak"] - memory["anonymous_after_initialize"] + memory["gradients"]
    parts = ("gathered_parameters_max", "activations", "gradients", "gradient_in_flight")
    return grown / sum(memory[part] for part in parts)


def _summary(pairs: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for share in options.share:
        name = f"nvme {share:g}"
        exposed = [pair[name]["seconds"] - pair["none"]["seconds"] for pair in pairs]
        row = {
            "step": median(pair[name]["seconds"] for pair in pairs),
            "none": median(pair["none"]["seconds"] for pair in pairs),
            "exposed": median(exposed),
            "bytes_per_parameter": median(pair[name]["bytes_per_parameter"] for pair in pairs),
            "mixed_bandwidth": median(pair[name]["mixed_bps"] for pair in pairs),
            "efficiency": median(
                max(pair["none"]["seconds"], pair[name]["bytes"] / pair[name]["mixed_bps"]) / pair[name]["seconds"]
                for pair in pairs
            ),
            "memory_ratio": median(_memory_ratio(pair[name]["memory"]) for pair in pairs),
        }
        if options.peer:
            theirs = [pair["peer nvme"] - pair["peer none"] for pair in pairs]
            row["peer_step"] = median(pair["peer nvme"] for pair in pairs)
            row["peer_exposed"] = median(theirs)
            row["exposed_ratio"] = median(a / b for a, b in zip(exposed, theirs, strict=True))
        out[name] = row
    return out


if __name__ == "__main__":
    main()
