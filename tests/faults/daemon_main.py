"""`python -m tests.faults.daemon_main serve ...`: the daemon, with faults between it and its engine.

The plan is JSON in the environment variable FAULTY_PLAN and holds for the daemon's first session only, so that the
other sessions show whether anything spreads.
"""

from __future__ import annotations

import json
import os

from offloadd import app, node
from offloadd.core.records import Transfer
from offloadd.io.engine import Engine
from offloadd.io.select import Refusal, choose_engine
from tests.faults.faulty_engine import FaultyEngine, Plan

FIRST_SESSION = 1
VARIABLE = "FAULTY_PLAN"


class FirstSessionFaulty(FaultyEngine):
    """Leaves every other session alone."""

    def _draw(self, transfer: Transfer) -> str:
        return super()._draw(transfer) if transfer.session == FIRST_SESSION else ""


def _choose(engine: str, driver: str, checksum_threads: int) -> tuple[Engine, list[Refusal]]:
    inner, refusals = choose_engine(engine, driver, checksum_threads)
    return FirstSessionFaulty(inner, Plan(**json.loads(os.environ[VARIABLE]))), refusals


if __name__ == "__main__":
    node.choose_engine = _choose  # type: ignore[assignment]
    app.main()
