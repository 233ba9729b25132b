"""offloadctl: look at a daemon, measure it, and find out what stands in its way.

Imports are lazy, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from typing import Any, NoReturn

import click

DEFAULT_ENDPOINT = "unix:///run/offloadd/offloadd.sock"


def fail(message: str, code: int = 1) -> NoReturn:
    """One sentence on stderr, and an exit code."""
    click.echo(f"offloadctl: {message}", err=True)
    raise SystemExit(code)


def endpoint_option(command: Any) -> Any:
    """--endpoint and --token-file, with their environment variables."""
    command = click.option(
        "--token-file",
        default=None,
        metavar="FILE",
        help="Token of a grpc:// endpoint (the daemon's control.token_file).",
    )(command)
    return click.option(
        "--endpoint",
        default=lambda: os.environ.get("OFFLOADD_ENDPOINT", DEFAULT_ENDPOINT),
        show_default=DEFAULT_ENDPOINT,
        metavar="URL",
        help="unix:///path or grpc://127.0.0.1:port; also OFFLOADD_ENDPOINT.",
    )(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(metadata.version("offloadd"), prog_name="offloadctl")
def main() -> None:
    """Look at an offloadd daemon, measure it, and find out what stands in its way."""


@main.command()
@endpoint_option
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def status(endpoint: str, token_file: str | None, output: str) -> None:
    """What the daemon is doing. Exit code 0: ready, 2: not ready, 4: no daemon answers."""
    from offloadd.client.control import ControlClient
    from offloadd.client.endpoint import parse
    from offloadd.core.errors import OffloadError
    from offloadd.wire.pb import control_pb2

    try:
        control = ControlClient(parse(endpoint), token_file, 5.0, metadata.version("offloadd"))
        try:
            document = json.loads(control.call(control.stub.Status, control_pb2.StatusRequest()).json)
        finally:
            control.close()
    except OffloadError as error:
        fail(error.message, 4)
    if output == "json":
        click.echo(json.dumps(document, indent=2))
    else:
        from offloadd.ctl.table import show

        show(document, sys.stdout)
    raise SystemExit(0 if document["ready"] else 2)


@main.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def doctor(paths: tuple[str, ...], output: str) -> None:
    """Check this machine: kernel, io_uring, memory limits, and each PATH meant for swap files. Needs no daemon.
    Exit code 0: all well or warnings only, 1: something must be fixed."""
    from dataclasses import asdict

    from offloadd.io.probe import probe

    findings = probe(paths)
    if output == "json":
        click.echo(json.dumps({"schema_version": 1, "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        for finding in findings:
            click.echo(f"{finding.status.upper():4}  {finding.name:<22} {finding.detail}")
            if finding.fix:
                click.echo(f"      {'':<22} -> {finding.fix}")
    raise SystemExit(1 if any(f.status == "fail" for f in findings) else 0)


@main.command()
@click.argument("path", metavar="DIRECTORY")
@click.option("--clients", default=1, show_default=True, type=click.IntRange(1, 64), help="Load processes.")
@click.option("--seconds", default=2.0, show_default=True, type=click.FloatRange(0.1, 600), help="Length of a run.")
@click.option("--runs", default=7, show_default=True, type=click.IntRange(1, 100), help="Runs (or pairs) of each mode.")
@click.option("--size", default="1GiB", show_default=True, help="Bytes on disk, all clients together.")
@click.option("--memory", default="256MiB", show_default=True, help="The daemon's host memory.")
@click.option("--compare", type=click.Choice(["fio"]), help="Alternate with fio on the same file (checksums off).")
@click.option("--checksums/--no-checksums", default=True, show_default=True, help="Verify what is read.")
@click.option("--engine", default="auto", show_default=True, help="As io.engine.")
@click.option("--driver", default="auto", show_default=True, help="As io.driver.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def bench(
    path: str,
    clients: int,
    seconds: float,
    runs: int,
    size: str,
    memory: str,
    compare: str | None,
    checksums: bool,
    engine: str,
    driver: str,
    output: str,
) -> None:
    """Measure read, write and mixed through a private daemon and its rings, on files of its own in DIRECTORY."""
    from offloadd.config import parse_size
    from offloadd.core.errors import OffloadError
    from offloadd.ctl.bench import fio
    from offloadd.ctl.bench.compare import beside_fio, measure
    from offloadd.ctl.bench.harness import Load

    def say(line: str) -> None:
        click.echo(line, err=output == "json")

    try:
        if compare:
            fio.require()
        total, host = (int(str(parse_size(text))) for text in (size, memory))
        settings = {"io.checksums": checksums and not compare, "io.engine": engine, "io.driver": driver}
        with Load(path, clients, total, host, settings) as load:
            document = {
                "schema_version": 1,
                "clients": clients,
                "checksums": settings["io.checksums"],
                "tile_bytes": load.facts[0]["tile_bytes"],
                "modes": beside_fio(load, seconds, runs, say) if compare else measure(load, seconds, runs, say),
            }
    except ValueError as error:
        fail(str(error))
    except OffloadError as error:
        fail(error.message)
    if output == "json":
        click.echo(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
