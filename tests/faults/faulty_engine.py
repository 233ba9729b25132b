"""An engine that wraps another and injects faults by a seeded plan, behind the same protocol.

For tests of what lies above the engine seam. Faults are drawn per transfer from one generator, in the order of
submission, so a seed reproduces a run. With an empty plan it is the wrapped engine, and passes its conformance suite.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offloadd.core.records import Direction, Outcome, Transfer
from offloadd.io.engine import Engine, FileTuning

_ERRNO = {"eio": errno.EIO, "enospc": errno.ENOSPC, "short": errno.ENODATA, "eagain": errno.EAGAIN}


@dataclass(frozen=True, slots=True)
class Plan:
    """Probabilities per transfer; the rest of the transfers are left alone."""

    seed: int = 0
    eio: float = 0.0
    enospc: float = 0.0
    """Writes only."""
    short: float = 0.0
    """A device that moves less and then nothing: -ENODATA, as engines report it. Reads only."""
    eagain: float = 0.0
    """A device that stays busy beyond the engine's own retries."""
    flip: float = 0.0
    """One bit of what a read brought is wrong, and the checksum with it: the device lied."""
    delay: float = 0.0
    delay_completions: int = 3
    """A delayed outcome comes after this many others, or when nothing else is left."""


@dataclass(slots=True)
class _Held:
    outcome: Outcome
    after: int


class FaultyEngine:
    """See `offloadd.io.engine.Engine`."""

    def __init__(self, inner: Engine, plan: Plan | None = None) -> None:
        self.name = inner.name
        self.driver = inner.driver
        self._inner = inner
        self._plan = plan or Plan()
        self._random = random.Random(self._plan.seed)
        self._memory: dict[int, memoryview] = {}
        self._faults: dict[int, tuple[str, Transfer]] = {}
        self._failed: list[Outcome] = []
        self._held: list[_Held] = []
        self._closed = False
        self.injected: dict[str, int] = {}
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._ready, select.EPOLLIN)
        self._epoll.register(inner.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def register_region(self, region: int, memory: memoryview) -> None:
        self._inner.register_region(region, memory)
        self._memory[region] = memory

    def unregister_region(self, region: int) -> None:
        self._inner.unregister_region(region)
        del self._memory[region]

    def register_file(self, file: int, fd: int, tuning: FileTuning) -> None:
        self._inner.register_file(file, fd, tuning)

    def unregister_file(self, file: int) -> None:
        self._inner.unregister_file(file)

    def free_slots(self) -> int:
        return max(0, self._inner.free_slots() - len(self._failed) - len(self._held))

    def inflight(self) -> int:
        return self._inner.inflight() + len(self._failed) + len(self._held)

    def submit(self, transfers: Sequence[Transfer]) -> int:
        accepted = list(transfers[: self.free_slots()])
        passed = []
        for transfer in accepted:
            fault = self._draw(transfer)
            if fault in _ERRNO:
                self._failed.append(Outcome(transfer.id, -_ERRNO[fault]))
                continue
            if fault:
                self._faults[transfer.id] = (fault, transfer)
            passed.append(transfer)
        taken = self._inner.submit(passed)
        if taken != len(passed):
            raise AssertionError(f"the inner engine took {taken} of {len(passed)} although it had room")
        if self._failed:
            os.eventfd_write(self._ready, 1)
        return len(accepted)

    def _draw(self, transfer: Transfer) -> str:
        draw = self._random.random()
        for fault in ("eio", "enospc", "short", "eagain", "flip", "delay"):
            draw -= getattr(self._plan, fault)
            if draw < 0:
                break
        else:
            return ""
        wrong_way = {"enospc": Direction.READ, "short": Direction.WRITE, "flip": Direction.WRITE}
        if wrong_way.get(fault) is transfer.direction or (
            transfer.direction in (Direction.CHECKSUM, Direction.SYNC) and fault != "delay" and fault != "eio"
        ):
            return ""
        self.injected[fault] = self.injected.get(fault, 0) + 1
        return fault

    def reap(self) -> list[Outcome]:
        if not self._closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._ready)
        outcomes, self._failed = self._failed, []
        for outcome in self._inner.reap():
            fault, transfer = self._faults.pop(outcome.id, ("", None))
            if fault == "delay":
                self._held.append(_Held(outcome, self._plan.delay_completions))
                continue
            if fault == "flip" and transfer is not None and outcome.result > 0:
                outcome = self._flip(outcome, transfer)
            outcomes.append(outcome)
        return self._let_go(outcomes)

    def _let_go(self, outcomes: list[Outcome]) -> list[Outcome]:
        for held in self._held:
            held.after -= len(outcomes)
        alone = not outcomes and self._inner.inflight() == 0
        due = [held for held in self._held if held.after <= 0 or alone]
        self._held = [held for held in self._held if held not in due]
        if self._held and not self._closed and self._inner.inflight() == 0:
            os.eventfd_write(self._ready, 1)  # nothing else will come: let the caller come back for them
        return outcomes + [held.outcome for held in due]

    def _flip(self, outcome: Outcome, transfer: Transfer) -> Outcome:
        at = self._random.randrange(max(1, transfer.length))
        memory = self._memory[transfer.span.region].cast("B")
        memory[transfer.span.offset + at] ^= 1 << self._random.randrange(8)
        if not outcome.checksums:
            return outcome
        wrong = bytearray(outcome.checksums)
        wrong[at // (128 << 10) * 4] ^= 0xFF
        return replace(outcome, checksums=bytes(wrong))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._epoll.close()
        os.close(self._ready)
        self._inner.close()

    def statistics(self) -> dict[str, int]:
        return {**self._inner.statistics(), "inflight": self.inflight()}
