"""The `offloadd` command: read the configuration, start the daemon, say READY, stop in order.

Nothing here knows how bytes move; `offloadd.node` builds the rooms. An error that a user can mend is one sentence on
the log, and exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from importlib import metadata
from typing import Any

import click

from offloadd import config as configuration
from offloadd import guardian
from offloadd.core.errors import OffloadError

log = logging.getLogger("offloadd")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(metadata.version("offloadd"), prog_name="offloadd")
def main() -> None:
    """The node's daemon: owns pinned memory and swap files, and serves training ranks."""


def _with_every_key(command: Any) -> Any:
    """One option per configuration key, --section.field."""
    for key, field in reversed(configuration.keys().items()):
        names = dict.fromkeys((f"--{key}", f"--{key.replace('_', '-')}"))
        parameter = key.replace(".", "__")
        help_text = (field.description or "").split("\n\n")[0].replace("\n", " ")
        command = click.option(*names, parameter, default=None, metavar="VALUE", help=help_text)(command)
    return command


@main.command()
@click.option("--config", "path", default=None, metavar="FILE", help="TOML file; see docs/configuration.md.")
@click.option("--ready-fd", type=int, default=-1, hidden=True, help="Write READY here when clients may connect.")
@click.option("--starter-fd", type=int, default=-1, hidden=True, help="pidfd of whoever starts a private daemon.")
@click.option("--directory-fd", type=int, default=-1, hidden=True, help="Of a private daemon's directory, locked.")
@click.option("--log-file", default=None, metavar="FILE", help="Log here instead of stderr.")
@_with_every_key
def serve(
    path: str | None,
    ready_fd: int,
    starter_fd: int,
    directory_fd: int,
    log_file: str | None,
    **flags: str | None,
) -> None:
    """Run until SIGTERM or SIGINT."""
    given: dict[str, object] = {
        key.replace("__", "."): None if value.lower() == "none" else value
        for key, value in flags.items()
        if value is not None
    }
    try:
        config = configuration.load(path, given)
    except OffloadError as error:
        _log_to(log_file, "info")
        raise SystemExit(_refuse(error, ready_fd)) from None
    if directory_fd >= 0:
        guardian.watch(os.path.dirname(config.control.socket), directory_fd)
    _log_to(log_file, config.telemetry.log_level)
    # Only now: grpc starts threads when imported, and the guardian must be forked before that.
    from offloadd.node import run

    try:
        asyncio.run(run(config, lambda: _tell(ready_fd, "READY"), starter_fd))
    except OffloadError as error:
        raise SystemExit(_refuse(error, ready_fd)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _refuse(error: OffloadError, ready_fd: int) -> int:
    log.error("%s", error.message)
    _tell(ready_fd, error.message)
    return 1


def _tell(descriptor: int, message: str) -> bool:
    """Tell whoever started us, if somebody did: READY, or why not. False: whoever it was is gone."""
    if descriptor < 0:
        return True
    with contextlib.suppress(OSError):
        os.write(descriptor, message.encode() + b"\n")
        os.close(descriptor)
        return True
    return False


def _log_to(log_file: str | None, level: str) -> None:
    try:
        handler = logging.FileHandler(log_file) if log_file else logging.StreamHandler(sys.stderr)
    except OSError as error:
        click.echo(f"offloadd: cannot write the log file {log_file}: {error.strerror}", err=True)
        raise SystemExit(1) from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


if __name__ == "__main__":
    main()
