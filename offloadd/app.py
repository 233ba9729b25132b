"""The `offloadd` command: read the configuration, start the daemon, say READY, stop in order.

Nothing here knows how bytes move; `offloadd.node` builds the rooms. An error that a user can mend is one sentence on
the log, and exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import sys
import traceback
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
    starter = _Starter(ready_fd)
    try:
        config = configuration.load(path, given)
    except OffloadError as error:
        _log_to(log_file, "info")
        raise SystemExit(_refuse(error, starter)) from None
    report = -1
    if directory_fd >= 0:
        report = guardian.watch(os.path.dirname(config.control.socket), directory_fd)
        faulthandler.enable(report)
    _log_to(log_file, config.telemetry.log_level)
    try:
        # Only now: grpc starts threads when imported, and the guardian must be forked before that.
        from offloadd.node import run

        asyncio.run(run(config, lambda: starter.tell("READY"), starter_fd))
    except OffloadError as error:
        raise SystemExit(_refuse(error, starter)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        # At once, as if killed, which whoever comes after is prepared for: an orderly end would rely on what is broken.
        code = _confess(error, starter, report)
        logging.shutdown()
        os._exit(code)


class _Starter:
    """Whoever started us and waits for one line, if somebody does. Owns the descriptor until that is said."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def tell(self, message: str) -> bool:
        """READY, or why not; what comes later has no listener. False: whoever it was is gone."""
        # At once, since by the next time the number may be another file's.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return True
        try:
            os.write(descriptor, message.encode() + b"\n")
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        return True


def _refuse(error: OffloadError, starter: _Starter) -> int:
    log.error("%s", error.message)
    starter.tell(error.message)
    return 1


def _confess(error: Exception, starter: _Starter, report: int) -> int:
    """A bug ends the daemon: everything about it goes to the log, which the guardian of a private daemon then keeps."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    log.critical("this daemon ends by a bug of its own", exc_info=error)
    said = " ".join(f"{type(error).__name__}: {error}".split())
    starter.tell(f"the daemon hit a bug of its own, {said} ({place.filename}, line {place.lineno})")
    if report >= 0:
        with contextlib.suppress(OSError):
            os.write(report, b"\n")
    return 1


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
