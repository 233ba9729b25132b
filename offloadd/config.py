"""The daemon's configuration: one frozen tree, one class per room, and the four places a value can come from.

Order of precedence: command line, OFFLOADD_* environment, file, default. A room receives only its own class.
docs/configuration.md is generated from the docstrings here.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from offloadd.core.errors import ConfigError
from offloadd.core.units import GIB, KIB, MIB

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SUFFIX = {"": 1, "b": 1, "k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": GIB, "gib": GIB, "t": 1024 * GIB}
_SUFFIX |= {"tib": 1024 * GIB, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4}


def parse_size(value: object) -> object:
    """'512MiB' -> bytes. Numbers pass through; anything else is left for the validator to refuse."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    if match is None or match[2].lower() not in _SUFFIX:
        raise ValueError(f"{value!r} is not a size; write bytes or a number with a unit, such as 512MiB")
    return int(float(match[1]) * _SUFFIX[match[2].lower()])


def _split_paths(value: object) -> object:
    return [part for part in value.split(":") if part] if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class ControlConfig(_Section):
    """How clients reach the daemon."""

    socket: str = "/run/offloadd/offloadd.sock"
    """gRPC over a Unix socket. The attach socket lies beside it, with '.attach' appended."""
    listen: str | None = None
    """Loopback 'address:port' for clients to which file descriptors cannot pass; port 0 picks one. None: off."""
    token_file: str | None = None
    """File (mode 0600, made if missing) whose content authenticates clients of `listen`. Default: beside the socket."""
    group_access: bool = False
    """True: members of the socket's group may connect (mode 0660). False: only the daemon's own user."""


class MemoryConfig(_Section):
    """Host memory that is lent to ranks."""

    host_bytes: Size = 1 * GIB
    """Bytes of all arenas together. Ranks are refused beyond it, before they start."""


class SwapConfig(_Section):
    """Where swap files live."""

    paths: Annotated[tuple[str, ...], BeforeValidator(_split_paths)] = ()
    """Directories, ideally one per NVMe device; shards are spread over them by measured bandwidth. In a string,
    separated by ':'."""
    limit_bytes: Size = 0
    """Most bytes of all swap files together. 0: what the file systems have free."""


class IoConfig(_Section):
    """How bytes move."""

    engine: Literal["auto", "uring", "threads", "null"] = "auto"
    """auto tries uring, then threads, and says why. null moves nothing: it measures the daemon itself."""
    driver: Literal["auto", "liburing", "native"] = "auto"
    """What drives io_uring: the liburing package where this CPU can run it, or the native module."""
    block_bytes: Size = 0
    """Bytes of one device request. 0: measured per path."""
    queue_depth: Annotated[int, Field(ge=0, le=1024)] = 0
    """Device requests in flight per path. 0: measured per path."""
    calibrate_seconds: Annotated[float, Field(ge=0, le=60)] = 2.0
    """Longest time spent on measuring one path that has no stored measurement. 0: use fixed figures instead."""
    checksum_threads: Annotated[int, Field(ge=1, le=64)] = 1
    """Native threads that compute checksums."""
    checksums: bool = True
    """Checksum every stored tile and verify it whenever it is read back."""


class SessionConfig(_Section):
    """Limits on what clients may hold."""

    sessions_max: Annotated[int, Field(ge=1, le=4096)] = 256
    """Sessions open at a time."""
    slot_wait_seconds: Annotated[float, Field(gt=0, le=600)] = 10.0
    """How long a fetch waits for memory while the session's own leases hold everything, before it fails."""
    attach_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """How long a session over `control.listen` may exist without its stream before it is closed: until then nothing
    tells that its client has died."""
    state_dir: str | None = None
    """Directory of the catalog. None: in memory, for a daemon that ends with its job."""


class TelemetryConfig(_Section):
    """What can be seen from outside."""

    listen: str | None = "127.0.0.1:9178"
    """Loopback 'address:port' of /metrics, /livez and /readyz; port 0 picks one. None: off."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is logged."""


class LifetimeConfig(_Section):
    """When the daemon ends."""

    private: bool = False
    """True: started by a rank for one job; ends with its last session, or `grace_seconds` after one that died."""
    grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 3.0
    """How long a private daemon stays after its last session, if that ended without a goodbye."""
    first_session_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """How long a private daemon waits for its first session."""
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 20.0
    """How long SIGTERM waits for transfers in flight before the daemon stops."""


class Config(_Section):
    """The whole tree."""

    version: Literal[1] = 1
    """Version of this format."""
    control: ControlConfig = ControlConfig()
    memory: MemoryConfig = MemoryConfig()
    swap: SwapConfig = SwapConfig()
    io: IoConfig = IoConfig()
    session: SessionConfig = SessionConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    lifetime: LifetimeConfig = LifetimeConfig()


def keys() -> dict[str, Any]:
    """Every leaf as 'section.field' -> pydantic FieldInfo."""
    out: dict[str, Any] = {}
    for section, info in Config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, _Section):
            out |= {f"{section}.{name}": field for name, field in info.annotation.model_fields.items()}
    return out


def _set(tree: dict[str, Any], dotted: str, value: object) -> None:
    section, _, field = dotted.partition(".")
    tree.setdefault(section, {})[field] = value


def _unknown(key: str, known: list[str], where: str) -> ConfigError:
    near = difflib.get_close_matches(key, known, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else "see docs/configuration.md for the known keys"
    return ConfigError(f"unknown key {key!r} in {where}; {hint}")


def _from_file(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            tree = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return tree


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    known = {"OFFLOADD_" + key.replace(".", "_").upper(): key for key in keys()}
    tree: dict[str, Any] = {}
    for name, value in environment.items():
        if name.startswith("OFFLOADD_") and name not in CLIENT_VARIABLES:
            if name not in known:
                raise _unknown(name, list(known), "the environment")
            _set(tree, known[name], value)
    return tree


CLIENT_VARIABLES = frozenset({"OFFLOADD_SOCKET", "OFFLOADD_ENDPOINT"})
"""OFFLOADD_ variables that are not the daemon's."""


def load(path: str | None, flags: Mapping[str, object], environment: Mapping[str, str] | None = None) -> Config:
    """The effective configuration. `flags` maps 'section.field' to a value. ConfigError, one sentence, for any
    value or key that cannot be."""
    tree = _from_file(path) if path else {}
    overrides = [_from_environment(os.environ if environment is None else environment), {}]
    for key, value in flags.items():
        if key not in keys():
            raise _unknown(key, list(keys()), "the command line")
        _set(overrides[1], key, value)
    for override in overrides:
        for section, fields in override.items():
            if not isinstance(tree.setdefault(section, {}), dict):
                raise ConfigError(f"[{section}] in {path} must be a table")
            tree[section] |= fields
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, path or "the configuration") from error


def _explain(error: ValidationError, where: str) -> ConfigError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = [*keys(), *Config.model_fields]
        return _unknown(key, known, where)
    return ConfigError(f"{key} = {first['input']!r} in {where}: {first['msg'].removeprefix('Value error, ')}")
