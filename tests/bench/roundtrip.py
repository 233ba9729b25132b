"""Ring round trip and fetch of a resident tile, beside a bare eventfd + asyncio echo between two processes.

`python -m tests.bench.roundtrip [--samples N] [--spacing-us US ...] [--place same|cross|free] [-o FILE]`. Alternating,
medians, JSON. While it measures, another thread scrapes /metrics ten times a second.

Where the kernel puts two processes decides more than what they do: in a virtual machine waking the other core can cost
five times what waking the same core does, and placement is sticky. So both partners, echo and daemon, are given the
same place: the measuring process's core (same), the other one (cross), or whatever the kernel likes (free).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from offloadd.client import Mode, ShardSpec
from offloadd.core.units import KIB, MIB
from tests.daemon import running

ROUNDS = 7


def echo_child(request: int, answer: int) -> None:
    """The other process: asyncio waits on an eventfd and answers on another."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()

        def rung() -> None:
            os.eventfd_read(request)
            os.eventfd_write(answer, 1)

        loop.add_reader(request, rung)
        await asyncio.Event().wait()

    asyncio.run(serve())


def start_echo() -> tuple[int, Callable[[], None]]:
    request, answer = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
    child = os.fork()
    if child == 0:
        echo_child(request, answer)
        os._exit(0)
    poller = select.poll()
    poller.register(answer, select.POLLIN)

    def once() -> None:
        os.eventfd_write(request, 1)
        poller.poll(5000)
        os.eventfd_read(answer)

    return child, once


Call = Callable[[], object]
"""One round trip. What it returns is called afterwards, untimed, unless it is None."""


def sample(once: Call, count: int, spacing_us: float) -> list[float]:
    """Microseconds of each call, with `spacing_us` of idleness before it."""
    out = []
    pause = select.poll()
    for _ in range(count):
        if spacing_us:
            pause.poll(spacing_us / 1000)
        started = time.perf_counter_ns()
        after = once()
        out.append((time.perf_counter_ns() - started) / 1000)
        if callable(after):
            after()
    return out


def place(pid: int, where: str, server: bool) -> None:
    """Put every thread of a process on the core that `where` means for it."""
    if where == "free":
        return
    core = 1 if server and where == "cross" else 0
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), {core})


def scrape(url: str, stop: threading.Event) -> None:
    while not stop.wait(0.1):
        with urllib.request.urlopen(url, timeout=5) as answer:
            answer.read()


def measure(samples: int, spacing_us: float, targets: dict[str, Call]) -> dict[str, Any]:
    """Alternate between the targets; figures over all rounds."""
    taken: dict[str, list[float]] = {name: [] for name in targets}
    for _ in range(ROUNDS):
        for name, once in targets.items():
            taken[name] += sample(once, samples, spacing_us)
    out: dict[str, Any] = {}
    for name, values in taken.items():
        p50, p99 = np.percentile(values, [50, 99])
        out[name] = {"p50_us": float(p50), "p99_us": float(p99)}
    for name in ("nop", "fetch"):
        out[name]["ratio_p50"] = out[name]["p50_us"] / out["echo"]["p50_us"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1000, help="calls per round and target")
    parser.add_argument("--spacing-us", type=float, nargs="+", default=[0, 1000], help="idle time before each call")
    parser.add_argument("--place", choices=["same", "cross", "free"], default="cross")
    parser.add_argument("-o", "--output", default="-")
    options = parser.parse_args()
    child, echo = start_echo()
    place(os.getpid(), options.place, False)
    place(child, options.place, True)
    document: dict[str, Any] = {"rounds": ROUNDS, "samples": options.samples, "place": options.place, "spacing_us": {}}
    with running(memory__host_bytes="32MiB") as daemon:
        place(daemon.process.pid, options.place, True)
        session = daemon.session(host_bytes=16 * MIB, tile_bytes=256 * KIB)
        shard = session.register([ShardSpec("a", "float32", 256 * KIB, "param")])[0]
        session.fetch(shard, 0, Mode.OVERWRITE).wait().store()

        def fetch() -> object:
            return session.fetch(shard, 0, Mode.READ).wait().release

        stop = threading.Event()
        scraper = threading.Thread(target=scrape, args=(str(daemon.status()["metrics"]), stop))
        scraper.start()
        try:
            for spacing in options.spacing_us:
                targets: dict[str, Call] = {"echo": echo, "nop": session.nop, "fetch": fetch}
                document["spacing_us"][f"{spacing:g}"] = measure(options.samples, spacing, targets)
        finally:
            stop.set()
            scraper.join(10)
            os.kill(child, 9)
            os.waitpid(child, 0)
        session.close()
    text = json.dumps(document, indent=2)
    if options.output == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(options.output).write_text(text + "\n")


if __name__ == "__main__":
    main()
