"""`python failing_daemon.py serve ...`: the daemon, with a bug in what FAIL_AT names, `start` or `serve`. The latter
shows at SIGUSR1."""

from __future__ import annotations

import asyncio
import os
import signal

from offloadd import app, guardian


def _watch(directory: str, descriptor: int) -> int:
    report = guard(directory, descriptor)
    from offloadd import node  # as the daemon does: not before the guardian is forked

    async def fail(self: node.Node) -> None:
        if at == "serve":
            told = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
            await told.wait()
        raise ZeroDivisionError("a bug\nof two lines")

    at = os.environ["FAIL_AT"]
    setattr(node.Node, at, fail)
    return report


if __name__ == "__main__":
    guard, guardian.watch = guardian.watch, _watch
    app.main()
