"""Flushes on their way to disk: spills, then syncs, then the catalog, then the answer.

Driven by the pump, which lends the means to spill, sync and reply. Each flush covers what was stored before it came.
The first error wins and is the answer; a spill that had failed before is reported by the next flush, once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum
from errno import EIO, ENOSPC
from typing import Protocol

from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import CATALOG_PATH, Outcome, Request, Residency
from offloadd.store.holdings import SLICE_TILES
from offloadd.store.outcomes import Settled, classify
from offloadd.store.residency import Tile
from offloadd.store.store import Store


class Answer(Protocol):
    """How a flush is answered."""

    def __call__(self, request: Request, code: Code, now_ns: int, errno: int = 0, path: int = 0) -> None: ...


class Phase(IntEnum):
    """How far a flush has come."""

    SPILL = 0
    SYNC = 1
    COMMIT = 2


class FlushJob:
    """One FLUSH request."""

    __slots__ = ("commit", "committing", "error", "phase", "remaining", "request", "syncs", "unasked")

    def __init__(self, request: Request, tiles: list[Tile]) -> None:
        self.request = request
        self.remaining = set(tiles)
        """Tiles whose spill it waits for."""
        self.unasked = tiles
        """Those whose spill has not been asked for yet."""
        self.syncs: dict[int, int] = {}
        """File to the count of its spills when its sync, now in flight, began."""
        self.phase = Phase.SPILL
        self.commit: Future[None] | None = None
        self.committing: set[int] = set()
        """Shards that the commit is about."""
        self.error: tuple[Code, int, int] | None = None
        """(code, errno, path) of the first thing that failed."""

    def fail(self, code: Code, errno: int, path: int) -> None:
        """Remember the first failure."""
        if self.error is None:
            self.error = (code, errno, path)


class Flushes:
    """All flushes under way."""

    def __init__(
        self,
        store: Store,
        want_spill: Callable[[Tile, int], None],
        sync: Callable[[FlushJob, int, int], None],
        answer: Answer,
    ) -> None:
        self._store = store
        self._want_spill = want_spill
        self._sync = sync
        self._answer = answer
        self._jobs: dict[int, list[FlushJob]] = {}
        self._committing: list[FlushJob] = []

    def begin(self, request: Request, now_ns: int) -> None:
        """Start a flush; LEASE_CONFLICT while something stored before is leased for writing again."""
        tiles = self._store.flush_set(request.session)
        if tiles is None:
            self._answer(request, Code.LEASE_CONFLICT, now_ns)
            return
        job = FlushJob(request, tiles)
        self._jobs.setdefault(request.session, []).append(job)
        self._advance(job, now_ns)

    def spilled(self, tile: Tile, settled: Settled, now_ns: int) -> None:
        """A spill ended, well or badly."""
        if not tile.flushing:
            return
        for job in list(self._jobs.get(tile.session, ())):
            if tile not in job.remaining:
                continue
            job.remaining.discard(tile)
            self._store.flushed(tile)
            if settled.code is not Code.OK:
                job.fail(settled.code, settled.errno, tile.path)
            self._advance(job, now_ns)

    def synced(self, job: FlushJob, file: int, outcome: Outcome, path: int, now_ns: int) -> None:
        """A sync ended."""
        covered = job.syncs.pop(file)
        settled = classify(outcome, 0)
        if settled.code is Code.OK:
            held = self._store.holdings(job.request.session)
            held.synced[file] = max(held.synced.get(file, 0), covered)
        else:
            job.fail(settled.code, settled.errno, path)
        self._advance(job, now_ns)

    def poll(self, now_ns: int) -> bool:
        """Ask for spills, some at a time, and look at the catalog's commits. True: there is more to ask for."""
        asked = 0
        for jobs in self._jobs.values():
            for job in jobs:
                while job.unasked and asked < SLICE_TILES:
                    asked += 1
                    tile = job.unasked.pop()
                    if tile.residency is Residency.RESIDENT:
                        self._want_spill(tile, now_ns)
        if self._committing:
            for job in [job for job in self._committing if job.commit is not None and job.commit.done()]:
                self._committing.remove(job)
                failure = job.commit.exception() if job.commit is not None else None
                if failure is not None:
                    self._store.commit_failed(job.request.session, job.committing)
                    full = isinstance(failure, OffloadError) and failure.code is Code.NO_SPACE
                    job.fail(*((Code.NO_SPACE, ENOSPC) if full else (Code.IO_ERROR, EIO)), CATALOG_PATH)
                self._finish(job, now_ns)
        return asked == SLICE_TILES

    def forget(self, session: int) -> None:
        """The session is gone; its flushes are answered nowhere."""
        self._jobs.pop(session, None)
        self._committing = [job for job in self._committing if job.request.session != session]

    def _advance(self, job: FlushJob, now_ns: int) -> None:
        if job.phase is Phase.SPILL and not job.remaining:
            if job.error is not None:
                self._finish(job, now_ns)
                return
            job.phase = Phase.SYNC
            self._begin_syncs(job)
        if job.phase is Phase.SYNC and not job.syncs:
            commit = None if job.error is not None else self._store.commit_flush(job.request.session)
            if commit is None:
                self._finish(job, now_ns)
                return
            job.phase = Phase.COMMIT
            job.commit, job.committing = commit
            self._committing.append(job)

    def _begin_syncs(self, job: FlushJob) -> None:
        held = self._store.holdings(job.request.session)
        paths = {target.file: target.path for target in held.terms.files}
        files = held.unsynced()
        for file in files:
            job.syncs[file] = held.writes[file]
        for file in files:
            self._sync(job, file, paths[file])

    def _finish(self, job: FlushJob, now_ns: int) -> None:
        self._jobs[job.request.session].remove(job)
        held = self._store.holdings(job.request.session)
        error = job.error or held.spill_error
        held.spill_error = None
        if error is None:
            self._answer(job.request, Code.OK, now_ns)
        else:
            self._answer(job.request, error[0], now_ns, error[1], error[2])
