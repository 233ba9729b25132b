"""The training engine: forward, backward, step.

Made by `trainer.initialize`. It wires parameters, hooks, reducer and optimizer together and owns their lifetimes; what
each does is in its own file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from trainer.boundary import user_facing
from trainer.config import BatchSizes, TrainerConfig
from trainer.optim.norm import clip_scale, grad_norm
from trainer.optim.sharded import ShardedAdam
from trainer.swap.accesslog import AccessLog
from trainer.swap.select import Backends
from trainer.zero.buckets import GradReducer
from trainer.zero.coordinator import Coordinator
from trainer.zero.errors import UsageError
from trainer.zero.hooks import ModelHooks
from trainer.zero.paramset import ParamSet

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Engine:
    """See the module's docstring. Not re-entrant; one thread."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainerConfig,
        batch: BatchSizes,
        backends: Backends,
        params: ParamSet,
        coordinator: Coordinator,
        reducer: GradReducer,
        optimizer: ShardedAdam,
        access_log: AccessLog,
        lr_scheduler: Any,
    ) -> None:
        self.module = model
        self.config = config
        self.batch = batch
        self.backends = backends
        self.params = params
        self.coordinator = coordinator
        self.reducer = reducer
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.global_steps = 0
        """Optimizer steps taken."""
        self.micro_steps = 0
        """Backward passes taken."""
        self.nonfinite_steps = 0
        """Steps whose gradient norm was not finite. As in DeepSpeed they are taken, unclipped."""
        self._grad_norm: float | None = None
        self._access_log = access_log
        self._hooks = ModelHooks(model, coordinator)
        self._planned_for = -1
        """Trace invalidations when the plan in force was recorded."""
        self._boundary = False
        self._closed = False
        self._broken = False
        self._told: BaseException | None = None
        """What stopped the optimizer, once something has raised it."""
        params.before_modified = optimizer.refuse_half_taken
        params.on_modified = lambda changed: self._telling(optimizer.refresh_masters, changed)
        params.before_fetch = lambda zero: self._telling(optimizer.wait, zero)
        params.may_prefetch = lambda: optimizer.idle
        reducer.on_reduced = optimizer.reduced
        reducer.on_stray = coordinator.end_backward

    # ---- the step -----------------------------------------------------------------------------------------------
    @user_facing
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward."""
        self._must_be_open()
        training = self.module.training and torch.is_grad_enabled()
        if not training:
            self._telling(self.optimizer.drain)
        self.coordinator.begin_forward(training)
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            self.coordinator.abort_forward()
            raise
        self.coordinator.end_forward()
        return output

    forward = __call__

    @user_facing
    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """Backward of one micro-step; the loss is divided by gradient_accumulation_steps. Returns the divided loss."""
        self._must_be_open()
        self._refuse_loss(loss)
        if self._boundary:
            raise UsageError(
                f"{self.batch.accumulation} micro-steps have been accumulated; call engine.step() before the next"
            )
        if self.micro_steps % self.batch.accumulation == 0:
            self._refuse_changed_model()
            # From here on gradients are written, which the last step's updates read. A step as the backends see it
            # lasts from here to the next time.
            self._telling(self.optimizer.drain)
            self._plan()
        if (self.micro_steps + 1) % self.batch.accumulation == 0:
            self._telling(self.optimizer.begin_backward)
        with torch.enable_grad():
            scaled = loss / self.batch.accumulation if self.batch.accumulation > 1 else loss
        self.reducer.begin()
        try:
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            self.reducer.finish()
        except BaseException:
            self._drop_accumulation()
            raise
        self.micro_steps += 1
        self._boundary = self.micro_steps % self.batch.accumulation == 0
        self.coordinator.end_pass(more=retain_graph or not self._boundary)
        return scaled

    def _refuse_changed_model(self) -> None:
        """What came to the model after `initialize` would not be trained, or be trained although it should not."""
        with torch._C.DisableTorchFunctionSubclass():
            for name, param in self.module.named_parameters():
                zero = getattr(param, "_zero", None)
                if param.requires_grad and (zero is None or zero.owner is not self.params):
                    raise UsageError(
                        f"parameter {name} was added or replaced after trainer.initialize and would not be trained; "
                        "build the model first, and change values inside GatheredParameters(param, modifier_rank=0)"
                    )
            for zero in self.params.params:
                if zero.param.requires_grad != zero.differentiable and (zero.trainable or not zero.differentiable):
                    raise UsageError(
                        f"requires_grad of parameter {zero.name} was {zero.differentiable} in trainer.initialize and "
                        f"is {zero.param.requires_grad} now; set it before, or give the parameter a group of its own "
                        "whose lr can be 0"
                    )

    def _refuse_loss(self, loss: torch.Tensor) -> None:
        """What could only fail half-way, or give gradients that are not those of this engine's model."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"type {type(loss).__name__}"
            raise UsageError(f"engine.backward(loss): a loss of {what}; pass a tensor of one element, as .mean() gives")
        if not loss.requires_grad:
            raise UsageError(
                "engine.backward(loss): this loss needs no gradient; compute it without no_grad() and detach(), from "
                "parameters of which at least one requires a gradient"
            )
        if not self.coordinator.forwards:
            raise UsageError(
                "engine.backward(loss): there was no forward of this engine since the last engine.step(); compute the "
                "loss with engine(...) first"
            )

    def _drop_accumulation(self) -> None:
        """A backward that raised has added part of a gradient, so that nothing since the last step can be used."""
        done = self.micro_steps % self.batch.accumulation
        if done:
            log.warning("backward raised; the %d micro-steps accumulated before it are dropped", done)
        self.micro_steps -= done
        self.reducer.forget()
        self.reducer.new_step()
        self.coordinator.abort()
        self._broken = self.optimizer.abandon()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` will update the parameters."""
        return self._boundary

    @user_facing
    def step(self) -> None:
        """Clip, update, refresh; only after the last micro-step, otherwise nothing."""
        self._must_be_open()
        if not self._boundary:
            return
        self._refuse_open_blocks()
        self.coordinator.new_step()
        norm = grad_norm(self.params.params, self.params.collectives, f"a step with {self.optimizer.described()}")
        scale = clip_scale(norm.value, self.config.gradient_clipping)
        self.optimizer.check_unchanged(scale)
        self._grad_norm = norm.value
        if norm.nonfinite is not None:
            self._report_nonfinite(norm.nonfinite)
        self._broken = True  # until the step is whole: taken twice, it would use the same gradient twice
        self._telling(self.optimizer.apply, scale)
        for zero in self.params.params:
            if zero.trainable:
                zero.replaced()
        self.params.refresh_persistent()
        self.reducer.new_step()
        self._broken = self._boundary = False
        self.global_steps += 1
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def _refuse_open_blocks(self) -> None:
        """What a GatheredParameters block shows would be old, and its end could put it back."""
        held = [zero.name for zero in self.params.params if zero.blocks]
        if held:
            raise UsageError(f"engine.step() inside a GatheredParameters block with {held[0]}; leave the block first")

    def _report_nonfinite(self, name: str) -> None:
        self.nonfinite_steps += 1
        if self.nonfinite_steps == 1:
            log.warning("step %d: the gradient of %s is not finite; the step is taken", self.global_steps + 1, name)

    def _plan(self) -> None:
        """Record two whole steps once the trace holds, then tell the backends; again after it stopped holding."""
        trace, access_log, early = self.coordinator.trace, self._access_log, self.optimizer.early
        if not trace.settled:
            access_log.stop()
            if early is not None:
                early.learn()
        elif self._planned_for != trace.invalidations:
            if early is not None and not early.settle():
                return
            self._planned_for = trace.invalidations
            access_log.restart()
        else:
            access_log.step_ended()

    # ---- the rest -----------------------------------------------------------------------------------------------
    def train(self, mode: bool = True) -> Engine:
        """As `nn.Module.train`."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """As `nn.Module.eval`."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """As `nn.Module.training`."""
        return self.module.training

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters, gathered or not."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters by name, gathered or not."""
        return self.module.named_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Accumulation restarts by itself after each step."""

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradient before clipping, over all ranks; None before the first step."""
        return self._grad_norm

    def get_lr(self) -> list[float]:
        """Learning rate of each param_group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-step."""
        return self.batch.micro

    def train_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self.batch.train

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per step."""
        return self.batch.accumulation

    def statistics(self) -> dict[str, float]:
        """Counters of the engine itself; those of the backends are at `engine.backends`."""
        return {
            "trace_invalidations": self.coordinator.trace.invalidations,
            "cancelled_prefetches": self.coordinator.cancelled_prefetches,
            "on_demand_gathers": self.coordinator.on_demand,
            "late_gradients": self.reducer.late,
            "nonfinite_steps": self.nonfinite_steps,
            "live_parameters": self.params.live_numel,
            "live_parameters_max": self.params.live_numel_max,
            "live_parameter_bytes": self.params.live_bytes(),
            "access_plans": self._access_log.plans,
            "gradient_bytes": self.optimizer.gradient_bytes(),
            "early_updates": self.optimizer.early.taken if self.optimizer.early is not None else 0,
        }

    @user_facing
    def close(self) -> None:
        """Take the hooks off and give the backends back. The parameters stay sharded. Idempotent. Raises what stopped
        the last step's updates, if nothing has raised it yet."""
        if self._closed:
            return
        self._closed = True
        met: list[BaseException] = []
        for end in (self.optimizer.close, self._hooks.remove, self.params.detach, self.backends.close):
            try:
                end()
            except BaseException as error:
                # Nothing that is held may stay because something else could not be given back.
                met.append(error)
        news = [error for error in met if error is not self._told]
        for later in news[1:]:
            log.warning("closing the engine also met: %s", later)
        if news:
            raise news[0]

    destroy = close

    def _telling(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Every use of the engine raises what stopped an update; remembered, so that `close` does not say it again."""
        try:
            return act(*args, **kwargs)
        except BaseException as error:
            self._told = error
            raise

    def _must_be_open(self) -> None:
        if self._closed:
            raise UsageError("the engine is closed")
        if self._broken:
            raise UsageError("a step failed half-way, so the parameters are of no use; start again from a checkpoint")
