"""ShardedAdam: Adam/AdamW over this rank's shards, tile by tile, wherever the state lives.

Owned by the engine. Per tile: fetch (the next tile's fetches are started first), update, store. Without overlap, tiles
run forwards in one step and backwards in the next, so that a cache between here and the disk finds half of what it
kept. With overlap they run in the order in which the next forward needs them, on a thread of their own. The arithmetic
is per element and does not depend on tiles, order, overlap or where the state lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from trainer.optim.adam import Update
from trainer.optim.deferred import Deferred
from trainer.optim.hyper import AdamHyper, hyper_of
from trainer.optim.leases import ParamLeases
from trainer.optim.subgroups import Piece, SubGroup, Work, plan_subgroups, plan_work
from trainer.swap.accesslog import AccessLog
from trainer.swap.backend import Pending, SwapBackend, SwapSpec
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
    ) -> None:
        """`overlap`: update what is not persistent while the next forward runs."""
        super().__init__(param_groups, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        self.steps = 0
        """Optimizer steps taken."""
        self._param_backend, self._state_backend, self._log = param_backend, state_backend, log
        self._update = update
        self._deferred = Deferred() if overlap else None
        groups = [[_zero(param) for param in group["params"]] for group in self.param_groups]
        self._subgroups = plan_subgroups(groups, sub_group_size)
        self._works = [work for sub in self._subgroups for work in plan_work(sub, self._register(sub))]
        for sub in self._subgroups:
            flat = torch.zeros(sub.numel, dtype=grad_dtype or sub.dtype)
            for zero, offset in sub.entries:
                zero.grad_shard = flat[offset : offset + zero.layout.shard_numel]
        for work in self._works:
            self._initialise(work)

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
    @torch.no_grad()
    def apply(self, grad_scale: float) -> None:
        """Update every trainable shard from its accumulated gradient times `grad_scale`."""
        self.steps += 1
        hypers = [hyper_of(group, self.steps, grad_scale) for group in self.param_groups]

        def run(works: Sequence[Work], done: Callable[[Work], None]) -> None:
            self._run(works, hypers, done)

        if self._deferred is None:
            run(self._works if self.steps % 2 else self._works[::-1], lambda work: None)
            return
        # Persistent parameters are gathered again as soon as the step returns, so theirs come first and at once.
        now = [work for work in self._works if work.subgroup.persistent]
        run(now, lambda work: None)
        self._deferred.start([work for work in self._works if not work.subgroup.persistent], run)

    @property
    def idle(self) -> bool:
        """Whether no update is under way."""
        return self._deferred is None or self._deferred.idle

    def wait(self, zero: ZeroParam) -> None:
        """Return when a parameter's update is complete."""
        if self._deferred is not None:
            self._state_backend.waited(self._deferred.wait(zero))

    def drain(self) -> None:
        """Return when the last step is complete for every parameter; raise what stopped it."""
        if self._deferred is not None:
            self._state_backend.waited(self._deferred.drain())

    @torch.no_grad()
    def _run(self, order: Sequence[Work], hypers: Sequence[AdamHyper], done: Callable[[Work], None]) -> None:
        leases = ParamLeases(self._param_backend, self._log)
        ahead = self._start(order[0], leases) if order else []
        for number, work in enumerate(order):
            states = ahead
            # The next tile's fetches go out before this tile is computed: the disk works meanwhile.
            ahead = self._start(order[number + 1], leases) if number + 1 < len(order) else []
            self._update_tile(work, states, leases, hypers[work.subgroup.group])
            done(work)
        if not leases.all_closed():
            raise AssertionError("an optimizer step left a parameter slot open")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Not for callers: the engine clips, updates and refreshes together."""
        raise RuntimeError("call engine.step() instead of engine.optimizer.step()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients never stay in `param.grad`; accumulation restarts after each engine.step()."""

    def _start(self, work: Work, leases: ParamLeases) -> list[Pending]:
        states = []
        for _, tile in work.states:
            self._log.note(self._state_backend, tile, "update")
            states.append(self._state_backend.fetch(tile, "update"))
        for piece in work.pieces:
            leases.start(piece, "overwrite" if work.subgroup.has_master else "update")
        return states

    def _update_tile(self, work: Work, states: Sequence[Pending], leases: ParamLeases, hyper: AdamHyper) -> None:
        slots = [pending.wait() for pending in states]
        for piece in work.pieces:
            self._update_piece(piece, [_part(slot.tensor, piece) for slot in slots], leases.view(piece), hyper)
            leases.done(piece)
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
