"""The ring between two threads: a million entries, no race (ThreadSanitizer), no lost wake-up (optimised)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[3] / "native"


@pytest.mark.parametrize("how", [["-O1", "-fsanitize=thread"], ["-O2"]], ids=["sanitized", "optimised"])
def test_a_million_entries_without_race_or_lost_wake_up(tmp_path: Path, how: list[str]) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    program = tmp_path / "ring_threads"
    sources = [str(NATIVE / "tests" / "ring_tsan.cc"), str(NATIVE / "src" / "ring.cc")]
    flags = ["-std=c++17", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", *how]
    built = subprocess.run(
        [compiler, *flags, *sources, "-o", str(program)], capture_output=True, text=True, timeout=100
    )
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("this compiler comes without ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    # Address randomisation beyond what ThreadSanitizer expects makes it refuse to start on some kernels.
    run = ["setarch", "-R", str(program)] if shutil.which("setarch") else [str(program)]
    ran = subprocess.run(run, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
