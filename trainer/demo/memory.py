"""What a process has used, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

_FIELDS = {"VmHWM": "peak", "VmRSS": "resident", "RssAnon": "anonymous", "RssShmem": "shared"}


def peak_bytes(pid: int) -> dict[str, int]:
    """peak, resident, anonymous and shared bytes; empty for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines)
    return {_FIELDS[key]: int(value.split()[0]) * 1024 for key, value in pairs if key in _FIELDS}
