"""Byte-level text from the Python standard library's own sources on this machine: no download, always there."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

TEXT_BYTES_MAX = 8_000_000
HELD_OUT_SHARE = 0.05


def standard_library() -> bytes:
    """Sources of the top-level modules and the first packages, sorted by name, up to TEXT_BYTES_MAX."""
    root = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[bytes] = []
    total = 0
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-l]*/*.py")):
        if "site-packages" in path.parts or total >= TEXT_BYTES_MAX:
            continue
        pieces.append(path.read_bytes())
        total += len(pieces[-1])
    return b"\n".join(pieces)[:TEXT_BYTES_MAX]


class Text:
    """Training and held-out parts as uint8 tensors, and batches that are a pure function of (seed, step, rank)."""

    def __init__(self, data: bytes, sequence: int, seed: int) -> None:
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        cut = int(len(tokens) * (1 - HELD_OUT_SHARE))
        self.train, self.held_out = tokens[:cut], tokens[cut:]
        self._sequence = sequence
        self._seed = seed

    def batch(self, step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, next tokens), both [size, sequence] int64."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step * 1009 + rank)
        return self._windows(self.train, size, generator)

    def held_out_batches(self, count: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The same windows every time."""
        generator = torch.Generator().manual_seed(self._seed)
        return [self._windows(self.held_out, size, generator) for _ in range(count)]

    def _windows(
        self, source: torch.Tensor, size: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(0, len(source) - self._sequence - 1, (size,), generator=generator)
        index = starts[:, None] + torch.arange(self._sequence + 1)[None, :]
        windows = source[index].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def unigram_entropy(self) -> float:
        """Cross entropy in nats of the held-out bytes under the training bytes' frequencies: what a model that
        ignores context can reach."""
        counts = torch.bincount(self.train.long(), minlength=256).double() + 1
        logp = (counts / counts.sum()).log()
        return float(-logp[self.held_out.long()].mean())
