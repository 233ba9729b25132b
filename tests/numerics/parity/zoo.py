"""Small models, each with one oddity that sharding could get wrong, and their batches.

Every entry is `build() -> nn.Module` whose forward takes (x, y) and returns a scalar loss, so that all cells run alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 12
BATCH = 4


def batch(step: int, micro: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return (
        torch.randn(BATCH, 3, WIDTH, generator=generator).to(dtype),
        torch.randn(BATCH, 3, WIDTH, generator=generator).to(dtype),
    )


def mse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).float().square().mean()


class Plain(nn.Module):
    """Linear, LayerNorm, PReLU, Conv1d: the four kinds of saved views."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 3, padding=1)
        self.up = nn.Linear(WIDTH, 50)
        self.norm = nn.LayerNorm(50)
        self.act = nn.PReLU()
        self.down = nn.Linear(50, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(self.down(self.act(self.norm(self.up(self.conv(x))))), y)


class Tied(nn.Module):
    """First and last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(self.last(F.gelu(self.middle(F.gelu(self.first(x))))), y)


class Twice(nn.Module):
    """One module called twice in a forward, and once inside itself by way of a parent."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(self.block(self.other(self.block(x))), y)


class Checkpointed(nn.Module):
    """torch.utils.checkpoint, with a module outside that shares a weight with one inside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH)) for _ in "ab")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        # The first block again, outside any checkpoint: its gradient arrives in two parts when re-entrant.
        return mse(self.blocks[0](x), y)


class Inert(nn.Module):
    """Frozen, unused and partly used parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 7)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.mixed.bias.requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(self.last(self.frozen(self.mixed(x))), y)


class Shapes(nn.Module):
    """0-dim, empty, one-element and non-contiguous parameters, used by the root module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.ones(1))
        self.seven = nn.Parameter(torch.linspace(-1, 1, 7))
        self.across = nn.Parameter(torch.randn(WIDTH, 30).t())
        self.down = nn.Linear(30, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x * self.scale + self.one, self.across) + self.seven.sum() + self.nothing.sum()
        return mse(self.down(hidden), y)


class Borrowing(nn.Module):
    """Parameters used by another module than their owner's: by a parent, by a sibling, inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.store = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        hidden, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        hidden = F.linear(hidden, self.store.weight, self.store.bias)
        return mse(torch.cat([hidden @ self.embed.weight, hidden[:, :1]], dim=1)[:, :3], y)


class _ReturnsParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x @ self.weight, self.bias, self.weight.t()


class Escaping(nn.Module):
    """A module that returns a parameter and a view of one; the caller uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _ReturnsParameters()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden, bias, turned = self.inner(x)
        return mse(self.last(F.gelu(hidden + bias) @ turned), y)


@dataclass
class _Record:
    hidden: torch.Tensor
    extra: list[torch.Tensor] | None = None


class _Output(OrderedDict):  # type: ignore[type-arg]
    """As popular libraries have it: a mapping with attributes."""

    def __getattr__(self, name: str) -> torch.Tensor:
        return self[name]


class _Wrapping(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Parameter(torch.ones(WIDTH))

    def forward(self, given: object) -> object:
        x = given.hidden if hasattr(given, "hidden") else given  # type: ignore[union-attr]
        hidden = torch.tanh(self.linear(x) * self.side)
        if self.how == "dataclass":
            return _Record(hidden, [hidden * self.side])
        if self.how == "mapping":
            return _Output(hidden=hidden, nothing=None)
        return {"nested": [(hidden, None)]}


class Outputs(nn.Module):
    """Dataclass, mapping and nested outputs; a module that is handed the dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = _Wrapping("dataclass"), _Wrapping("mapping"), _Wrapping("nested")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        assert [field.name for field in fields(first)] == ["hidden", "extra"]
        second = self.b(first)
        third = self.c(second.hidden + first.extra[0])
        return mse(third["nested"][0][0], y)


class InPlace(nn.Module):
    """Modules that change their input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.adder = _AddsInPlace()
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(self.last(self.relu(self.adder(self.linear(x)))), y)


class _AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.bias
        return x.mul_(1.5)


class Branching(nn.Module):
    """Takes another branch in every other training forward, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return mse(self.last(self.a(x) if self.calls % 2 else self.b(x)), y)


class Sizes(nn.Module):
    """Tensors that are not multiples of anything, over and under tile sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(513, 101) / 20)
        self.under, self.over = nn.Parameter(torch.randn(8191) / 90), nn.Parameter(torch.randn(8193) / 90)
        self.down = nn.Linear(101, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        lifted = x.reshape(-1).repeat(4)[:513] @ self.wide
        shift = (self.under.sum() + self.over.square().sum()) / 100
        return mse(self.down(F.gelu(lifted + shift)).expand_as(y), y)


class Penalised(nn.Module):
    """A gradient that is differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = torch.tanh(self.b(torch.tanh(self.a(x))))
        if not torch.is_grad_enabled():
            return mse(out, y)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return mse(out, y) + slope.float().square().mean()


class Recursive(nn.Module):
    """Calls itself, with keyword arguments, and keeps tensors in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Descending()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(self.inner(given=[x, {"again": x}], depth=2)[0], y)


class _Descending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, *, given: list[object], depth: int) -> list[torch.Tensor]:
        x = self.linear(given[0]) + given[1]["again"] * self.scale  # type: ignore[index]
        return [x] if depth == 0 else self(given=[torch.tanh(x), {"again": x}], depth=depth - 1)


class Viewed(nn.Module):
    """A module whose output is a view, changed in place by its caller; recurrent weights; parametrized weights."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = _Turning()
        self.across = nn.Linear(3, 3)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.turn(x)
        hidden += 1.0
        hidden.mul_(2.0)
        return mse(self.normed(self.recurrent(self.across(hidden).transpose(1, 2))[0]), y)


class _Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).transpose(1, 2)


class Encoder(nn.Module):
    """Layers that are copies of one, and a fused path in evaluation that reads weights of modules it does not call."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(self.encoder(x), y)


ZOO: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "tied": Tied,
    "twice": Twice,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "checkpoint_reentrant": lambda: Checkpointed(reentrant=True),
    "inert": Inert,
    "shapes": Shapes,
    "borrowing": Borrowing,
    "escaping": Escaping,
    "outputs": Outputs,
    "in_place": InPlace,
    "branching": Branching,
    "sizes": Sizes,
    "penalised": Penalised,
    "recursive": Recursive,
    "viewed": Viewed,
    "encoder": Encoder,
}
