"""Reading the configuration."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic.fields import FieldInfo

from trainer.config import ConfigError, TrainerConfig, load_config, resolve_batch
from trainer.config.base import Block


def base(**more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, **more}


def zero(**more: Any) -> dict[str, Any]:
    return base(zero_optimization={"stage": 3, **more})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (base(train_batchsize=1), "did you mean train_batch_size"),
        (zero(stage3_prefetch_bucket_siz=1), "did you mean zero_optimization.stage3_prefetch_bucket_size"),
        (
            zero(offload_param={"device": "cpu", "nvme_pth": "/x"}),
            "did you mean zero_optimization.offload_param.nvme_path",
        ),
        (base(aio={"thread_count": 2}), "did you mean aio.intra_op_parallelism"),
        (base(offload_param={}), "did you mean zero_optimization.offload_param"),
        (base(fp16={"enable": True}), "did you mean fp16.enabled"),
        (base(offloadd={"host_byte": 1}), "did you mean offloadd.host_bytes"),
        (base(optimizer={"type": "Adam", "params": {"learning_rate": 1}}), "unknown key learning_rate"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (base(fp16={"enabled": True}), "fp16.enabled is not supported yet"),
        (base(scheduler={"type": "WarmupLR"}), "scheduler is not supported yet"),
        (zero(zero_hpz_partition_size=2), "zero_hpz_partition_size is not supported yet"),
        (zero(zero_quantized_weights=True), "zero_quantized_weights is not supported yet"),
        (zero(zenflow={}), "zenflow is not supported yet"),
        (zero(offload_optimizer={"device": "cpu", "super_offload": True}), "super_offload is not supported yet"),
        (zero(offload_optimizer={"device": "cpu", "ratio": 0.5}), "ratio below 1 is not supported yet"),
        (base(optimizer={"type": "Muon"}), "optimizer.type Muon is not supported yet"),
        (base(zero_optimization={"stage": 2}), "stage 2 is not supported yet"),
        (base(aio={"use_gds": True}), "aio.use_gds is not supported yet"),
        (base(flops_profiler={"enabled": True}), "flops_profiler.enabled is not supported yet"),
        (zero(cpu_offload=True), "deprecated"),
    ],
)
def test_what_is_not_built_is_refused_in_one_sentence(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"device": "nvme"}, "nvme_path"),
        ({"device": "cpu", "endpoint": "unix:///run/x"}, "device nvme only"),
        ({"device": "nvme", "endpoint": "tcp://1.2.3.4:5"}, "not an endpoint"),
        ({"device": "disk"}, "device"),
        ({"device": "cpu", "buffer_count": "5"}, "valid integer"),
        ({"device": "cpu", "pin_memory": 1}, "valid boolean"),
    ],
)
def test_an_offload_block_that_cannot_work_is_refused(block: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(zero(offload_param=block))


@pytest.mark.parametrize("endpoint", ["unix:///run/offloadd/o.sock", "grpc://127.0.0.1:7070"])
def test_an_endpoint_needs_no_path(endpoint: str) -> None:
    config, _ = load_config(zero(offload_optimizer={"device": "nvme", "endpoint": endpoint}))
    assert config.zero_optimization.offload_optimizer.endpoint == endpoint


def test_both_spellings_are_one_key() -> None:
    long, _ = load_config(zero(stage3_max_live_parameters=5))
    short, _ = load_config(zero(max_live_parameters=5))
    assert long == short
    with pytest.raises(ConfigError, match="are the same key"):
        load_config(zero(stage3_max_live_parameters=5, max_live_parameters=5))


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 3, "stage": 2}}')
    with pytest.raises(ConfigError, match="stage is given twice"):
        load_config(path)


def test_a_file_reads_as_the_dict_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(base()))
    assert load_config(path) == load_config(base())


def test_a_file_that_is_not_json_says_where(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{\n,}")
    with pytest.raises(ConfigError, match="line 2"):
        load_config(path)


def test_auto_stands_for_the_default_and_is_reported() -> None:
    config, replaced = load_config(
        base(gradient_clipping="auto", optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    )
    assert config.gradient_clipping == 1.0
    assert [(one.key, one.value) for one in replaced] == [("gradient_clipping", 1.0), ("optimizer.params.lr", 1e-3)]


def test_auto_without_a_default_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r'optimizer.type: "auto" has no default'):
        load_config(base(optimizer={"type": "auto"}))


def test_whole_floats_are_counts_and_others_are_not() -> None:
    assert load_config(zero(reduce_bucket_size=5e8))[0].zero_optimization.reduce_bucket_size == 500_000_000
    with pytest.raises(ConfigError, match="reduce_bucket_size"):
        load_config(zero(reduce_bucket_size=0.5))


@pytest.mark.parametrize(("text", "count"), [("512MiB", 512 << 20), ("2GB", 2 * 10**9), (4096, 4096), ("1.5KiB", 1536)])
def test_sizes_may_carry_units(text: str | int, count: int) -> None:
    assert load_config(base(offloadd={"host_bytes": text}))[0].offloadd.host_bytes == count


def test_gradient_clipping_is_on_unless_told_otherwise() -> None:
    assert load_config(base())[0].gradient_clipping == 1.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((16, 2, None), (16, 2, 2)),
        ((16, None, 2), (16, 2, 2)),
        ((None, 2, 2), (16, 2, 2)),
        ((16, None, None), (16, 4, 1)),
        ((None, 2, None), (8, 2, 1)),
        ((16, 2, 2), (16, 2, 2)),
    ],
)
def test_the_batch_triangle_completes_itself(given: tuple[int | None, ...], expected: tuple[int, int, int]) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    chosen = {key: value for key, value in zip(keys, given, strict=True) if value is not None}
    batch = resolve_batch(load_config({"zero_optimization": {"stage": 3}, **chosen})[0], world=4)
    assert (batch.train, batch.micro, batch.accumulation) == expected


@pytest.mark.parametrize(
    "given", [{}, {"train_batch_size": 6}, {"train_batch_size": 3, "train_micro_batch_size_per_gpu": 1}]
)
def test_a_batch_triangle_that_does_not_close_is_refused(given: dict[str, int]) -> None:
    config, _ = load_config({"zero_optimization": {"stage": 3}, **given})
    with pytest.raises(ConfigError):
        resolve_batch(config, world=4)


def test_a_rich_file_of_an_existing_setup_loads() -> None:
    rich = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": "auto",
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
        "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True},
        "activation_checkpointing": {"partition_activations": False},
        "comms_logger": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_param": {
                "device": "nvme",
                "nvme_path": "/nvme",
                "pin_memory": True,
                "buffer_count": 5,
                "buffer_size": 1e8,
            },
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pipeline_read": True, "fast_init": False},
        },
    }
    assert load_config(rich)[0].zero_optimization.offload_param.buffer_size == 100_000_000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e300])
def test_a_wait_that_is_no_number_of_seconds_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"^offloadd\.timeout_s: .* \(got .*\)$"):
        load_config({"zero_optimization": {"stage": 3}, "offloadd": {"timeout_s": value}})


@pytest.mark.parametrize("params", [{"lr": float("nan")}, {"betas": [0.9, float("inf")]}, {"eps": float("inf")}])
def test_numbers_are_finite(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="finite"):
        load_config({"zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam", "params": params}})


def _fields(block: type[Block], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, field in block.model_fields.items():
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        inner = next((kind for kind in kinds if issubclass(kind, Block)), None)
        if inner is None:
            yield (*path, name), field
        elif inner.built:
            yield from _fields(inner, (*path, name))


FIELDS = dict(_fields(TrainerConfig))


def test_every_key_has_a_meaning() -> None:
    assert [path for path, field in FIELDS.items() if not field.description] == []


def _with(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    raw: dict[str, Any] = base(optimizer={"type": "AdamW"}, gradient_clipping=0.0)
    level = raw
    for name in path[:-1]:
        level = level.setdefault(name, {})
    level[path[-1]] = value
    return raw


@pytest.mark.parametrize("path", [path for path, f in FIELDS.items() if type(f.default) is bool], ids=".".join)
def test_a_switch_is_marked_as_unsupported_if_and_only_if_it_is_refused(path: tuple[str, ...]) -> None:
    field = FIELDS[path]
    marked = "ot supported yet" in (field.description or "")
    with pytest.raises(ConfigError, match="not supported yet") if marked else contextlib.nullcontext():
        load_config(_with(path, not field.default))


UNBUILT = [name for name, f in TrainerConfig.model_fields.items() if not getattr(type(f.default), "built", True)]


@pytest.mark.parametrize("name", UNBUILT)
def test_a_group_that_is_not_built_is_refused_when_it_asks_for_something(name: str) -> None:
    switches = [
        key for key, f in type(TrainerConfig.model_fields[name].default).model_fields.items() if f.default is False
    ]
    with pytest.raises(ConfigError, match="not supported yet"):
        load_config(_with((name, switches[0]), True))
