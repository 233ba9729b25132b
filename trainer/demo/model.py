"""A decoder in the manner of GPT: pre-norm blocks, learned positions, tied to nothing but plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class DecoderSize:
    """Shape of the decoder; the defaults give 10.8 M parameters over bytes."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    vocabulary: int = 256
    sequence: int = 64

    def parameters(self) -> int:
        """Elements of all parameters."""
        block = 12 * self.width**2 + 13 * self.width
        tables = (2 * self.vocabulary + self.sequence) * self.width
        return self.layers * block + tables + 2 * self.width


class Block(nn.Module):
    """Attention and a four times wider MLP, both added to the residual stream."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] -> the same."""
        batch, sequence, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        inner: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + inner


class Decoder(nn.Module):
    """Next-token prediction; `forward` gives the mean cross entropy in nats."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Two [batch, sequence] tensors of int64 -> a scalar."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
