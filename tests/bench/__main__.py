"""`make bench`: every benchmark in turn, JSON into bench-out/. About ten minutes; nothing else should be running.

Not tests: nothing here passes or fails, and no figure is checked. Compare ratios, never times of two days.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

OUT = Path("bench-out")


def run(name: str, *command: str) -> None:
    """One benchmark in a process of its own; its standard output is the JSON."""
    print(f"== {name}", flush=True)
    with (OUT / f"{name}.json").open("w") as file:
        done = subprocess.run([sys.executable, "-m", *command], stdout=file, check=False)
    if done.returncode:
        print(f"   failed with exit code {done.returncode}", flush=True)


def main() -> None:
    OUT.mkdir(exist_ok=True)
    run("roundtrip-cross", "tests.bench.roundtrip", "--place", "cross")
    run("roundtrip-same", "tests.bench.roundtrip", "--place", "same")
    run("adam", "tests.bench.adam")
    compare = ["--compare", "fio"] if shutil.which("fio") else []
    for clients in ("1", "4"):
        run(f"moving-{clients}", "offloadd.ctl.main", "bench", str(OUT), "--clients", clients, *compare, "-o", "json")
        run(f"checksums-{clients}", "offloadd.ctl.main", "bench", str(OUT), "--clients", clients, "-o", "json")
    for world in ("1", "2"):
        run(f"step-{world}", "tests.bench.step", "--world", world, "--dir", str(OUT))


if __name__ == "__main__":
    main()
