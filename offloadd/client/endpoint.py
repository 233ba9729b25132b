"""Where a daemon is: 'unix:///path/to/socket' or 'grpc://127.0.0.1:port'."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass

from offloadd.core.errors import ConfigError

_HINT = "write unix:///path/to/offloadd.sock or grpc://127.0.0.1:port"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed endpoint; exactly one of `path` and `address` is set."""

    text: str
    path: str = ""
    address: str = ""

    @property
    def target(self) -> str:
        """The name gRPC knows it by."""
        return f"unix:{self.path}" if self.path else self.address

    @property
    def attach_path(self) -> str:
        return self.path + ".attach"


def parse(text: str) -> Endpoint:
    """ConfigError for anything else than the two forms, or for an address that is not loopback."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise ConfigError(f"endpoint {text!r} needs an absolute path; {_HINT}")
        if len(path.encode()) > 100:
            raise ConfigError(f"endpoint {text!r}: a Unix socket's path may have at most 100 bytes; use a shorter one")
        return Endpoint(text, path=path)
    if text.startswith("grpc://"):
        address = text.removeprefix("grpc://")
        check_loopback(address, f"endpoint {text!r}")
        return Endpoint(text, address=address)
    raise ConfigError(f"endpoint {text!r} is not understood; {_HINT}")


TIMEOUT_SECONDS_MAX = 86_400.0
"""A day: beyond it a wait is a hang, and not a bound."""


def check_timeout(timeout_s: float, what: str) -> float:
    """The same number. ConfigError unless it is a time that can be waited for; `what` names it."""
    if not (math.isfinite(timeout_s) and 0 < timeout_s <= TIMEOUT_SECONDS_MAX):
        raise ConfigError(
            f"{what} is {timeout_s:g} s, which cannot be waited for; give more than 0 and at most "
            f"{TIMEOUT_SECONDS_MAX:g} s"
        )
    return timeout_s


def check_loopback(address: str, what: str) -> None:
    """ConfigError unless `address` is 'loopback-address:port'. Nothing is encrypted, so nothing may leave the host."""
    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{what} needs an address and a port; {_HINT}")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(f"{what}: {host!r} is not a loopback address, and traffic is not encrypted; use 127.0.0.1")
