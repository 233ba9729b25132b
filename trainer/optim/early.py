"""Which tiles may be updated while backward still runs: those whose parameters' gradients are complete.

Decisions only; `ShardedAdam` carries them out. What is updated early cannot be taken back, so it is offered only for
parameters that, as earlier steps have shown, are finished with once their gradient has been reduced: no second part of
the gradient comes, and backward does not gather them again. How many tiles the disk gets through during backward is
tried out in one step, the rehearsal, and kept from then on, so that the order of accesses is the same in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from trainer.optim.subgroups import Work
from trainer.zero.errors import UsageError
from trainer.zero.parameter import ZeroParam


class Stage(Enum):
    """What is known about the steps to come."""

    LEARNING = "learning"
    """Nothing is updated early; parameters that must not be are noted."""
    REHEARSAL = "rehearsal"
    """Everything ready is offered, and what is done when the step comes is counted."""
    SETTLED = "settled"
    """As many are offered as the rehearsal got through."""


class EarlyWorks:
    """One per optimizer; used from the thread that runs backward."""

    def __init__(self, works: Sequence[Work]) -> None:
        """`works`: in the order of their parameters' first use, so that backward completes the last ones first."""
        self.stage = Stage.LEARNING
        self._works = list(works)
        self._works_of: dict[ZeroParam, list[Work]] = {}
        for work in reversed(self._works):
            for zero in work.params:
                self._works_of.setdefault(zero, []).append(work)
        self.taken = 0
        """Updates that had begun when their step came, over all steps."""
        self._unfit: set[ZeroParam] = set()
        self._count = 0
        """How many are offered once settled."""
        self._reduced: set[ZeroParam] = set()
        self._lacking: dict[Work, int] = {}
        """Parameters whose gradients each one waits for."""
        self._offered: set[Work] = set()
        self._open = False

    @property
    def open(self) -> bool:
        """Whether a backward that completes gradients has begun, and its step has not come."""
        return self._open

    @property
    def begun(self) -> bool:
        """Whether this step's updates began before the step itself."""
        return self._open and bool(self._offered)

    def offered(self, work: Work) -> bool:
        """Whether this step offered it early."""
        return work in self._offered

    def learn(self) -> None:
        """Steps do not resemble each other."""
        self.stage = Stage.LEARNING

    def settle(self) -> bool:
        """Steps resemble each other from now on. True if a rehearsal is behind us; otherwise the next step is one."""
        self.stage = Stage.REHEARSAL if self.stage is Stage.LEARNING else Stage.SETTLED
        return self.stage is Stage.SETTLED

    def begin(self) -> None:
        """The backward that completes the gradients begins."""
        self._open = True
        self._reduced.clear()
        self._offered.clear()
        self._lacking = {work: len(work.params) for work in self._works}

    def reduced(self, zeros: Sequence[ZeroParam]) -> list[Work]:
        """Gradients are complete. Returns what to update now. One that comes twice is unfit for it."""
        if not self._open:
            return []
        ready = []
        for zero in zeros:
            self._needed_again(zero)
            self._reduced.add(zero)
            for work in self._works_of.get(zero, ()):
                self._lacking[work] -= 1
                if self._lacking[work] == 0 and not self._unfit.intersection(work.params):
                    ready.append(work)
        room = {Stage.LEARNING: 0, Stage.REHEARSAL: len(self._works), Stage.SETTLED: self._count}[self.stage]
        ready = ready[: room - len(self._offered)]
        self._offered.update(ready)
        return ready

    def gathered(self, zero: ZeroParam) -> None:
        """A parameter is needed. After its gradient was complete, that makes it unfit."""
        if self._open:
            self._needed_again(zero)

    def end(self, undone: int) -> None:
        """The step comes; so many were offered and not begun."""
        self._open = False
        self.taken += len(self._offered) - undone
        if self.stage is Stage.REHEARSAL:
            self._count = max(1, len(self._offered) - undone)
        self._offered.clear()

    def _needed_again(self, zero: ZeroParam) -> None:
        if zero not in self._reduced:
            return
        self._unfit.add(zero)
        if any(work in self._offered for work in self._works_of.get(zero, ())):
            raise UsageError(
                f"{zero.name} is needed between its update, which backward had begun, and engine.step(); "
                "call engine.step() first, or set offloadd.update_in_backward to false"
            )
