"""What several ranks must do together: start alike, go the same way, notice each other's death, share one model."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer
from tests.daemon import running
from tests.numerics.parity.world import spawn
from tests.numerics.parity.zoo import Encoder, batch
from trainer.zero.errors import CollectiveError, RanksDisagree, UsageError


def config_of(**more: Any) -> dict[str, Any]:
    eager = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, **eager},
        "offloadd": {"timeout_s": 5},
        **more,
    }


def outcome(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"said{rank}.json").read_text())


def say(folder: Path, rank: int, what: Any) -> None:
    (folder / f"said{rank}.json").write_text(json.dumps(what))


def ranks(world: int, target: Callable[..., None], folder: Path, *arguments: object) -> list[Any]:
    codes = spawn(world, target, arguments, folder)
    errors = "\n".join(path.read_text() for path in folder.glob("error*.txt"))
    assert codes == [0] * world, errors
    return [outcome(folder, rank) for rank in range(world)]


class Choosing(nn.Module):
    """Two equal branches; which one is the caller's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left(x) if left else self.right(x)).sum()


def _different_configurations(rank: int, world: int, folder: Path) -> None:
    try:
        trainer.initialize(model=nn.Linear(4, 4), config=config_of(gradient_clipping=1.0 + rank))
    except RanksDisagree as error:
        say(folder, rank, str(error))


def test_ranks_with_different_configurations_name_the_first_difference(tmp_path: Path) -> None:
    for said in ranks(2, _different_configurations, tmp_path):
        assert "gradient_clipping = 2.0" in said
        assert "rank 1" in said


def _different_models(rank: int, world: int, folder: Path) -> None:
    try:
        trainer.initialize(model=nn.Linear(4, 4 + rank), config=config_of())
    except RanksDisagree as error:
        say(folder, rank, str(error))


def test_ranks_with_different_models_name_the_parameter(tmp_path: Path) -> None:
    assert all("parameter weight (5, 4)" in said for said in ranks(2, _different_models, tmp_path))


def _divergent_branches(rank: int, world: int, folder: Path) -> None:
    engine = trainer.initialize(model=Choosing(), config=config_of()).engine
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4), True))
        engine.step()
    try:
        engine(torch.ones(1, 4), rank == 0)
    except CollectiveError as error:
        say(folder, rank, [str(error), engine.backends.param.statistics()["open_leases"]])


def test_ranks_in_different_branches_are_told_where(tmp_path: Path) -> None:
    for said, leases in ranks(2, _divergent_branches, tmp_path):
        assert "left.weight" in said
        assert "right.weight" in said
        assert "rank 0" in said
        assert "rank 1" in said
        assert leases == 0


def _own_learning_rate(rank: int, world: int, folder: Path) -> None:
    engine = trainer.initialize(model=Choosing(), config=config_of()).engine
    engine.backward(engine(torch.ones(1, 4), True))
    (group,) = engine.optimizer.param_groups
    before, group["lr"] = group["lr"], group["lr"] * (1 + rank)
    with pytest.raises(CollectiveError) as caught:
        engine.step()
    group["lr"] = before
    engine.step()
    say(folder, rank, [str(caught.value), engine.global_steps])
    engine.close()


def test_ranks_with_different_learning_rates_are_told_both_and_may_go_on(tmp_path: Path) -> None:
    for said, steps in ranks(2, _own_learning_rate, tmp_path):
        assert "lr 0.01" in said
        assert "lr 0.02" in said
        assert steps == 1


def _changes_alone(rank: int, world: int, folder: Path) -> None:
    stays = {"stage": 3, "stage3_param_persistence_threshold": 1000}
    engine = trainer.initialize(model=Choosing(), config=config_of(zero_optimization=stays)).engine
    said = ""
    try:
        with trainer.zero.GatheredParameters(engine.module.left.weight), torch.no_grad():
            if rank == 0:
                engine.module.left.weight.fill_(3.0)
    except UsageError as error:
        said = str(error)
    engine.backward(engine(torch.ones(1, 4), True))
    engine.step()
    say(folder, rank, [said, engine.global_steps])
    engine.close()


def test_a_change_on_one_rank_alone_is_refused_there_and_costs_the_others_nothing(tmp_path: Path) -> None:
    first, second = ranks(2, _changes_alone, tmp_path)
    assert "without modifier_rank" in first[0]
    assert second[0] == ""
    assert first[1] == second[1] == 1


def _more_forwards(rank: int, world: int, folder: Path) -> None:
    engine = trainer.initialize(model=Choosing(), config=config_of()).engine
    if rank == 1:
        engine(torch.ones(1, 4), True)
    try:
        engine.backward(engine(torch.ones(1, 4), True))
    except CollectiveError as error:
        say(folder, rank, str(error))
        os._exit(0)


def test_a_rank_that_calls_forward_once_more_is_told(tmp_path: Path) -> None:
    for said in ranks(2, _more_forwards, tmp_path):
        assert "ranks went different ways" in said


def _one_dies(rank: int, world: int, folder: Path) -> None:
    engine = trainer.initialize(model=Choosing(), config=config_of()).engine
    engine.backward(engine(torch.ones(1, 4), True))
    if rank == 1:
        say(folder, rank, "gone")
        os._exit(0)
    try:
        engine.step()
    except CollectiveError as error:
        say(folder, rank, str(error))
        os._exit(0)


def test_a_rank_that_dies_is_named_by_what_was_waited_for(tmp_path: Path) -> None:
    said = ranks(2, _one_dies, tmp_path)
    assert "the gradient norm" in said[0]
    assert said[1] == "gone"


def _late(rank: int, world: int, folder: Path) -> None:
    engine = trainer.initialize(model=Choosing(), config=config_of(offloadd={"timeout_s": 1})).engine
    marker = folder / "rank0_gave_up"
    if rank == 1:
        os.mkfifo(marker) if not marker.exists() else None
        with marker.open():  # Until rank 0 opens it to say that it gave up.
            say(folder, rank, "late")
        os._exit(0)
    try:
        engine(torch.ones(1, 4), True)
    except CollectiveError as error:
        say(folder, rank, str(error))
        if not marker.exists():
            os.mkfifo(marker)
        marker.open("w").close()
        os._exit(0)


def test_a_rank_that_does_not_come_is_waited_for_only_so_long(tmp_path: Path) -> None:
    assert "waited up to 1 s" in ranks(2, _late, tmp_path)[0]


def _made_inside_init(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(rank)  # Only rank 0's values may count.
    with trainer.zero.Init(config=config_of()):
        model = nn.Sequential(nn.Linear(4, 10), nn.Linear(10, 3))
    held = sum(zero.resting.numel() for zero in {p._zero for p in model.parameters()})  # type: ignore[attr-defined]
    engine = trainer.initialize(model=model, config=config_of()).engine
    losses = []
    for number in range(3):
        loss = engine(torch.full((1, 4), float(number + rank))).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with trainer.zero.GatheredParameters(model):
        say(folder, rank, [held, model[0].weight.tolist(), losses])


def test_a_model_made_inside_init_is_rank_zeros_and_held_in_shards(tmp_path: Path) -> None:
    (held0, weights0, _), (held1, weights1, _) = ranks(2, _made_inside_init, tmp_path)
    assert weights0 == weights1
    assert held0 == held1 == (40 + 10 + 30 + 4) // 2


class Edited(nn.Module):
    """A constructor that goes through all parameters of its children, in every usual way."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Encoder()
        self.head = nn.Linear(12, 12)
        self.tail = nn.Linear(12, 12)
        self.head.weight = self.model.encoder.layers[0].self_attn.out_proj.weight
        self.apply(self._initialise)
        self.live_max = 0
        for param in self.parameters():
            with torch.no_grad():
                param[0] *= 2
            self.live_max = max(
                self.live_max, sum(p._zero.storage.nbytes() for p in self.parameters() if is_sharded(p))
            )
        self.tail.weight.data.copy_(self.head.weight.data.t() + self.tail.weight.data)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.1)
            module.bias.data.normal_()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.model(self.tail(self.head(x)), y)


def is_sharded(param: nn.Parameter) -> bool:
    return hasattr(param, "_zero")


def _made_by_editing(rank: int, world: int, folder: Path, endpoint: str, inside: bool) -> None:
    torch.manual_seed(5 + rank)  # Only rank 0's values may count.
    side = {"device": "nvme", "endpoint": endpoint} if endpoint else {"device": "none"}
    config = config_of(bf16={"enabled": True})
    config["zero_optimization"] |= {"offload_param": side, "offload_optimizer": side}
    config["offloadd"] |= {"host_bytes": 4 << 20, "swap_bytes": 16 << 20, "timeout_s": 30}
    with trainer.zero.Init(config=config, enabled=inside):
        model = Edited()
    engine = trainer.initialize(model=model, config=config).engine
    with trainer.zero.GatheredParameters(model):
        bits = {name: param.view(torch.int16).tolist() for name, param in model.named_parameters()}
    losses = []
    for number in range(3):
        loss = engine(*batch(number, 0, rank, torch.bfloat16))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    say(folder, rank, [bits, losses, torch.rand(1).item(), model.live_max])
    engine.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("offloaded", [False, True])
def test_a_constructor_that_edits_its_children_gives_the_same_bits_inside_init(
    tmp_path: Path, world: int, offloaded: bool
) -> None:
    found = {}
    with running() if offloaded else contextlib.nullcontext() as daemon:
        endpoint = daemon.endpoint if daemon is not None else ""
        for inside in (False, True):
            (tmp_path / str(inside)).mkdir()
            found[inside] = ranks(world, _made_by_editing, tmp_path / str(inside), endpoint, inside)
    for outside, inside in zip(found[False], found[True], strict=True):
        assert inside[:3] == outside[:3]
        assert outside[3] == 0
        assert inside[3] == 36 * 12 * 4  # The largest parameter: never two at a time.
    assert len({json.dumps(rank[0]) for rank in found[True]}) == 1


def _only_rank_zero_edits(rank: int, world: int, folder: Path) -> None:
    with trainer.zero.Init(config=config_of()):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        try:
            model[rank].weight.data.zero_()
        except CollectiveError as error:
            say(folder, rank, str(error))
            os._exit(0)


def test_ranks_that_edit_different_parameters_are_told(tmp_path: Path) -> None:
    for said in ranks(2, _only_rank_zero_edits, tmp_path):
        assert "the use of Linear.weight" in said or "the partition of" in said


def _edited_on_rank_one(rank: int, world: int, folder: Path) -> None:
    model = nn.Linear(3, 3)
    engine = trainer.initialize(model=model, config=config_of()).engine
    with trainer.zero.GatheredParameters(model, modifier_rank=1), torch.no_grad():
        model.weight.fill_(float(rank))
    with trainer.zero.GatheredParameters(model):
        say(folder, rank, model.weight.flatten().tolist())
    engine.close()


def test_the_modifier_ranks_values_are_kept(tmp_path: Path) -> None:
    assert ranks(2, _edited_on_rank_one, tmp_path) == [[1.0] * 9, [1.0] * 9]


@pytest.mark.parametrize("scatter", [True, False])
def test_both_ways_of_reducing_give_the_mean(tmp_path: Path, scatter: bool) -> None:
    target = _reduced_scattered if scatter else _reduced_whole
    assert [round(norm, 5) for norm in ranks(3, target, tmp_path)] == [round(2.0 * 3**0.5, 5)] * 3


def _reduced(rank: int, folder: Path, scatter: bool) -> None:
    config = config_of()
    config["zero_optimization"]["reduce_scatter"] = scatter
    engine = trainer.initialize(model=nn.Linear(3, 1, bias=False), config=config).engine
    engine.backward(engine(torch.full((1, 3), float(rank + 1))).sum())
    engine.step()
    say(folder, rank, engine.get_global_grad_norm())


def _reduced_scattered(rank: int, world: int, folder: Path) -> None:
    _reduced(rank, folder, True)


def _reduced_whole(rank: int, world: int, folder: Path) -> None:
    _reduced(rank, folder, False)
