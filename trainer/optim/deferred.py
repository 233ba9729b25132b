"""Updates beside the rank's own work: a thread works through a step's tiles while forward, or backward, goes on.

Owned by `ShardedAdam`. The results are those of updating at once: whoever needs a parameter waits until its tiles are
done, and nothing of the next backward begins before all are. The thread lives while there is work, so that nobody has
to be told when it is over, and it is not a daemon thread: a rank that ends finishes what it has begun.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from trainer.optim.subgroups import Work
from trainer.zero.parameter import ZeroParam

NICE = 10
"""Of the thread, and of the kernel's threads that it starts."""


class Runner(Protocol):
    """Updates what `take` gives, until it gives nothing, and says when each is done."""

    def __call__(self, take: Callable[[], Work | None], done: Callable[[Work], None]) -> None: ...


class Deferred:
    """The works of at most one step at a time, in the order given."""

    def __init__(self, run: Runner) -> None:
        self._run = run
        self._condition = threading.Condition()
        self._queue: deque[Work] = deque()
        self._missing: dict[ZeroParam, int] = {}
        """Works that each parameter still waits for."""
        self._thread: threading.Thread | None = None
        """While it runs. It takes itself off."""
        self._failure: BaseException | None = None

    def add(self, works: Sequence[Work]) -> None:
        """Queue behind what is there, and see that somebody works."""
        if not works:
            return
        with self._condition:
            for work in works:
                for zero in work.params:
                    self._missing[zero] = self._missing.get(zero, 0) + 1
            self._queue.extend(works)
            if self._thread is None and self._failure is None:
                thread = threading.Thread(target=self._work, name="trainer-step")
                thread.start()
                self._thread = thread

    def take_back(self) -> list[Work]:
        """What is queued and not begun is queued no more."""
        with self._condition:
            works = list(self._queue)
            self._queue.clear()
            for work in works:
                self._forget(work)
        return works

    @property
    def idle(self) -> bool:
        """Whether nothing is left to update."""
        return not self._missing

    def wait(self, zero: ZeroParam) -> float:
        """Return when the parameter's shard is complete, with the seconds that took; raise what stopped its update."""
        if zero not in self._missing and self._failure is None:
            return 0.0
        return self._until(lambda: zero not in self._missing, zero in self._missing)

    def drain(self) -> float:
        """Return when everything queued is complete, with the seconds that took; raise what stopped it."""
        return self._until(lambda: self._thread is None, True)

    def _until(self, complete: Callable[[], bool], failed_with_it: bool) -> float:
        started = time.monotonic()
        with self._condition:
            # Not forever: every fetch and store of the thread has a deadline of its own, and its end wakes us.
            self._condition.wait_for(lambda: complete() or self._failure is not None)
            if self._failure is not None and failed_with_it:
                self._condition.wait_for(lambda: self._thread is None)
                raise self._failure
        return time.monotonic() - started

    def _work(self) -> None:
        try:
            # Behind the rank's own work: a thread that a parallel region of the model waits for costs the region more
            # than a late update costs anybody. One that is niced already stays as it is.
            with contextlib.suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            while True:
                self._run(self._take, self._done)
                with self._condition:
                    if not self._queue:
                        self._ended(None)
                        return
        except BaseException as error:
            # Kept for whoever waits: a step that is half done stops every later use of the engine.
            with self._condition:
                self._ended(error)

    def _ended(self, failure: BaseException | None) -> None:
        self._failure, self._thread = failure, None
        self._condition.notify_all()

    def _take(self) -> Work | None:
        with self._condition:
            return self._queue.popleft() if self._queue else None

    def _done(self, work: Work) -> None:
        with self._condition:
            self._forget(work)
            self._condition.notify_all()

    def _forget(self, work: Work) -> None:
        for zero in work.params:
            self._missing[zero] -= 1
            if not self._missing[zero]:
                del self._missing[zero]
