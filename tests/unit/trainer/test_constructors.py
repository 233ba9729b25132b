"""zero.Init and constructors that use or change parameters of modules that are complete: the bits are those of
building the model without it, and no rank holds the whole model."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trainer
from tests.numerics.parity.cells import same_bits
from tests.unit.trainer.making import config_of
from trainer.zero.stub import is_stub


def on(**members: Any) -> Callable[[], nn.Module]:
    """A model of three layers and whatever `edit` does to them in the constructor."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(8, 6)
            self.lin = nn.Linear(6, 8)
            self.norm = nn.LayerNorm(6)
            members["edit"](self)

    return Net


def _data(net: Any) -> None:
    net.lin.weight.data.normal_(0.0, 0.02)
    net.lin.bias.data.fill_(0.5)
    net.emb.weight.data[3].zero_()


def _items(net: Any) -> None:
    with torch.no_grad():
        net.lin.weight[0] = 0
        net.lin.weight[1, 2:4] += net.norm.weight[:2]
        net.emb.weight.copy_(net.lin.weight)
        net.lin.bias.mul_(2).add_(1)


def _torch_init(net: Any) -> None:
    nn.init.xavier_uniform_(net.lin.weight)
    nn.init.trunc_normal_(net.emb.weight, std=0.02)
    nn.init.orthogonal_(net.lin.weight)
    nn.init.constant_(net.norm.bias, 1.0)
    nn.init.kaiming_uniform_(net.emb.weight, a=math.sqrt(5))


def _apply(net: Any) -> None:
    def init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.02)
        for name, param in net.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(param, std=0.01)

    net.apply(init_weights)


def _recursive_without_apply(net: Any) -> None:
    for module in net.modules():
        for param in module.parameters(recurse=False):
            param.data.uniform_(-1, 1)


def _tied(net: Any) -> None:
    net.lin.weight = net.emb.weight
    net.lin.weight.data.mul_(3)


def _new_data(net: Any) -> None:
    net.emb.weight.data = torch.randn(8, 6)
    net.lin.weight.data = net.emb.weight.data.t().contiguous().t()
    net.norm.weight.data = torch.ones(4)  # Another shape.
    net.norm.bias.data = torch.ones(6, dtype=torch.float64).float()


def _new_parameters(net: Any) -> None:
    net.lin.weight = nn.Parameter(net.lin.weight.data.clone())
    net.norm.weight = nn.Parameter(net.lin.bias[:6])
    net.emb.weight = nn.Parameter(net.emb.weight)
    net.extra = nn.ParameterList([nn.Parameter(net.emb.weight[0].detach().clone())])


def _several_views(net: Any) -> None:
    weight, table = net.lin.weight.data, net.emb.weight.data
    for row in range(8):
        weight[row] = table[row] * 2
        table[row] = weight[7 - row] + net.norm.weight.data
    weight.add_(1)


def _numpy(net: Any) -> None:
    net.lin.weight.detach().numpy()[:] = 7.0


def _statistics(net: Any) -> None:
    net.register_buffer("scale", net.lin.weight.std() / net.emb.weight.detach().std())
    nn.init.normal_(net.lin.weight, std=net.scale.item())


def _block(net: Any) -> None:
    net.lin.weight.data.zero_()
    with trainer.zero.GatheredParameters([net.lin.weight, net.emb.weight], modifier_rank=0), torch.no_grad():
        net.lin.weight.add_(net.emb.weight)


def _copies(net: Any) -> None:
    net.clones = nn.ModuleList(copy.deepcopy(net.lin) for _ in range(3))
    net.clones[1].weight.data.normal_()
    net.lin.weight.data.zero_()
    net.late = copy.deepcopy(net.lin)


def _frozen(net: Any) -> None:
    net.emb.weight.requires_grad = False
    net.lin.requires_grad_(False)
    net.frozen = copy.deepcopy(net.lin)


def _saved_dict(net: Any) -> None:
    net.lin.load_state_dict({"weight": torch.randn(8, 6), "bias": torch.randn(8)})
    net.norm.double().float()


def _parametrized(net: Any) -> None:
    nn.utils.parametrizations.weight_norm(net.lin)
    nn.utils.parametrizations.orthogonal(net.emb)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        edit.__name__: on(edit=edit)
        for edit in (
            *(_data, _items, _torch_init, _apply, _recursive_without_apply, _tied, _new_data, _new_parameters),
            *(_several_views, _numpy, _statistics, _block, _copies, _frozen, _saved_dict, _parametrized),
        )
    },
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "encoder_layer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16),
    "lstm": lambda: nn.LSTM(4, 4, 2),
}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    with trainer.zero.GatheredParameters(model):
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in named}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_of_building_without(name: str, dtype: torch.dtype | None) -> None:
    torch.manual_seed(3)
    plain = MODELS[name]()
    rng = torch.get_rng_state()
    if dtype is not None:
        for param in plain.parameters():
            param.data = param.data.to(dtype)
    torch.manual_seed(3)
    with trainer.zero.Init(dtype=dtype):
        model = MODELS[name]()
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(is_stub(param) for param in model.parameters())
    expected = values(plain)
    found = values(model)
    assert found.keys() == expected.keys()
    assert [n for n in expected if not same_bits(found[n], expected[n])] == []
    grads = {n: p.requires_grad for n, p in plain.named_parameters()}
    assert {n: p.requires_grad for n, p in model.named_parameters()} == grads


def test_edits_between_constructors_and_the_end_of_the_block_count() -> None:
    with trainer.zero.Init():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        for param in model.parameters():
            nn.init.constant_(param, 2.0)
        copied = copy.deepcopy(model)
    assert all(is_stub(param) for param in [*model.parameters(), *copied.parameters()])
    assert {v for t in [*values(model).values(), *values(copied).values()] for v in t.flatten().tolist()} == {2.0}
    with pytest.raises(trainer.zero.ParameterNotGathered):
        nn.init.zeros_(model[0].weight)


def live(model: nn.Module) -> int:
    return sum(param._zero.storage.nbytes() for param in model.parameters())  # type: ignore[attr-defined]


def test_no_more_than_one_parameter_is_whole_while_a_constructor_goes_through_all() -> None:
    seen = []

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16), 4, enable_nested_tensor=False)
            seen.append(live(self))
            for param in self.parameters():
                if param.dim() > 1:
                    nn.init.xavier_uniform_(param)
                else:
                    param.data.zero_()
                seen.append(live(self))

    with trainer.zero.Init():
        model = Deep()
    assert seen[0] == 0
    assert max(seen) == 3 * 16 * 16 * 4
    assert live(model) == 0


@pytest.mark.parametrize(
    "keep", [lambda weight: weight.data, lambda weight: weight.t(), lambda weight: weight.detach().numpy()]
)
def test_a_tensor_over_values_that_outlives_the_constructor_is_refused(keep: Any) -> None:
    def edit(net: Any) -> None:
        net.kept = keep(net.lin.weight)

    said = r"over the values of Linear\.weight outlives .* Net.*clone"
    with pytest.raises(trainer.zero.UsageError, match=said), trainer.zero.Init():
        on(edit=edit)()


def test_one_that_outlives_the_block_is_reported_and_stays_readable(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), trainer.zero.Init():
        model = nn.Linear(3, 3)
        data = model.weight.data
        data.fill_(4.0)
    assert sum("values of Linear.weight outlives" in message for message in caplog.messages) == 1
    assert values(model)["weight"].tolist() == data.tolist() == [[4.0] * 3] * 3


def test_a_constructor_that_raises_leaves_nothing_gathered() -> None:
    def edit(net: Any) -> None:
        net.lin.weight.data.fill_(1.0)
        models.append(net)
        raise KeyError("user code")

    models: list[nn.Module] = []
    with trainer.zero.Init(), pytest.raises(KeyError):
        on(edit=edit)()
    with pytest.raises(KeyError), trainer.zero.Init():
        on(edit=edit)()
    for model, kept in zip(models, (True, False), strict=True):
        assert live(model) == 0
        assert (values(model)["lin.weight"] == 1.0).all().item() is kept


def test_a_parameter_without_values_is_refused() -> None:
    with pytest.raises(trainer.zero.UsageError, match=r"Linear\.weight is made on device meta"), trainer.zero.Init():
        nn.Linear(3, 3, device="meta")


def test_a_parameter_without_a_shape_is_refused() -> None:
    with pytest.raises(trainer.zero.UsageError, match=r"LazyLinear\.weight has no shape"), trainer.zero.Init():
        nn.LazyLinear(3)


def test_an_encoder_trains_as_one_made_outside() -> None:
    def losses(inside: bool) -> list[float]:
        torch.manual_seed(0)
        config = config_of(bf16={"enabled": True})
        with trainer.zero.Init(config=config, enabled=inside):
            model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        engine = trainer.initialize(model=model, config=config).engine
        found = []
        for number in range(3):
            loss = engine(torch.full((2, 3, 8), float(number)).bfloat16()).float().square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        engine.close()
        return found

    assert losses(True) == losses(False)
