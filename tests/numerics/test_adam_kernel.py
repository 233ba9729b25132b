"""The native optimizer step against the torch reference, bit for bit: sizes, types, instruction sets, threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offloadd_native
from trainer.optim.hyper import AdamHyper
from trainer.optim.reference import adam_reference

DTYPES = {torch.float32: offloadd_native.F32, torch.bfloat16: offloadd_native.BF16, torch.float16: offloadd_native.F16}
LEVELS = offloadd_native.cpu_levels()
NAMES = ["f32", "bf16", "f16"]
BY_NAME = dict(zip(NAMES, DTYPES, strict=True))


@pytest.fixture(autouse=True)
def best_level_afterwards() -> Iterator[None]:
    yield
    offloadd_native.set_cpu_level(LEVELS[0])


def scalars(step: int = 3, **changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "bias_correction1": 1 - 0.9**step,
        "bias_correction2_sqrt": math.sqrt(1 - 0.999**step),
        "grad_scale": 1 / 3,
        "adamw": True,
    }
    return values | changes


def state(count: int, grad: torch.dtype, out: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(count, generator=generator) * scale

    return {
        "master": normal(1.0),
        "exp_avg": normal(0.1),
        "exp_avg_sq": normal(0.1).square(),
        "grad": normal(1.0).to(grad),
        "out": torch.zeros(count, dtype=out),
    }


def native(s: dict[str, torch.Tensor], threads: int = 1, first: int = 0, last: int | None = None, **kw: object) -> None:
    part = {name: tensor[first:last] for name, tensor in s.items()}
    offloadd_native.adam_step(
        part["master"].data_ptr(),
        part["exp_avg"].data_ptr(),
        part["exp_avg_sq"].data_ptr(),
        part["grad"].data_ptr(),
        DTYPES[part["grad"].dtype],
        part["out"].data_ptr(),
        DTYPES[part["out"].dtype],
        part["master"].numel(),
        threads=threads,
        **kw,  # type: ignore[arg-type]
    )


def reference(s: dict[str, torch.Tensor], **kw: object) -> None:
    adam_reference(s["master"], s["exp_avg"], s["exp_avg_sq"], s["grad"], s["out"], AdamHyper(**kw))  # type: ignore[arg-type]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit patterns, except that every NaN equals every other."""
    kind = torch.int32 if left.element_size() == 4 else torch.int16
    both_nan = left.isnan() & right.isnan()
    return bool(((left.view(kind) == right.view(kind)) | both_nan).all())


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for name in left:
        assert same_bits(left[name], right[name]), name


def clone(s: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in s.items()}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("grad", NAMES)
@pytest.mark.parametrize("out", NAMES)
@pytest.mark.parametrize("count", [1, 7, 1023, 16_385, 50_001])
def test_bits_are_those_of_the_reference(level: str, grad: str, out: str, count: int) -> None:
    offloadd_native.set_cpu_level(level)
    mine = state(count, BY_NAME[grad], BY_NAME[out])
    theirs = clone(mine)
    for step in (1, 2, 3):
        native(mine, threads=2, **scalars(step))
        reference(theirs, **scalars(step))
    assert_same(mine, theirs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("adamw", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_both_ways_of_weight_decay(level: str, adamw: bool, weight_decay: float) -> None:
    offloadd_native.set_cpu_level(level)
    mine = state(5000, torch.bfloat16, torch.bfloat16)
    theirs = clone(mine)
    native(mine, **scalars(adamw=adamw, weight_decay=weight_decay))
    reference(theirs, **scalars(adamw=adamw, weight_decay=weight_decay))
    assert_same(mine, theirs)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    mine = state(100_003, torch.bfloat16, torch.bfloat16)
    theirs = clone(mine)
    native(mine, threads=threads, **scalars())
    native(theirs, threads=1, **scalars())
    assert_same(mine, theirs)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=4),
    level=st.sampled_from(LEVELS),
    seed=st.integers(0, 1000),
)
def test_slices_give_the_bits_of_the_whole(count: int, cuts: list[int], level: str, seed: int) -> None:
    whole = state(count, torch.float16, torch.float16, seed)
    sliced = clone(whole)
    offloadd_native.set_cpu_level(LEVELS[0])
    native(whole, **scalars())
    offloadd_native.set_cpu_level(level)
    edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
    for first, last in itertools.pairwise(edges):
        native(sliced, first=first, last=last, **scalars())
    assert_same(whole, sliced)


SPECIALS = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1e-45,
    -1e-45,
    1e-38,
    3e38,
    -3e38,
    65504.0,
    65519.0,
    65520.0,
    6e-8,
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["master", "exp_avg", "grad"])
@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_infinities_nans_and_subnormals_come_out_as_in_the_reference(level: str, name: str, half: str) -> None:
    offloadd_native.set_cpu_level(level)
    mine = state(64, BY_NAME[half], BY_NAME[half])
    mine[name][: len(SPECIALS)] = torch.tensor(SPECIALS).to(mine[name].dtype)
    theirs = clone(mine)
    native(mine, **scalars())
    reference(theirs, **scalars())
    assert_same(mine, theirs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_every_16_bit_gradient_is_widened_exactly(level: str, half: str) -> None:
    offloadd_native.set_cpu_level(level)
    mine = state(65_536, BY_NAME[half], BY_NAME[half])
    mine["grad"] = torch.arange(-32_768, 32_768, dtype=torch.int16).view(BY_NAME[half])
    theirs = clone(mine)
    plain = scalars(beta1=0.0, grad_scale=1.0)  # the first moment is then the gradient itself
    native(mine, **plain)
    reference(theirs, **plain)
    assert_same(mine, theirs)


@settings(max_examples=40, deadline=None)
@given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=200), level=st.sampled_from(LEVELS))
def test_any_fp32_weight_is_narrowed_as_torch_does(bits: list[int], level: str) -> None:
    offloadd_native.set_cpu_level(level)
    weights = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for half in (torch.bfloat16, torch.float16):
        mine = state(len(bits), half, half)
        mine["master"].copy_(weights)
        native(mine, **scalars(lr=0.0))  # leaves the weights as they are
        assert same_bits(mine["out"], mine["master"].to(half))


def test_without_an_output_only_the_state_changes() -> None:
    s = state(100, torch.float32, torch.bfloat16)
    pointers = [s[name].data_ptr() for name in ("master", "exp_avg", "exp_avg_sq", "grad")]
    theirs = clone(s)
    offloadd_native.adam_step(*pointers, offloadd_native.F32, 0, 0, 100, threads=1, **scalars())  # type: ignore[arg-type]
    reference(theirs, **scalars())
    theirs["out"].zero_()
    assert_same(s, theirs)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype"):
        offloadd_native.adam_step(0, 0, 0, 0, 9, 0, 0, 0, threads=1, **scalars())  # type: ignore[arg-type]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="no level"):
        offloadd_native.set_cpu_level("mmx")
