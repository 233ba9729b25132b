"""Updates that overlap the next forward: one thread works through a step's tiles while the rank already goes on.

Owned by `ShardedAdam`. The results are those of updating at once: whoever needs a parameter waits until its tiles are
done, and nothing of the next backward begins before all are. The thread is not a daemon thread: a rank that ends
finishes its step first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from trainer.optim.subgroups import Work
from trainer.zero.parameter import ZeroParam


class Runner(Protocol):
    """Updates works in order and says when each is done."""

    def __call__(self, works: Sequence[Work], done: Callable[[Work], None]) -> None: ...


class Deferred:
    """At most one step's updates at a time."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._missing: dict[ZeroParam, int] = {}
        """Works that each parameter still waits for."""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, works: Sequence[Work], run: Runner) -> None:
        """Begin in the background. The step before must have been drained."""
        if self._thread is not None:
            raise AssertionError("an optimizer step began before the last one was complete")
        for work in works:
            for zero in {piece.zero for piece in work.pieces}:
                self._missing[zero] = self._missing.get(zero, 0) + 1
        self._thread = threading.Thread(target=self._run, args=(works, run), name="trainer-step")
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to update."""
        return not self._missing

    def wait(self, zero: ZeroParam) -> float:
        """Return when the parameter's shard is complete, with the seconds that took; raise what stopped its update."""
        if zero not in self._missing and self._failure is None:
            return 0.0
        started = time.monotonic()
        with self._condition:
            # Not forever: every fetch and store of the thread has a deadline of its own, and its end wakes us.
            self._condition.wait_for(lambda: zero not in self._missing or self._failure is not None)
            if zero in self._missing:
                self._raise()
        return time.monotonic() - started

    def drain(self) -> float:
        """Return when the whole step is complete, with the seconds that took; raise what stopped it."""
        started = time.monotonic()
        if self._thread is not None:
            # Forgotten only when it has ended: an interrupted wait leaves it to be waited for again.
            self._thread.join()
            self._thread = None
        self._raise()
        return time.monotonic() - started

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self, works: Sequence[Work], run: Runner) -> None:
        try:
            run(works, self._done)
        except BaseException as error:
            # Kept for whoever waits: a step that is half done stops every later use of the engine.
            with self._condition:
                self._failure = error
                self._condition.notify_all()

    def _done(self, work: Work) -> None:
        with self._condition:
            for zero in {piece.zero for piece in work.pieces}:
                self._missing[zero] -= 1
                if not self._missing[zero]:
                    del self._missing[zero]
            self._condition.notify_all()
