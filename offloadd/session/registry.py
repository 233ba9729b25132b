"""Jobs and sessions: who is here, under which name, rank and incarnation, and what was promised to them.

A job belongs to the user that opened it. A new session of the same job and rank fences the old one. Budgets are
granted or refused here, before a rank starts to train; the figures are in the error.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from offloadd.core.errors import Code, OffloadError
from offloadd.core.units import human
from offloadd.session.arena import Arena, Region
from offloadd.session.peer import Peer


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What a rank says of itself when it joins."""

    job: str
    launch_id: str
    rank: int
    world_size: int
    local_world_size: int
    host_bytes_min: int
    swap_bytes_min: int
    weight: float


@dataclass(slots=True, eq=False)
class Job:
    """One job on this node."""

    name: str
    named: bool
    uid: int
    world_size: int
    local_world_size: int
    arena: Arena
    sessions: dict[int, Session] = field(default_factory=dict)
    """By rank."""
    incarnations: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """One rank's connection."""

    id: int
    secret: str
    job: Job
    rank: int
    incarnation: int
    peer: Peer | None
    """None over TCP."""
    weight: float
    host_bytes: int
    """Promised at open, granted at Reserve."""
    swap_bytes: int
    opened_ns: int
    tile_bytes: int = 0
    swap_fixed: bool = False
    """A limit on swap space was agreed on at Reserve; otherwise it is what the shards need."""
    region: Region | None = None
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the session reserves, registers or ends: one of these at a time."""
    closing: bool = False

    @property
    def title(self) -> str:
        return f"job {self.job.name} rank {self.rank}"


class Ledger:
    """Bytes promised out of a total. Over-promising is an OffloadError with the figures."""

    def __init__(self, total: int, code: Code, what: str, remedy: str) -> None:
        self.total = total
        self.used = 0
        self._code = code
        self._what = what
        self._remedy = remedy

    def available(self) -> int:
        return self.total - self.used

    def check(self, more: int, who: str) -> None:
        """Raise if `more` bytes cannot be promised now."""
        if more > self.available():
            raise OffloadError(
                self._code,
                f"{who} needs {human(more)} of {self._what} ({more} bytes) but {human(max(0, self.available()))} of "
                f"{human(self.total)} are available; {self._remedy}",
            )

    def take(self, more: int) -> None:
        self.used += more


class Registry:
    """All jobs and sessions of this daemon. Called from the event loop only."""

    def __init__(self, host_bytes: int, swap_bytes: int, sessions_max: int, now_ns: Callable[[], int]) -> None:
        self.host = Ledger(
            host_bytes, Code.NO_HOST_BUDGET, "host memory", "raise memory.host_bytes of the daemon or lower the job's"
        )
        self.swap = Ledger(
            swap_bytes, Code.NO_SWAP_BUDGET, "swap space", "add a path to swap.paths, free space, or use more nodes"
        )
        self.jobs: dict[str, Job] = {}
        self._sessions: dict[int, Session] = {}
        self._by_secret: dict[str, Session] = {}
        self._sessions_max = sessions_max
        self._now_ns = now_ns
        self._next_session = 1

    def sessions(self) -> list[Session]:
        return list(self._sessions.values())

    def authenticate(self, session: int, secret: str) -> Session:
        """The session with this number, if the secret is its own and nothing has fenced it."""
        found = self._sessions.get(session)
        if found is None or found.closing:
            raise OffloadError(
                Code.STALE_SESSION,
                f"session {session} has ended or was replaced by a newer one of the same rank; open a new session",
            )
        if not secrets.compare_digest(found.secret, secret):
            raise OffloadError(Code.BAD_TOKEN, f"the secret given for session {session} is not its own")
        return found

    def by_secret(self, secret: str) -> Session:
        """The session that this secret opens."""
        found = self._by_secret.get(secret)
        if found is None or found.closing:
            raise OffloadError(Code.STALE_SESSION, "no open session has this secret; open a new session")
        return found

    def open(self, request: OpenRequest, uid: int, peer: Peer | None) -> tuple[Session, Session | None]:
        """A new session, and the older one of the same rank that it fences (the caller must close that one)."""
        _check_ranks(request)
        if len(self._sessions) >= self._sessions_max:
            raise OffloadError(
                Code.NO_SESSION,
                f"all {self._sessions_max} sessions of this daemon are taken; raise session.sessions_max",
            )
        name = request.job or f"unnamed-{request.launch_id[:32] or secrets.token_hex(4)}"
        known = self.jobs.get(name)
        old = known.sessions.get(request.rank) if known else None
        who = f"rank {request.rank} of job {name}"
        # The old session's promise returns with it, so it counts as available to its successor.
        self.host.check(request.host_bytes_min - (old.host_bytes if old else 0), who)
        self.swap.check(request.swap_bytes_min - (old.swap_bytes if old else 0), who)
        job = self._join(name, request, uid)
        self.host.take(request.host_bytes_min)
        self.swap.take(request.swap_bytes_min)
        job.incarnations += 1
        session = Session(
            id=self._next_session,
            secret=secrets.token_hex(16),
            job=job,
            rank=request.rank,
            incarnation=job.incarnations,
            peer=peer,
            weight=request.weight if request.weight > 0 else 1.0,
            host_bytes=request.host_bytes_min,
            swap_bytes=request.swap_bytes_min,
            opened_ns=self._now_ns(),
        )
        self._next_session += 1
        if old is not None:
            old.closing = True
        job.sessions[request.rank] = session
        self._sessions[session.id] = session
        self._by_secret[session.secret] = session
        return session, old

    def _join(self, name: str, request: OpenRequest, uid: int) -> Job:
        job = self.jobs.get(name)
        if job is None:
            job = Job(name, bool(request.job), uid, request.world_size, request.local_world_size, Arena(name))
            self.jobs[name] = job
            return job
        if job.uid != uid:
            raise OffloadError(Code.WRONG_USER, f"job {name} belongs to user {job.uid}, not {uid}; choose another name")
        if (job.world_size, job.local_world_size) != (request.world_size, request.local_world_size):
            raise OffloadError(
                Code.WRONG_WORLD,
                f"job {name} was opened with {job.world_size} ranks, {job.local_world_size} on this node, but rank "
                f"{request.rank} says {request.world_size} and {request.local_world_size}; start all ranks alike",
            )
        return job

    def grant(self, session: Session, host_bytes: int, swap_bytes: int, tile_bytes: int) -> None:
        """Turn the promise made at open into a grant. The caller has checked the ledgers for all ranks together."""
        self.host.take(host_bytes - session.host_bytes)
        self.swap.take(swap_bytes - session.swap_bytes)
        session.host_bytes, session.swap_bytes, session.tile_bytes = host_bytes, swap_bytes, tile_bytes

    def charge_swap(self, session: Session, needed: int) -> None:
        """The session's shards on disk come to `needed` bytes: grow its share if it is less. OffloadError
        NO_SWAP_BUDGET, with figures, when a limit was agreed on or the daemon has no more."""
        more = needed - session.swap_bytes
        if more <= 0:
            return
        if session.swap_fixed:
            raise OffloadError(
                Code.NO_SWAP_BUDGET,
                f"{session.title} asked for {human(session.swap_bytes)} of swap space ({session.swap_bytes} bytes) but "
                f"its shards need {human(needed)} ({needed} bytes); raise swap_bytes or leave it out",
            )
        self.swap.check(more, session.title)
        self.swap.take(more)
        session.swap_bytes = needed

    def refund_swap(self, session: Session, charged: int) -> None:
        """A registration failed: back to what was charged before it."""
        self.swap.take(charged - session.swap_bytes)
        session.swap_bytes = charged

    def forget(self, session: Session) -> Job | None:
        """Give back what the session was promised. Returns its job if that was the last session: the job is over."""
        if self._sessions.pop(session.id, None) is None:
            return None
        self._by_secret.pop(session.secret, None)
        self.host.take(-session.host_bytes)
        self.swap.take(-session.swap_bytes)
        job = session.job
        if job.sessions.get(session.rank) is session:
            del job.sessions[session.rank]
        if any(other.job is job for other in self._sessions.values()):
            return None
        self.jobs.pop(job.name, None)
        return job


def _check_ranks(request: OpenRequest) -> None:
    ok = 0 <= request.rank < request.world_size and 1 <= request.local_world_size <= request.world_size
    if not ok or request.world_size > 1 << 20:
        raise OffloadError(
            Code.BAD_REQUEST,
            f"rank {request.rank} of {request.world_size} ranks, {request.local_world_size} on this node, cannot be",
        )
    if len(request.job) > 64 or not all(c.isalnum() or c in "-_." for c in request.job) or request.job[:1] == ".":
        raise OffloadError(
            Code.BAD_REQUEST,
            f"{request.job[:80]!r} cannot name a job; use up to 64 letters, digits, '-', '_' or '.'",
        )
