"""The order in which modules need their parameters: recorded in one pass, a hint for the next.

Fed by the coordinator. A pass is one forward and backward. Every pass is recorded, and compared with the one before:
where they differ the hint is off for the rest of the pass and the new recording takes its place. Nothing depends on
the hint being right but time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from trainer.zero.parameter import ZeroParam


@dataclass(eq=False)
class HookedModule:
    """A module and the parameters its calls need: its own, and those of others that it was seen to use."""

    name: str
    module: nn.Module
    params: list[ZeroParam]

    def adopt(self, zero: ZeroParam) -> None:
        """From now on this module needs `zero` too."""
        if zero not in self.params:
            self.params.append(zero)


class Event(NamedTuple):
    """One module call that needs parameters: whatever the module is known to need when the event is looked at."""

    hooked: HookedModule
    backward: bool

    @property
    def params(self) -> list[ZeroParam]:
        """What the module needs."""
        return self.hooked.params


class Trace:
    """The hint, the recording, and the position in both."""

    def __init__(self) -> None:
        self.hint: list[Event] = []
        self.position = 0
        """Events of this pass so far."""
        self.invalidations = 0
        self.passes = 0
        self._settled = False
        self._recording: list[Event] = []
        self._matching = False
        self._distances: dict[tuple[int, int, int], int] = {}

    def begin(self) -> None:
        """A pass begins."""
        self._recording = []
        self.position = 0
        self._matching = bool(self.hint)

    def note(self, event: Event) -> bool:
        """A module needs parameters. True while the hint holds; False the moment it stops is also an invalidation."""
        self._recording.append(event)
        at, self.position = self.position, self.position + 1
        if self._matching and (at >= len(self.hint) or self.hint[at] != event):
            self._matching = False
            self.invalidations += 1
        return self._matching

    def end(self) -> None:
        """A pass is over: what was recorded is the next hint."""
        self.passes += 1
        if self._matching and self.position < len(self.hint):
            self._matching = False
            self.invalidations += 1
        self._settled = self._matching
        if not self._matching:
            self.hint = self._recording
            self._distances.clear()
        self._recording = []
        self._matching = False

    @property
    def settled(self) -> bool:
        """Whether the last whole pass went as the one before it."""
        return self._settled

    @property
    def matching(self) -> bool:
        """Whether the hint has held so far in this pass."""
        return self._matching

    def upcoming(self) -> list[Event]:
        """What the hint expects next."""
        return self.hint[self.position :] if self._matching else []

    def reuse_distance(self, zero: ZeroParam, limit: int) -> int:
        """Elements of parameters that the hint needs before it needs `zero` again; more than `limit` if beyond."""
        if not self._matching:
            return limit + 1
        key = (self.position, zero.index, limit)
        if key not in self._distances:
            self._distances[key] = self._distance(zero, limit)
        return self._distances[key]

    def _distance(self, zero: ZeroParam, limit: int) -> int:
        distance = 0
        for at in range(self.position, len(self.hint)):
            event = self.hint[at]
            if zero in event.params:
                return distance
            distance += sum(other.numel for other in event.params)
            if distance > limit:
                break
        return limit + 1
