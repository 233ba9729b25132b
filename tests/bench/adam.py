"""Benchmark of the native optimizer step: against a bare memory stream, and against torch's fused AdamW.

`python tests/bench/adam.py [--count N] [--threads N] [--rounds N]` prints one JSON object. All take turns, so that
a change of clock or of a neighbour's load hits all of them; medians are compared. Bandwidth counts each array once per
read and once per write: 28 bytes per element, both for the native step with its 16-bit gradient and copy and for
torch's with an fp32 gradient and none. torch's step is also timed with the copy that training in 16 bits needs, and
the native one also in fp32 throughout. `--peer 'COMMAND with {count} and {threads}'` sets another's kernel beside them:
it must print JSON {"mixed": seconds, "fp32": seconds} per step; it runs once per three rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable

import torch

import offloadd_native


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def native_step(count: int, threads: int) -> Callable[[], object]:
    master, exp_avg, exp_avg_sq = torch.randn(count), torch.zeros(count), torch.zeros(count)
    grad, out = torch.randn(count).to(torch.bfloat16), torch.zeros(count, dtype=torch.bfloat16)
    kept = (master, exp_avg, exp_avg_sq, grad, out)

    def step() -> object:
        pointers = [tensor.data_ptr() for tensor in kept]
        offloadd_native.adam_step(
            *pointers[:4], offloadd_native.BF16, pointers[4], offloadd_native.BF16, count, 1e-3, 0.9, 0.999, 1e-8, 0.01,
            0.5, math.sqrt(0.5), 1.0, True, threads,
        )  # fmt: skip
        return kept

    return step


def native_fp32_step(count: int, threads: int) -> Callable[[], object]:
    kept = (torch.randn(count), torch.zeros(count), torch.zeros(count), torch.randn(count))

    def step() -> object:
        pointers = [tensor.data_ptr() for tensor in kept]
        offloadd_native.adam_step(
            *pointers, offloadd_native.F32, 0, offloadd_native.F32, count, 1e-3, 0.9, 0.999, 1e-8, 0.01, 0.5,
            math.sqrt(0.5), 1.0, True, threads,
        )  # fmt: skip
        return kept

    return step


def peer_seconds(command: str, count: int, threads: int) -> dict[str, float]:
    text = command.replace("{count}", str(count)).replace("{threads}", str(threads))
    done = subprocess.run(shlex.split(text), capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def torch_step(count: int, with_copy: bool) -> Callable[[], object]:
    weight = torch.nn.Parameter(torch.randn(count))
    weight.grad = torch.randn(count)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.01, fused=True)
    out = torch.zeros(count, dtype=torch.bfloat16)

    def step() -> object:
        optimizer.step()
        if with_copy:
            out.copy_(weight.detach())
        return out

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1 << 25, help="elements")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer", help="command of the peer, with {count} and {threads}")
    options = parser.parse_args()
    count, threads = options.count, options.threads
    torch.set_num_threads(threads)
    steps = {
        "native": native_step(count, threads),
        "fp32": native_fp32_step(count, threads),
        "torch": torch_step(count, False),
        "copy": torch_step(count, True),
    }
    for step in steps.values():
        step()  # page everything in
    times: dict[str, list[float]] = {name: [] for name in steps}
    stream: list[float] = []
    peer: list[dict[str, float]] = []
    for number in range(options.rounds):
        if options.peer and number % 3 == 0:
            peer.append(peer_seconds(options.peer, count, threads))
        stream.append(offloadd_native.stream_copy_bytes(threads, 16 * count, 4))
        for name, step in steps.items():
            times[name].append(seconds(step))
    native_s, fp32_s, torch_s, copy_s = (statistics.median(times[name]) for name in steps)
    beside = {
        f"peer_over_native_time_{kind}": round(statistics.median(one[kind] for one in peer) / ours, 3)
        for kind, ours in (("mixed", native_s), ("fp32", fp32_s))
        if peer
    }
    bandwidth, stream_bps = 28 * count / native_s, statistics.median(stream)
    print(
        json.dumps(
            {
                "count": count,
                "threads": threads,
                "cpu_level": offloadd_native.cpu_level(),
                "native_ns_per_element": round(native_s / count * 1e9, 4),
                "torch_fused_ns_per_element": round(torch_s / count * 1e9, 4),
                "native_bps": round(bandwidth),
                "stream_bps": round(stream_bps),
                "native_over_stream": round(bandwidth / stream_bps, 3),
                "torch_over_native_time_fp32": round(torch_s / fp32_s, 3),
                "torch_and_16_bit_copy_over_native_time_mixed": round(copy_s / native_s, 3),
            }
            | beside,
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
