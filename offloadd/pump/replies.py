"""What goes back to the sessions: one reply per accepted request, with what it waited for.

Used by the other parts of the pump. It keeps replies until the step's end and counts requests not answered yet.
"""

from __future__ import annotations

from offloadd.core.errors import Code
from offloadd.core.records import Reply, Request
from offloadd.core.stats import Cause, Stats
from offloadd.scheduler.queues import Waiter
from offloadd.store.outcomes import Settled
from offloadd.store.residency import Tile


class Replies:
    """Outgoing replies per session."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._waiting: dict[int, list[Reply]] = {}
        self._outstanding: dict[int, int] = {}

    def open(self, session: int) -> None:
        """Begin counting for a session."""
        self._outstanding[session] = 0

    def forget(self, session: int) -> None:
        """Its endpoint is gone: whatever is still to be said is dropped."""
        self._outstanding.pop(session, None)
        self._waiting.pop(session, None)

    def accepted(self, session: int, count: int) -> None:
        """Requests that must be answered."""
        self._outstanding[session] += count

    def outstanding(self, session: int) -> int:
        """Requests accepted and not answered."""
        return self._outstanding[session]

    def take(self) -> dict[int, list[Reply]]:
        """Everything since the last call, by session."""
        taken, self._waiting = self._waiting, {}
        return taken

    def plain(self, request: Request, code: Code, now_ns: int, errno: int = 0, path: int = 0) -> None:
        """Answer a request that is not about a slot."""
        self._add(Reply(request.session, request.id, code, errno=errno, path=path, waited_ns=_waited(request, now_ns)))

    def granted(self, request: Request, tile: Tile, lease: int, now_ns: int, waiter: Waiter | None) -> None:
        """A fetch got its tile."""
        waited, cause = (_waited(request, now_ns), _cause(waiter, now_ns)) if waiter is not None else (0, 0)
        offset = max(0, tile.offset)
        self._add(
            Reply(request.session, request.id, Code.OK, offset, tile.length, lease, waited_ns=waited, cause=cause)
        )

    def refused(
        self, request: Request, settled: Settled, path: int, length: int, now_ns: int, waiter: Waiter | None
    ) -> None:
        """A fetch did not. `length`: for SLOTS_EXHAUSTED, bytes that the session has out on lease; else 0."""
        self._add(
            Reply(
                request.session,
                request.id,
                settled.code,
                length=length,
                errno=settled.errno,
                granule=settled.granule,
                path=path,
                waited_ns=_waited(request, now_ns),
                cause=_cause(waiter, now_ns) if waiter is not None else 0,
            )
        )

    def _add(self, reply: Reply) -> None:
        outstanding = self._outstanding.get(reply.session)
        if outstanding is None:
            return  # detached meanwhile
        if outstanding <= 0:
            raise AssertionError(f"session {reply.session}: request {reply.id} would be answered twice")
        self._outstanding[reply.session] = outstanding - 1
        self._stats.session(reply.session).replies += 1
        waiting = self._waiting.get(reply.session)
        if waiting is None:
            self._waiting[reply.session] = [reply]
        else:
            waiting.append(reply)


def _cause(waiter: Waiter, now_ns: int) -> Cause:
    """What a fetch waited for longest. The rank reports back how long it was really blocked on it: requests sent ahead
    of need wait while the rank computes, and that is no stall."""
    waited = dict(waiter.waited)
    waited[waiter.cause] = waited.get(waiter.cause, 0) + max(0, now_ns - waiter.since_ns)
    return max(waited, key=lambda cause: waited[cause])


def _waited(request: Request, now_ns: int) -> int:
    return max(0, now_ns - request.arrived_ns)
