"""Benchmark of the engines on one swap path: bandwidth and CPU per device request, engines taking turns.

`python tests/bench/engine.py DIRECTORY [--rounds N] [--seconds S]` prints one JSON object. Each figure is a median over
rounds; CPU time is the whole process's, kernel included.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import select
import statistics
import time

from offloadd.core.records import Direction, Extent, Span, TileKey, TrafficClass, Transfer
from offloadd.core.units import KIB, MIB, PAGE_BYTES
from offloadd.io.engine import Engine, FileTuning
from offloadd.io.mounts import direct_works, scratch_file
from offloadd.io.ringcheck import open_driver
from offloadd.io.select import try_driver
from offloadd.io.threads import ThreadsEngine
from offloadd.io.uring import UringEngine

FILE_BYTES = 512 * MIB
SHAPES = {
    "4k": (PAGE_BYTES, FileTuning(PAGE_BYTES, 64), 64),
    "tile-128k": (8 * MIB, FileTuning(128 * KIB, 64), 8),
    "tile-1m": (8 * MIB, FileTuning(MIB, 32), 8),
}
"""name: (bytes of a transfer, tuning, transfers in flight)"""


def engines() -> dict[str, Engine]:
    made: dict[str, Engine] = {}
    for driver in ("liburing", "native"):
        if try_driver(driver).ok:
            made[f"uring/{driver}"] = UringEngine(open_driver(driver))
    made["threads"] = ThreadsEngine()
    return made


def measure(
    engine: Engine, fd: int, shape: str, direction: Direction, seconds: float, checksum: bool
) -> dict[str, float]:
    """Keep the window full for a time."""
    size, tuning, window = SHAPES[shape]
    engine.register_file(0, fd, tuning)
    poller = select.poll()
    poller.register(engine.fileno(), select.POLLIN)
    requests = engine.statistics()["device_requests"]
    at, moved, free, cpu, started = 0, 0, list(range(window)), time.process_time(), time.perf_counter()
    while True:
        running = time.perf_counter() - started < seconds
        if not running and len(free) == window:
            break
        batch = []
        while running and free:
            slot = free.pop()
            span, extent = Span(0, slot * size, size), Extent(0, at % FILE_BYTES, size)
            batch.append(Transfer(slot, direction, TrafficClass.DEMAND, 0, TileKey(0, 0), span, extent, size, checksum))
            at += size
        engine.submit(batch)
        if not poller.poll(20_000):
            raise SystemExit("an engine announced nothing for 20 s")
        for outcome in engine.reap():
            if outcome.result < 0:
                raise SystemExit(f"a transfer failed: {os.strerror(-outcome.result)}")
            moved += outcome.result
            free.append(outcome.id)
    elapsed = time.perf_counter() - started
    requests = engine.statistics()["device_requests"] - requests
    engine.unregister_file(0)
    return {"bps": moved / elapsed, "cpu_us_per_request": (time.process_time() - cpu) / requests * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3)
    options = parser.parse_args()
    made, memory = engines(), mmap.mmap(-1, 64 * MIB)
    memory.write(os.urandom(64 * MIB))
    direct = direct_works(options.directory)
    found: dict[str, list[dict[str, float]]] = {}
    with scratch_file(options.directory, direct) as fd:
        os.posix_fallocate(fd, 0, FILE_BYTES)
        for engine in made.values():
            engine.register_region(0, memoryview(memory))
        measure(made["threads"], fd, "tile-1m", Direction.WRITE, 1.0, False)  # lay the file out
        for _ in range(options.rounds):
            for shape in SHAPES:
                for direction, checksum in ((Direction.READ, False), (Direction.WRITE, False), (Direction.READ, True)):
                    for name, engine in made.items():
                        label = f"{shape} {direction.name.lower()}{' checksummed' if checksum else ''} {name}"
                        figures = measure(engine, fd, shape, direction, options.seconds, checksum)
                        found.setdefault(label, []).append(figures)
        for engine in made.values():
            engine.close()
    medians = {
        label: {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        for label, runs in found.items()
    }
    print(json.dumps({"directory": options.directory, "direct": direct, "figures": medians}, indent=2))


if __name__ == "__main__":
    main()
