"""What was fetched, in order, over two whole steps: the access plan that backends are given.

Fed by `ParamSet` and the optimizer at every fetch of a training step, driven by the engine. Two steps, because the
optimizer walks its tiles forwards in one and backwards in the next. A plan is a hint: being wrong costs time only.
"""

from __future__ import annotations

from trainer.swap.backend import Access, SwapBackend, Tile

CYCLE_STEPS = 2


class AccessLog:
    """Records, and hands the plan over once it knows a cycle."""

    def __init__(self) -> None:
        self._accesses: dict[int, tuple[SwapBackend, list[Access]]] = {}
        self._steps = -1
        """Whole steps recorded; -1 while not recording."""
        self.plans = 0
        self.paused = False
        """Set while fetches are not part of a training step, as in an evaluation."""

    def note(self, backend: SwapBackend, tile: Tile, mode: str) -> None:
        """A fetch has started."""
        if self._steps >= 0 and not self.paused:
            _, accesses = self._accesses.setdefault(id(backend), (backend, []))
            accesses.append(Access(tile.shard, tile.index, mode))

    def restart(self) -> None:
        """Begin recording with the next fetch; forget what was recorded so far."""
        self._accesses.clear()
        self._steps = 0

    def stop(self) -> None:
        """Give up this recording."""
        self._accesses.clear()
        self._steps = -1

    def step_ended(self) -> None:
        """One whole step is over; after two, the plan is handed over and recording ends."""
        if self._steps < 0:
            return
        self._steps += 1
        if self._steps == CYCLE_STEPS:
            recorded = list(self._accesses.values())
            self.stop()
            for backend, accesses in recorded:
                backend.plan(accesses, CYCLE_STEPS)
            self.plans += 1
