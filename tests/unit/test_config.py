"""Where a value comes from, and what a bad one says."""

from pathlib import Path

import pytest

from offloadd.config import load, parse_size
from offloadd.core.errors import ConfigError


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "offloadd.toml"
    file.write_text('[memory]\nhost_bytes = "1MiB"\n[io]\nqueue_depth = 3\nblock_bytes = 4096\n')
    environment = {"OFFLOADD_IO_QUEUE_DEPTH": "4", "OFFLOADD_IO_BLOCK_BYTES": "8KiB"}
    config = load(str(file), {"io.block_bytes": "16KiB"}, environment)
    assert (config.memory.host_bytes, config.io.queue_depth, config.io.block_bytes) == (1 << 20, 4, 16 << 10)
    assert config.io.engine == "auto"


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("4096", 4096), ("2GB", 2 * 10**9), (7, 7)]
)
def test_sizes_take_units(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[memory]\nhost_byte = 1\n", r"unknown key 'memory.host_byte' in .*; did you mean 'memory.host_bytes'\?"),
        ("[memory]\nhost_bytes = 'much'\n", r"memory.host_bytes = 'much' in .*: 'much' is not a size"),
        ("memory = 3\n", r"\[memory\]|memory = 3"),
        ("[io]\nengine = 'aio'\n", r"io.engine = 'aio' in .*'auto', 'uring', 'threads' or 'null'"),
        ("version = 2\n", r"version = 2"),
        ("[io\n", r"not valid TOML"),
        ("[session]\nslot_wait_seconds = nan\n", r"session.slot_wait_seconds = nan in .*finite number"),
        ("[lifetime]\ndrain_seconds = inf\n", r"lifetime.drain_seconds = inf in .*: Input should be"),
        ("[lifetime]\ngrace_seconds = -1\n", r"lifetime.grace_seconds = -1 in .*: Input should be"),
    ],
)
def test_a_bad_file_gets_one_sentence(tmp_path: Path, toml: str, sentence: str) -> None:
    file = tmp_path / "offloadd.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(str(file), {}, {})
    assert "\n" not in caught.value.message


def test_a_mistyped_environment_variable_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="OFFLOADD_MEMORY_HOST_BYTES"):
        load(None, {}, {"OFFLOADD_MEMORY_HOST_BYTE": "1"})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/x\.toml: No such file"):
        load("/nowhere/x.toml", {}, {})
