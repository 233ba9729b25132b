"""DaemonBackend: shards kept by offloadd, in its arena and on its disks.

A fetched tile is a slot of the arena, seen as a tensor with no copy. The slot goes back when, after `store` or
`release`, the last tensor over it has died: autograd may keep views that the engine has let go of.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offloadd.client import (
    PLAN_LENGTH_MAX,
    ClientSession,
    Mode,
    OffloadError,
    PrivateDaemon,
    RegisteredShard,
    ShardSpec,
    connect,
    start_private,
)
from offloadd.client import Pending as ClientPending
from offloadd.client import Slot as ClientSlot
from trainer.swap.backend import Access, Pending, Slot, SwapError, SwapShard, SwapSpec, Tile
from trainer.swap.window import ReadWindow
from trainer.zero.collectives import default_collectives
from trainer.zero.errors import CollectiveError

log = logging.getLogger(__name__)

TILE_GRANULARITY = 1024
PINNED_TILES = 12
"""Most tiles the engine holds at once: four states of the tile in work and of the next, and their parameters."""

START_SECONDS_MAX = 60.0
"""Longest wait for a private daemon."""
STOP_SECONDS_MAX = 5.0
"""Longest wait for a private daemon's end; it waits for the other ranks of the node."""

_ENGINES: dict[str, dict[str, object]] = {
    "auto": {},
    "threads": {"io.engine": "threads"},
    "liburing": {"io.engine": "uring", "io.driver": "liburing"},
    "native": {"io.engine": "uring", "io.driver": "native"},
}
_MODES = {"read": Mode.READ, "update": Mode.UPDATE, "overwrite": Mode.OVERWRITE}


class DaemonSlot:
    """A slot of the arena as a tensor."""

    def __init__(
        self, tile: Tile, slot: ClientSlot, dtype: torch.dtype, title: str, window: ReadWindow | None = None
    ) -> None:
        self.tile = tile
        self._window = window
        self._slot = slot
        self._title = title
        self.tensor = (
            torch.frombuffer(slot.buffer, dtype=dtype) if slot.buffer is not None else torch.empty(0, dtype=dtype)
        )
        self._version = self.tensor._version

    def store(self) -> None:
        self.tensor = self.tensor.new_empty(0)
        _translate(self._slot.store)

    def release(self) -> None:
        changed = self.tensor._version != self._version
        self.tensor = self.tensor.new_empty(0)
        _translate(self._slot.release)
        if self._window is not None:
            self._window.leave()
        if changed:
            raise SwapError(
                f"{self._title} was changed in place while fetched for reading; the change is lost: "
                "fetch it for update, or edit the parameter inside GatheredParameters(modifier_rank=...)"
            )


class DaemonPending:
    """A fetch under way, or one that waits for its turn."""

    def __init__(
        self,
        session: ClientSession,
        shard: RegisteredShard,
        tile: Tile,
        mode: str,
        dtype: torch.dtype,
        window: ReadWindow | None,
    ) -> None:
        self._ask = (session, shard, mode)
        self._tile, self._dtype, self._window = tile, dtype, window
        self._pending: ClientPending | None = None
        self._failure: OffloadError | None = None
        if window is None:
            self.begin()
        else:
            window.enter(self)

    def begin(self) -> None:
        session, shard, mode = self._ask
        try:
            self._pending = session.fetch(shard, self._tile.index, _MODES[mode])
        except OffloadError as error:
            self._failure = error

    def wait(self) -> Slot:
        window = self._window
        if window is not None:
            window.need(self)
        try:
            if self._pending is None:
                raise self._failure or AssertionError("a fetch that was begun has neither an answer nor a failure")
            return DaemonSlot(self._tile, self._pending.wait(), self._dtype, self._pending.title, window)
        except BaseException as error:
            # Ctrl-C too: the session gives back what still comes of a fetch that nobody waits for any more.
            if window is not None:
                window.leave()
            if isinstance(error, OffloadError):
                raise SwapError(error.message) from error
            raise


class DaemonBackend:
    """One session with a daemon; made by `connect`."""

    def __init__(
        self, session: ClientSession, patience_s: float = START_SECONDS_MAX, daemon: PrivateDaemon | None = None
    ) -> None:
        """`patience_s`: longest wait for the other ranks in `register`. `daemon`: the one that this rank started, and
        ends."""
        self._session = session
        self._private = daemon
        self._patience_s = patience_s
        numel = session.tile_bytes // 4
        if numel >= TILE_GRANULARITY:
            numel -= numel % TILE_GRANULARITY
        self.tile_numel = numel
        # What the optimizer works with at once, perhaps beside a forward, stays free of reads.
        self._reads = ReadWindow(session.host_bytes // session.tile_bytes - PINNED_TILES - 1)
        self._shards: list[tuple[SwapShard, RegisteredShard]] = []
        self._started = time.monotonic()

    @property
    def daemon(self) -> dict[str, Any]:
        """Which daemon serves this rank, and what it granted: pid, engine, driver, endpoint, private, paths,
        host_bytes, tile_bytes."""
        hello = self._session.control.hello
        return {
            "pid": hello.pid,
            "engine": hello.engine,
            "driver": hello.driver,
            "endpoint": self._session.control.where,
            "private": hello.private_daemon,
            "paths": list(hello.paths),
            "host_bytes": self._session.host_bytes,
            "tile_bytes": self._session.tile_bytes,
        }

    @classmethod
    def connect(
        cls,
        endpoint: str | None,
        *,
        job: str | None,
        rank: int,
        world: int,
        local_rank: int,
        local_world: int,
        nvme_path: str | None,
        host_bytes: int | None,
        swap_bytes: int | None,
        timeout_s: float,
        token_file: str | None,
        engine: str = "auto",
    ) -> DaemonBackend:
        """Join the daemon at `endpoint`; None starts a private one on the node's lowest rank, with its swap files in
        `nvme_path` (several directories separated by ':'). `host_bytes` and `swap_bytes` are per rank; None: an equal
        share of the daemon's. Collective over all ranks. SwapError, one sentence, on every rank if it cannot be."""
        patience_s = 2 * timeout_s + START_SECONDS_MAX
        daemon, session, failure = None, None, ""
        try:
            if endpoint is None and local_rank == 0:
                try:
                    daemon = _start_private(nvme_path, host_bytes, local_world, engine)
                except OffloadError as error:
                    failure = error.message
            mine = daemon.endpoint if daemon else endpoint or ""
            where, launch = _agree_on_endpoint(mine, failure, rank if endpoint else rank - local_rank, patience_s)
            try:
                session = connect(
                    where,
                    job=job or "",
                    launch_id=launch,
                    rank=rank,
                    world_size=world,
                    local_world_size=local_world,
                    host_bytes_min=host_bytes or 0,
                    timeout_s=timeout_s,
                    token_file=token_file,
                )
                session.reserve(host_bytes or 0, swap_bytes or 0, pinned_tiles=PINNED_TILES)
            except OffloadError as error:
                failure = error.message
            _share_fate(failure, patience_s, "the connection to the daemon")
            if session is None:
                raise AssertionError("a rank without a session has said why")
            return cls(session, patience_s, daemon)
        except BaseException:
            if session is not None:
                session.close()
            if daemon is not None:
                daemon.stop(STOP_SECONDS_MAX)
            raise

    def register(self, specs: Sequence[SwapSpec]) -> list[SwapShard]:
        """Collective over all ranks: where one of them finds no room, all get its sentence."""
        wanted = [
            ShardSpec(
                name=spec.name,
                dtype=str(spec.dtype).removeprefix("torch."),
                length=spec.numel * spec.dtype.itemsize,
                kind=spec.kind,
                tile_bytes=self.tile_numel * spec.dtype.itemsize,
            )
            for spec in specs
        ]
        registered: list[RegisteredShard] = []
        failure = ""
        try:
            registered = self._session.register(wanted)
        except OffloadError as error:
            failure = error.message
        _share_fate(failure, self._patience_s, "the registration of shards")
        out = []
        for spec, shard in zip(specs, registered, strict=True):
            number, item = len(self._shards), spec.dtype.itemsize
            tiles = tuple(
                Tile(number, i, start // item, length // item) for i, (start, length) in enumerate(shard.tiles)
            )
            out.append(SwapShard(number, spec, tiles))
            self._shards.append((out[-1], shard))
        return out

    def fetch(self, tile: Tile, mode: str) -> Pending:
        shard, registered = self._shards[tile.shard]
        window = self._reads if mode == "read" else None
        return DaemonPending(self._session, registered, tile, mode, shard.spec.dtype, window)

    def plan(self, accesses: Sequence[Access], steps: int = 1) -> None:
        if len(accesses) > PLAN_LENGTH_MAX:
            # A hint is nothing to end a job for.
            log.warning(
                "%d fetches in %d steps are more than an access plan holds (%d), so nothing is loaded ahead of time; "
                "larger tiles or fewer micro-steps need fewer fetches",
                len(accesses),
                steps,
                PLAN_LENGTH_MAX,
            )
            return
        try:
            self._session.plan([(self._shards[a.shard][1].number, a.tile, _MODES[a.mode]) for a in accesses], steps)
        except OffloadError as error:
            raise SwapError(error.message) from error

    def waited(self, seconds: float) -> None:
        self._session.note_blocked(int(seconds * 1e9))

    def flush(self) -> None:
        _translate(self._session.flush)

    def statistics(self) -> dict[str, float]:
        try:
            return self._session.statistics()
        except OffloadError as error:
            raise SwapError(error.message) from error

    def close(self) -> None:
        self._session.close()
        daemon, self._private = self._private, None
        if daemon is not None:
            daemon.stop(STOP_SECONDS_MAX)


def _translate(call: object) -> None:
    try:
        call()  # type: ignore[operator]
    except OffloadError as error:
        raise SwapError(error.message) from error


def _share_fate(failure: str, patience_s: float, what: str) -> None:
    """Raise the lowest failing rank's sentence on every rank; nobody goes on alone."""
    failures = [theirs for theirs in _exchange(failure, patience_s, what) if theirs]
    if failures:
        raise SwapError(failures[0])


def _exchange(mine: Any, patience_s: float, what: str) -> list[Any]:
    try:
        return default_collectives(patience_s).exchange(mine, what)
    except CollectiveError as error:
        raise SwapError(str(error)) from error


def _start_private(nvme_path: str | None, host_bytes: int | None, local_world: int, engine: str) -> PrivateDaemon:
    settings = {
        "memory.host_bytes": (host_bytes or _default_host_bytes(local_world)) * local_world,
        **_ENGINES[engine],
    }
    return start_private((nvme_path or "").split(":"), settings, START_SECONDS_MAX)


def _agree_on_endpoint(mine: str, failure: str, source: int, patience_s: float) -> tuple[str, str]:
    """(endpoint of rank `source`, launch id), or the sentence of the first rank that could not start its daemon."""
    everyone = _exchange((mine, secrets.token_hex(8), failure), patience_s, "the start of the daemon")
    failures = [theirs for _, _, theirs in everyone if theirs]
    if failures:
        raise SwapError(failures[0])
    return everyone[source][0], everyone[0][1]


def _default_host_bytes(local_world: int) -> int:
    """Per rank, where the configuration says nothing: a quarter of what the node has free now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // 4 // local_world
    return 1 << 30
