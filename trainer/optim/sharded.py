"""ShardedAdam: Adam/AdamW over this rank's shards, tile by tile, wherever the state lives.

Owned by the engine. Per tile: fetch (the next tile's fetches are started first), update, store. Without overlap, tiles
run forwards in one step and backwards in the next, so that a cache between here and the disk finds half of what it
kept. With overlap they run in the order in which the next forward needs them, on a thread of their own, which may
begin with those that it needs last while backward still runs. The arithmetic is per element and does not depend on
tiles, order, overlap or where the state lives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from trainer.optim.adam import Update
from trainer.optim.deferred import Deferred
from trainer.optim.early import EarlyWorks, Stage
from trainer.optim.hyper import AdamHyper, hyper_of
from trainer.optim.leases import ParamLeases
from trainer.optim.subgroups import Piece, SubGroup, Work, plan_subgroups, plan_work
from trainer.swap.accesslog import AccessLog
from trainer.swap.backend import Pending, SwapBackend, SwapSpec
from trainer.zero.errors import UsageError
from trainer.zero.parameter import ZeroParam

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdam(torch.optim.Optimizer):
    """`param_groups` is the interface for schedulers: what they set is what the next step uses."""

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        *,
        sub_group_size: int,
        param_backend: SwapBackend,
        state_backend: SwapBackend,
        log: AccessLog,
        update: Update,
        grad_dtype: torch.dtype | None,
        overlap: bool = False,
        early: bool = False,
    ) -> None:
        """`overlap`: update while the next forward runs. `early`: with it, begin in backward."""
        super().__init__(param_groups, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        self.steps = 0
        """Optimizer steps taken."""
        self._param_backend, self._state_backend, self._log = param_backend, state_backend, log
        self._update = update
        self._leases = ParamLeases(param_backend, log)
        self._deferred = Deferred(self._run) if overlap else None
        self._halved = False
        """Whether a step was abandoned after part of it had been taken."""
        self._hypers: list[AdamHyper] = []
        """Of the step that is under way, by param_group."""
        groups = [[_zero(param) for param in group["params"]] for group in self.param_groups]
        self._subgroups = plan_subgroups(groups, sub_group_size)
        self._works = [work for sub in self._subgroups for work in plan_work(sub, self._register(sub))]
        for sub in self._subgroups:
            flat = torch.zeros(sub.numel, dtype=grad_dtype or sub.dtype)
            for zero, offset in sub.entries:
                zero.grad_shard = flat[offset : offset + zero.layout.shard_numel]
        for work in self._works:
            self._initialise(work)
        # Persistent parameters are gathered again as soon as the step returns, so theirs come first.
        self._first = [work for work in self._works if work.subgroup.persistent]
        self._others = [work for work in self._works if not work.subgroup.persistent]
        self.early = EarlyWorks(self._others) if overlap and early else None
        """What may be updated while backward runs; None: nothing."""

    def gradient_bytes(self) -> int:
        """Bytes of the accumulated gradients: in this rank's own memory, outside any daemon's budget."""
        shards = [zero.grad_shard for sub in self._subgroups for zero, _ in sub.entries]
        return sum(shard.nbytes for shard in shards if shard is not None)

    # ---- layout -------------------------------------------------------------------------------------------------
    def _register(self, sub: SubGroup) -> list[tuple[str, Any]]:
        kinds = (("master",) if sub.has_master else ()) + _MOMENTS
        specs = [SwapSpec(f"{kind}/{sub.index}", sub.numel, torch.float32, kind) for kind in kinds]
        return list(zip(kinds, self._state_backend.register(specs), strict=True))

    def _initialise(self, work: Work) -> None:
        for kind, tile in work.states:
            slot = self._state_backend.fetch(tile, "overwrite").wait()
            if kind == "master":
                self._each_param(work, _into(slot.tensor, torch.Tensor.copy_))
            else:
                slot.tensor.zero_()
            slot.store()

    def _each_param(self, work: Work, visit: Callable[[Piece, torch.Tensor], Any]) -> None:
        """Visit the parameter elements under a tile, read only."""
        for piece in work.pieces:
            slot = self._param_backend.fetch(piece.tile, "read").wait()
            visit(piece, slot.tensor[piece.in_param : piece.in_param + piece.numel])
            slot.release()

    # ---- the step -----------------------------------------------------------------------------------------------
    def begin_backward(self) -> None:
        """The backward begins that completes this step's gradients. The last step is drained. What is set in
        `param_groups` from here on comes too late for what is updated early."""
        if self.early is not None:
            self.early.begin()
            self._begin(1.0)

    def reduced(self, zeros: Sequence[ZeroParam]) -> None:
        """These gradients are complete, unless something odd happens."""
        if self.early is not None and self._deferred is not None:
            self._deferred.add(self.early.reduced(zeros))

    def abandon(self) -> bool:
        """The step that has begun will not be taken. Returns whether parts of it were already."""
        if self.early is not None and self._deferred is not None and self.early.open:
            self._halved = self._halved or self.early.begun
            self.early.end(len(self._deferred.take_back()))
        return self._halved

    def described(self) -> str:
        """The hyper-parameters of every group. Ranks with different ones would each update their own part by them."""
        groups = [", ".join(f"{key} {group[key]}" for key in group if key != "params") for group in self.param_groups]
        return "; ".join(groups)

    def check_unchanged(self, grad_scale: float) -> None:
        """UsageError if the step that has begun in backward cannot be completed with what `param_groups` say now."""
        early = self.early is not None and self.early.begun
        if early and [hyper_of(group, self.steps + 1, grad_scale) for group in self.param_groups] != self._hypers:
            raise UsageError(
                "a learning rate or another hyper-parameter was changed between engine.backward() and engine.step(), "
                "when part of the update had been done; put it back and change it before the next engine.backward(), "
                "or set offloadd.update_in_backward to false"
            )

    def apply(self, grad_scale: float) -> None:
        """Update every trainable shard from its accumulated gradient times `grad_scale`."""
        self._begin(grad_scale)
        self.steps += 1
        if self._deferred is None:
            rest = deque(self._works if self.steps % 2 else self._works[::-1])
            self._run(lambda: rest.popleft() if rest else None, lambda work: None)
            self._all_closed()
        elif self.early is None:
            self._deferred.add(self._first + self._others)
        else:
            undone = self._deferred.take_back()
            settled = self.early.stage is Stage.SETTLED
            # Once settled the order is that of the plan; in a rehearsal what was not begun is done in forward's order.
            late = [work for work in self._others if not self.early.offered(work) or (work in undone and not settled)]
            self.early.end(len(undone))
            self._deferred.add((undone if settled else []) + self._first + late)

    def _begin(self, grad_scale: float) -> None:
        self._hypers = [hyper_of(group, self.steps + 1, grad_scale) for group in self.param_groups]

    @property
    def idle(self) -> bool:
        """Whether no update is under way."""
        return self._deferred is None or self._deferred.idle

    def wait(self, zero: ZeroParam) -> None:
        """Return when a parameter's update is complete."""
        if self.early is not None:
            self.early.gathered(zero)
        if self._deferred is not None:
            self._state_backend.waited(self._deferred.wait(zero))

    def refuse_half_taken(self) -> None:
        """UsageError while part of a step is done."""
        if self.early is not None and self.early.begun:
            raise UsageError("part of this step's update is done already; call engine.step() first")

    def drain(self) -> None:
        """Return when the last step is complete for every parameter; raise what stopped it."""
        self.refuse_half_taken()
        if self._deferred is not None:
            self._state_backend.waited(self._deferred.drain())
            self._all_closed()

    def close(self) -> None:
        """Complete the last step, and raise what stopped it. One that had begun in backward goes no further."""
        if not self.abandon():
            self.drain()
        elif self._deferred is not None:
            self._deferred.drain()

    def _all_closed(self) -> None:
        if not self._leases.all_closed():
            raise AssertionError("an optimizer step left a parameter slot open")

    @torch.no_grad()
    def _run(self, take: Callable[[], Work | None], done: Callable[[Work], None]) -> None:
        ahead = self._start(take())
        while ahead is not None:
            work, states = ahead
            # The next tile's fetches go out before this tile is computed: the disk works meanwhile.
            ahead = self._start(take())
            self._update_tile(work, states, self._hypers[work.subgroup.group])
            done(work)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Not for callers: the engine clips, updates and refreshes together."""
        raise UsageError("call engine.step() instead of engine.optimizer.step()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients never stay in `param.grad`; accumulation restarts after each engine.step()."""

    def _start(self, work: Work | None) -> tuple[Work, list[Pending]] | None:
        if work is None:
            return None
        states = []
        for _, tile in work.states:
            self._log.note(self._state_backend, tile, "update")
            states.append(self._state_backend.fetch(tile, "update"))
        for piece in work.pieces:
            self._leases.start(piece, "overwrite" if work.subgroup.has_master else "update")
        return work, states

    def _update_tile(self, work: Work, states: Sequence[Pending], hyper: AdamHyper) -> None:
        slots = [pending.wait() for pending in states]
        for piece in work.pieces:
            self._update_piece(piece, [_part(slot.tensor, piece) for slot in slots], self._leases.view(piece), hyper)
            self._leases.done(piece)
        for slot in slots:
            slot.store()

    def _update_piece(self, piece: Piece, states: list[torch.Tensor], param: torch.Tensor, hyper: AdamHyper) -> None:
        if piece.zero.grad_shard is None:
            raise AssertionError(f"{piece.zero.name} has no gradient")
        first = piece.tile.start + piece.in_param
        grad = piece.zero.grad_shard[first : first + piece.numel]
        if piece.zero.dtype is torch.float32:
            exp_avg, exp_avg_sq = states
            self._update(param, exp_avg, exp_avg_sq, grad, None, hyper)
        else:
            master, exp_avg, exp_avg_sq = states
            self._update(master, exp_avg, exp_avg_sq, grad, param, hyper)

    # ---- state from outside -------------------------------------------------------------------------------------
    @torch.no_grad()
    def refresh_masters(self, changed: Sequence[ZeroParam]) -> None:
        """Parameter shards were replaced: masters follow, but keep their extra bits where the 16-bit value is still
        theirs."""
        self.drain()
        wanted = set(changed)
        for work in self._works:
            if work.subgroup.has_master and any(piece.zero in wanted for piece in work.pieces):
                slot = self._state_backend.fetch(work.states[0][1], "update").wait()
                self._each_param(work, _into(slot.tensor, _follow))
                slot.store()

    def shard_states(self) -> Iterator[tuple[ZeroParam, dict[str, torch.Tensor]]]:
        """This rank's shard of each trainable parameter: copies of master, exp_avg and exp_avg_sq, in fp32, padding
        included."""
        self.drain()
        for sub in self._subgroups:
            kinds = ("master", *_MOMENTS)
            found = {z: {kind: torch.empty(z.layout.shard_numel) for kind in kinds} for z, _ in sub.entries}
            for work in self._works:
                if work.subgroup is sub:
                    self._copy_out(work, found)
            yield from found.items()

    def _copy_out(self, work: Work, found: dict[ZeroParam, dict[str, torch.Tensor]]) -> None:
        def put(kind: str, piece: Piece, part: torch.Tensor) -> None:
            first = piece.tile.start + piece.in_param
            found[piece.zero][kind][first : first + piece.numel].copy_(part)

        for kind, tile in work.states:
            slot = self._state_backend.fetch(tile, "read").wait()
            for piece in work.pieces:
                put(kind, piece, _part(slot.tensor, piece))
            slot.release()
        if not work.subgroup.has_master:
            self._each_param(work, lambda piece, param: put("master", piece, param))


def _part(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor[piece.in_state : piece.in_state + piece.numel]


def _into(state: torch.Tensor, change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., None]:
    """A visitor that changes the part of `state` under each piece."""

    def visit(piece: Piece, param: torch.Tensor) -> None:
        change(_part(state, piece), param)

    return visit


def _follow(master: torch.Tensor, param: torch.Tensor) -> None:
    master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))


def _zero(param: torch.Tensor) -> ZeroParam:
    zero: ZeroParam = param._zero  # type: ignore[attr-defined]
    return zero
