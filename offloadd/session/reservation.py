"""All-or-none reservation: a job's ranks on this node ask for memory and swap space, and get it together.

Nobody is granted anything before everybody has asked, so that a model that does not fit is refused before step 1
on every rank, with the same sentence.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from offloadd.core.errors import Code, OffloadError
from offloadd.core.units import KIB, MIB, PAGE_BYTES, REGISTRATION_CHUNK_BYTES, align_up, human
from offloadd.session.registry import Job, Registry, Session

TILE_BYTES_MIN = 64 * KIB
TILE_BYTES_MAX = 8 * MIB
TILE_BYTES_WORTH = 512 * KIB
"""Smaller ones cost more in decisions than they gain in overlap."""
TILES_PER_REGION = 64
"""A tile chosen by the daemon is about this fraction of the region: small enough to overlap, large enough to
stream."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one rank asks for. host_bytes 0: an equal share of what is left. swap_bytes 0: what its shards will need,
    charged when they are registered. tile_bytes 0: the daemon chooses."""

    host_bytes: int
    swap_bytes: int
    tile_bytes: int
    pinned_tiles: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Grant:
    host_bytes: int
    swap_bytes: int
    tile_bytes: int


@dataclass(slots=True)
class _Round:
    needs: dict[Session, Need] = field(default_factory=dict)
    done: asyncio.Future[dict[Session, Grant]] | None = None


class Reservations:
    """One open round per job."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._rounds: dict[Job, _Round] = {}

    async def reserve(self, session: Session, need: Need, timeout_s: float) -> Grant:
        """Wait for the other ranks of the job on this node, at most `timeout_s`, and share their fate."""
        if session.region is not None:
            raise OffloadError(Code.BAD_REQUEST, f"{session.title} has reserved already; reserve once, before step 1")
        job = session.job
        current = self._rounds.setdefault(job, _Round())
        if current.done is None:
            current.done = asyncio.get_running_loop().create_future()
            # A round that fails while nobody waits any more is not an error of the loop.
            current.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        current.needs[session] = need
        if len(current.needs) == job.local_world_size:
            del self._rounds[job]
            self._decide(job, current)
        try:
            grants = await asyncio.wait_for(asyncio.shield(current.done), timeout_s)
        except asyncio.TimeoutError:
            here = sorted(other.rank for other in current.needs)
            error = OffloadError(
                Code.TIMED_OUT,
                f"job {job.name}: after {timeout_s:g} s only ranks {here} of {job.local_world_size} on this node have "
                "asked for memory; the others have not started or have died",
            )
            self._fail(job, error)
            raise error from None
        return grants[session]

    def rank_lost(self, session: Session) -> None:
        """A rank ended: whoever waits with it learns that now. One that has its memory waits with nobody: those who
        wait are its successors, when a job is started again before all of it has ended."""
        if session.region is not None:
            return
        self._fail(
            session.job,
            OffloadError(Code.RANK_LOST, f"{session.title} ended while the other ranks waited for it"),
        )

    def _fail(self, job: Job, error: OffloadError) -> None:
        current = self._rounds.pop(job, None)
        if current is not None and current.done is not None and not current.done.done():
            current.done.set_exception(error)

    def _decide(self, job: Job, current: _Round) -> None:
        if current.done is None or current.done.done():
            return
        try:
            grants = self._grants(job, current.needs)
        except OffloadError as error:
            current.done.set_exception(error)
            return
        for session, grant in grants.items():
            session.swap_fixed = current.needs[session].swap_bytes > 0
            self._registry.grant(session, grant.host_bytes, grant.swap_bytes, grant.tile_bytes)
        current.done.set_result(grants)

    def _grants(self, job: Job, needs: dict[Session, Need]) -> dict[Session, Grant]:
        first = min(needs, key=lambda session: session.rank)
        for session, need in needs.items():
            if need.fingerprint != needs[first].fingerprint:
                raise OffloadError(
                    Code.RANKS_DISAGREE,
                    f"job {job.name}: ranks {first.rank} and {session.rank} have different models or configurations; "
                    "start all ranks with the same script and configuration",
                )
        host_promised = sum(session.host_bytes for session in needs)
        swap_promised = sum(session.swap_bytes for session in needs)
        share = (self._registry.host.available() + host_promised) // len(needs)
        grants = {session: _grant(session, need, share) for session, need in needs.items()}
        who = f"job {job.name} ({len(needs)} ranks on this node)"
        self._registry.host.check(sum(g.host_bytes for g in grants.values()) - host_promised, who)
        self._registry.swap.check(sum(g.swap_bytes for g in grants.values()) - swap_promised, who)
        return grants


def _grant(session: Session, need: Need, host_share: int) -> Grant:
    # Whole pages, and never more than was asked for: a budget that is just enough must not become too little.
    host = (need.host_bytes or host_share) // PAGE_BYTES * PAGE_BYTES
    # With k tiles pinned, 2k+1 tiles of room always leave a run for one more (see store.allocator).
    tiles = 2 * max(1, need.pinned_tiles) + 1
    tile = align_up(need.tile_bytes, PAGE_BYTES) if need.tile_bytes else _choose_tile(host, tiles)
    if tile > REGISTRATION_CHUNK_BYTES:
        raise OffloadError(
            Code.BAD_REQUEST, f"{session.title} asks for tiles of {human(tile)}; a tile has at most 1 GiB"
        )
    if host < tiles * tile:
        raise OffloadError(
            Code.NO_HOST_BUDGET,
            f"{session.title} works with {need.pinned_tiles} tiles of {human(tile)} at once and needs "
            f"{human(tiles * tile)} of host memory ({tiles * tile} bytes) for that, but gets {human(host)} ({host} "
            "bytes); raise the host budget",
        )
    return Grant(host, max(need.swap_bytes, session.swap_bytes), tile)


def _choose_tile(host: int, tiles: int) -> int:
    """The largest power of two of which many fit; below TILE_BYTES_WORTH only as far as the working set demands."""
    tile = TILE_BYTES_MAX
    while tile > TILE_BYTES_MIN:
        wanted = TILES_PER_REGION if tile > TILE_BYTES_WORTH else tiles
        if tile * max(tiles, wanted) <= host:
            break
        tile //= 2
    return tile
