"""What the demonstration leaves behind: result.json, a picture and a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from offloadd.core.units import human

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Run:
    """One run's log, as its ranks wrote it: first line, one per step, last line."""

    opening: list[dict[str, Any]]
    steps: list[Rows]
    closing: list[dict[str, Any]]

    @classmethod
    def read(cls, directory: Path, world: int) -> Run:
        logs = [
            [json.loads(line) for line in (directory / f"rank{r}.jsonl").read_text().splitlines()] for r in range(world)
        ]
        return cls([log[0] for log in logs], [log[1:-1] for log in logs], [log[-1] for log in logs])


def swap_deltas(steps: list[Rows], key: str) -> list[float]:
    """Per step, how much a swap counter grew, summed over the ranks."""
    out = []
    for step in range(len(steps[0])):
        now = sum(rows[step]["swap"].get(key, 0.0) for rows in steps)
        before = sum(rows[step - 1]["swap"].get(key, 0.0) for rows in steps) if step else 0.0
        out.append(now - before)
    return out


def stall_seconds(steps: list[Rows]) -> dict[str, list[float]]:
    """Per cause, seconds stalled in each step, mean over the ranks."""
    causes = sorted(key for key in steps[0][0]["swap"] if key.startswith("stall_seconds_"))
    world = len(steps)
    return {c.removeprefix("stall_seconds_"): [v / world for v in swap_deltas(steps, c)] for c in causes}


def parity(plain: Run, offloaded: Run) -> dict[str, Any]:
    """Compare the two runs bit for bit over the steps that both took."""
    differences = []
    compared = 0
    for rank, rows in enumerate(plain.steps):
        for before, after in zip(rows, offloaded.steps[rank], strict=False):
            compared += 1
            for what in ("loss", "norm", "digest"):
                if before.get(what) != after.get(what) and (what in before) == (what in after):
                    differences.append(f"rank {rank} step {before['step']} {what}")
    return {"equal": not differences, "steps": compared // max(1, len(plain.steps)), "differences": differences[:10]}


def draw(path: Path, offloaded: Run, plain: Run, unigram: float, held_out: float) -> None:
    """Loss above; bytes and stalls over time below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = offloaded.steps[0]
    steps = [row["step"] for row in rows]
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(9, 9), sharex=True, constrained_layout=True)
    top.plot(steps, [row["mean_loss"] for row in rows], color="tab:blue", linewidth=1.5, label="all states on NVMe")
    plain_rows = plain.steps[0]
    top.plot(
        [row["step"] for row in plain_rows],
        [row["mean_loss"] for row in plain_rows],
        color="tab:orange",
        linestyle="none",
        marker="x",
        markersize=4,
        label="without offload (same bits)",
    )
    top.axhline(unigram, color="grey", linewidth=1, linestyle=":", label="unigram entropy")
    top.axhline(held_out, color="tab:green", linewidth=1, linestyle="--", label="held-out loss at the end")
    top.set_ylabel("loss, nats per byte")
    top.legend(loc="upper right", fontsize=8)
    for key, label in (("disk_read_bytes", "read"), ("disk_written_bytes", "written")):
        middle.plot(steps, [v / 1e6 for v in swap_deltas(offloaded.steps, key)], label=label, linewidth=1.2)
    middle.set_ylabel("MB per step, all ranks")
    middle.set_ylim(bottom=0)
    middle.legend(loc="upper right", fontsize=8)
    stalls = stall_seconds(offloaded.steps)
    bottom.stackplot(steps, list(stalls.values()), labels=[name.replace("_", " ") for name in stalls])
    bottom.plot(steps, [row["seconds"] for row in rows], color="black", linewidth=1, label="whole step")
    bottom.set_ylabel("seconds per step")
    bottom.set_xlabel("step")
    bottom.legend(loc="upper right", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    memory = result["memory"]
    rows = [
        ("model", f"{result['parameters'] / 1e6:.1f} M parameters, {result['dtype']}, {result['world']} ranks"),
        ("states (parameters + optimizer)", human(result["states_bytes"])),
        (
            "daemon's memory for states (host budget)",
            f"{human(result['budget_bytes'])} ({result['budget_share']:.0%} of the states)",
        ),
        ("engine", f"{result['engine']}/{result['driver']}"),
        ("held-out loss", f"{result['held_out_loss']:.3f} nats (unigram entropy {result['unigram_entropy']:.3f})"),
        (
            "same bits as without offload",
            f"{'yes' if result['parity']['equal'] else 'NO'}, {result['parity']['steps']} steps compared",
        ),
        ("step", f"{result['step_seconds']:.3f} s (without offload {result['plain_step_seconds']:.3f} s)"),
        ("read + written per parameter and step", f"{result['bytes_per_parameter_step']:.1f} B"),
        ("disk's share: bytes / (calibrated bandwidth x step)", f"{result['io_utilisation']:.0%}"),
        ("efficiency: the longer of compute and disk / step", f"{result['step_efficiency']:.0%}"),
        ("stalled share of the step", f"{result['stall_share']:.0%}"),
        (
            "daemon, peak resident (budget and its code)",
            f"{human(memory['daemon_peak'])} (allowed {human(memory['daemon_allowed'])})",
        ),
        (
            "ranks, own memory (torch, activations, gradients)",
            ", ".join(human(value) for value in memory["rank_anonymous"]),
        ),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def median_step(rows: Rows, skip: int = 3) -> float:
    """Median seconds of the steps after the first few."""
    seconds: list[float] = [row["seconds"] for row in (rows[skip:] or rows)]
    return median(seconds)
