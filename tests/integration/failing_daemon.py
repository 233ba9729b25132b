"""`python failing_daemon.py serve ...`: the daemon, with a bug in what FAIL_AT names: `start`, or `serve` or `step`,
where it shows at SIGUSR1."""

from __future__ import annotations

import asyncio
import os
import signal

from offloadd import app, guardian


def _watch(directory: str, descriptor: int) -> int:
    report = guard(directory, descriptor)
    from offloadd import node  # as the daemon does: not before the guardian is forked
    from offloadd.pump import Pump

    async def fail(self: node.Node) -> None:
        if at == "serve":
            told = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
            await told.wait()
        raise ZeroDivisionError("a bug\nof two lines")

    def fail_a_step(self: Pump) -> bool:
        if armed:
            raise ZeroDivisionError("a bug\nof two lines")
        return step(self)

    at, armed, step = os.environ["FAIL_AT"], [], Pump.step
    if at == "step":
        signal.signal(signal.SIGUSR1, lambda number, frame: armed.append(number))
        Pump.step = fail_a_step  # type: ignore[method-assign]
    else:
        setattr(node.Node, at, fail)
    return report


if __name__ == "__main__":
    guard, guardian.watch = guardian.watch, _watch
    app.main()
