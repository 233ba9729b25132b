"""Which parameters are gathered when: counts uses, follows the trace, carries out the policy.

Called by the hooks (forward and backward) and by the engine (pass boundaries). One per engine, used from one thread:
on a CPU, autograd runs hooks in the thread that called backward.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trainer.zero.errors import UsageError
from trainer.zero.parameter import ParamState, ZeroParam
from trainer.zero.paramset import ParamSet
from trainer.zero.policy import Policy
from trainer.zero.trace import Event, HookedModule, Trace

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Call:
    """One call of a module that may be differentiated. Activated when the first gradient reaches its outputs."""

    hooked: HookedModule
    held: list[ZeroParam] = field(default_factory=list)
    active: bool = False
    inputs_want: bool = False
    """Gradients are enabled and an input wants one."""
    again: bool = False
    """Its backward is recorded (create_graph), to be differentiated once more."""
    seen: dict[ZeroParam, int] = field(default_factory=dict)
    """`changes` of the parameters it was computed with."""


class Coordinator:
    """See the module's docstring."""

    def __init__(self, params: ParamSet, policy: Policy, log_invalidations: bool) -> None:
        self.params = params
        self.policy = policy
        self.trace = Trace()
        self.in_pass = False
        self.cancelled_prefetches = 0
        self.on_demand = 0
        self._log_invalidations = log_invalidations
        self._frames: list[Call] = []
        self._active: dict[Call, None] = {}
        self._pinned: list[ZeroParam] = []
        """Held to the end of backward, because nothing will say when their use ends."""
        self._pinned_before = 0
        """How many of them the forward that runs now has found."""
        self.forwards = False
        """Whether anything that can be differentiated ran since the last step."""
        self._paused = False
        for zero in params.params:
            zero.on_touch = self.touched

    # ---- passes -------------------------------------------------------------------------------------------------
    def begin_forward(self, training: bool) -> None:
        """The engine is called. A training pass goes on until `end_pass`, over several forwards if need be."""
        self._pause(not training)
        self._pinned_before = len(self._pinned)
        if training and not self.in_pass:
            self.in_pass = True
            self.trace.begin()

    def end_forward(self) -> None:
        """The engine's call returned."""
        self._pause(False)

    def abort_forward(self) -> None:
        """The engine's call raised. What earlier calls hold for their backward stays."""
        self._pause(False)
        while self._frames:
            self._let_go(self._frames.pop().held)
        self._let_go(self._pinned[self._pinned_before :])
        del self._pinned[self._pinned_before :]
        self.params.drop_idle()

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        if self.params.log is not None:
            self.params.log.paused = paused

    def end_pass(self, more: bool) -> None:
        """Backward is over. `more`: another one may follow before the step, through the same graph or another."""
        self.end_backward()
        if not more:
            self._unpin()
        pinned = set(self._pinned)
        leaked = [zero.name for zero in self.params.params if zero.users and zero not in pinned]
        self.params.drop_idle()
        if leaked:
            raise AssertionError(f"{leaked[0]} and {len(leaked) - 1} more are still in use after backward")
        if self.in_pass:
            self.trace.end()
            self.in_pass = False

    def end_backward(self) -> None:
        """No module's backward runs any more."""
        for call in list(self._active):
            self.leave_backward(call)

    def new_step(self) -> None:
        """The parameters are about to change: what was computed with them cannot be differentiated any more."""
        self._forget_uses()
        self.forwards = False

    def abort(self) -> None:
        """Something was raised in backward: forget all uses, so that the next pass starts clean."""
        self._forget_uses()
        self._pause(False)
        self.in_pass = False

    def _forget_uses(self) -> None:
        self._frames.clear()
        self.end_backward()
        self._unpin()
        self.params.drop_all()

    def _unpin(self) -> None:
        """Whatever still refers to pinned values would find nothing there, unannounced: autograd is to refuse it."""
        pinned, self._pinned = self._pinned, []
        self._let_go(pinned)
        for zero in dict.fromkeys(pinned):
            zero.replaced()

    # ---- forward ------------------------------------------------------------------------------------------------
    def enter_forward(self, hooked: HookedModule) -> Call:
        """A module is about to run."""
        call = Call(hooked)
        self.forwards = self.forwards or torch.is_grad_enabled()
        self._frames.append(call)
        self._acquire(call, backward=False)
        return call

    def leave_forward(self, hooked: HookedModule, pin: bool) -> None:
        """A module ran, or raised. `pin`: gradients are needed and nothing will tell when."""
        while any(call.hooked is hooked for call in self._frames):
            call = self._frames.pop()
            if pin and call.hooked is hooked:
                self._pinned += call.held
            else:
                self._let_go(call.held)
            call.held = []
            if call.hooked is hooked:
                return

    def current(self) -> Call | None:
        """The innermost call that runs now."""
        return self._frames[-1] if self._frames else None

    def escaped(self, zero: ZeroParam) -> None:
        """The call that runs now returns values of `zero` itself: whoever called it uses them from here on."""
        if len(self._frames) > 1:
            self._lend(self._frames[-2], zero)
        else:
            zero.users += 1
            self._pinned.append(zero)

    def touched(self, zero: ZeroParam, operands: Sequence[ZeroParam]) -> bool:
        """A stub's values are used. Inside a hooked forward, gather it and remember who needed it."""
        if not self._frames:
            return False
        self.on_demand += 1
        self._lend(self._frames[-1], zero)
        return True

    def _lend(self, call: Call, zero: ZeroParam) -> None:
        call.hooked.adopt(zero)
        call.seen.setdefault(zero, zero.changes)
        if zero not in call.held:
            zero.users += 1
            call.held.append(zero)
        self._ensure([zero])

    # ---- backward -----------------------------------------------------------------------------------------------
    def enter_backward(self, call: Call) -> None:
        """A gradient reached an output of this call."""
        if not call.active:
            self._refuse_stale(call)
            call.active, call.again = True, torch.is_grad_enabled()
            self._active[call] = None
            # Where no gradient leaves through an input: at the end of this backward, whoever called it.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.leave_backward(call))
            self._acquire(call, backward=True)

    def _refuse_stale(self, call: Call) -> None:
        if self.params.backend is None:
            raise UsageError(
                f"backward comes to {call.hooked.name}, but the engine was closed; close it after backward"
            )
        for zero, changes in call.seen.items():
            if zero.changes != changes:
                raise UsageError(
                    f"backward comes to {call.hooked.name}, whose parameter {zero.name} has changed since forward (by "
                    "engine.step() or GatheredParameters) or was given up after an error; run forward again"
                )

    def leave_backward(self, call: Call) -> None:
        """A gradient left through an input of this call, or backward is over."""
        if call.active:
            call.active = False
            del self._active[call]
            if call.again:
                # Differentiated later by nodes that no hook announces.
                self._pinned += call.held
            else:
                self._let_go(call.held)
            call.held = []

    # ---- the common part ----------------------------------------------------------------------------------------
    def _acquire(self, call: Call, *, backward: bool) -> None:
        params = list(call.hooked.params)
        if not params:
            return
        for zero in params:
            zero.users += 1
            call.seen.setdefault(zero, zero.changes)
        call.held = params
        following = self._follow(Event(call.hooked, backward))
        self._ensure(params)
        if following and self.params.may_prefetch():
            for zero in self.policy.prefetch(self.trace, self.params.live_numel):
                self.params.start(zero)

    def _follow(self, event: Event) -> bool:
        if not self.in_pass or self._paused:
            return False
        before = self.trace.invalidations
        following = self.trace.note(event)
        if self.trace.invalidations != before and self._log_invalidations:
            log.warning("the access trace did not match at %s; prefetching pauses for this pass", event.hooked.name)
        return following

    def _ensure(self, wanted: list[ZeroParam]) -> None:
        if any(zero.state is ParamState.NOT_AVAILABLE and not zero.persistent for zero in wanted):
            self._cancel_prefetches(wanted)
        self.params.gather(wanted)

    def _cancel_prefetches(self, wanted: list[ZeroParam]) -> None:
        """An unforeseen demand must not wait for slots that fetches ahead of it hold: give those back."""
        for zero in self.params.inflight():
            if zero not in wanted:
                self.params.cancel(zero)
                self.cancelled_prefetches += 1

    def _let_go(self, held: list[ZeroParam]) -> None:
        for zero in held:
            zero.users -= 1
            if zero.users == 0 and not zero.blocks and not self.policy.keep(self.trace, zero, self.params.live_numel):
                self.params.release(zero)
            zero.idle()
