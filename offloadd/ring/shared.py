"""The shared-memory endpoint: two queues in one memfd and a doorbell for each.

Lives as long as its session. The daemon creates the memfd, seals its size and hands out duplicates.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Sequence

from offloadd.core.clock import Clock
from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import Reply, Request
from offloadd.ring.validate import Resolve, Validator
from offloadd.wire.layout import ENTRY_BYTES, RING_ENTRIES, pack_reply, unpack_submissions
from offloadd_native import Ring, RingCorrupt, ring_bytes

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RingEndpoint:
    """Daemon's side of one ring. Not thread-safe: the pump's thread only."""

    def __init__(self, session: int, generation: int, resolve: Resolve, clock: Clock) -> None:
        self.session = session
        with contextlib.ExitStack() as undo:
            try:
                self._open(generation, undo)
            except OSError as error:
                raise OffloadError(
                    Code.UNAVAILABLE,
                    f"the daemon cannot make a ring for session {session}: {error.strerror}; raise its limit of open "
                    "files (ulimit -n), or free memory on this node",
                ) from error
            undo.pop_all()
        self._validator = Validator(session, generation, resolve)
        self._clock = clock
        self._inflight = 0
        self._refused: deque[Reply] = deque()
        self._closed = False

    def _open(self, generation: int, undo: contextlib.ExitStack) -> None:
        queue = ring_bytes(RING_ENTRIES, ENTRY_BYTES)
        self.descriptor = os.memfd_create("offloadd-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        undo.callback(os.close, self.descriptor)
        os.ftruncate(self.descriptor, 2 * queue)
        os.posix_fallocate(self.descriptor, 0, 2 * queue)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self.submission_doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        undo.callback(os.close, self.submission_doorbell)
        self.completion_doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        undo.callback(os.close, self.completion_doorbell)
        self._map = mmap.mmap(self.descriptor, 2 * queue)
        self._map.madvise(mmap.MADV_DONTFORK)
        memory = memoryview(self._map)
        self._submissions = Ring(memory, 0, RING_ENTRIES, ENTRY_BYTES, generation, True)
        self._completions = Ring(memory, queue, RING_ENTRIES, ENTRY_BYTES, generation, True)

    def descriptors(self) -> tuple[int, int, int]:
        """Ring memfd, submission doorbell, completion doorbell: what the client is sent."""
        return self.descriptor, self.submission_doorbell, self.completion_doorbell

    def drain(self, limit: int) -> list[Request]:
        """Up to `limit` valid requests. Never more in flight than the completion queue has room for, so that
        `post` cannot fail. OffloadError BAD_REQUEST if the client broke the ring: its session must end."""
        limit = min(limit, RING_ENTRIES - self._inflight)
        if limit <= 0 or self._closed:
            return []
        try:
            raw = self._submissions.pop(limit)
        except RingCorrupt as error:
            raise self._broken(error) from error
        if not raw:
            return []
        now = self._clock.now_ns()
        requests: list[Request] = []
        for entry in unpack_submissions(raw):
            checked = self._validator.check(entry, now)
            self._inflight += 1
            if isinstance(checked, Request):
                requests.append(checked)
            else:
                self._refused.append(checked)
        if self._refused:
            refused = list(self._refused)
            self._refused.clear()
            self.post(refused)
        return requests

    def _broken(self, error: RingCorrupt) -> OffloadError:
        return OffloadError(
            Code.BAD_REQUEST, f"session {self.session} wrote a ring that cannot be ({error}); it is closed"
        )

    def post(self, replies: Sequence[Reply]) -> None:
        """Hand over replies and ring the doorbell if the client sleeps."""
        if self._closed:
            return
        try:
            taken, sleeping = self._completions.push(b"".join(map(pack_reply, replies)))
        except RingCorrupt as error:
            raise self._broken(error) from error
        self._inflight -= taken
        if taken != len(replies):
            # Room was kept for every accepted request, so only a client that moved the indices gets here.
            raise OffloadError(
                Code.BAD_REQUEST,
                f"session {self.session} has left all {RING_ENTRIES} completions of its ring unread, so that "
                f"{len(replies) - taken} more have no room (or it overwrote the ring's indices); it is closed: a "
                "client must reap completions before it asks for more",
            )
        if sleeping:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self.completion_doorbell, 1)

    def sleep(self) -> bool:
        """Before the event loop waits: True if nothing is pending and the client will ring. False: drain again."""
        if self._closed or self._inflight >= RING_ENTRIES:
            return True
        try:
            return self._submissions.sleep()
        except RingCorrupt:
            return False  # the next drain says so

    def wake(self) -> None:
        """After the doorbell rang: take the ring back into polling and clear the doorbell."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.submission_doorbell)
        if not self._closed:
            self._submissions.wake()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # One last ring, so that a client that waits looks at its connection.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.completion_doorbell, 1)
        for descriptor in (self.descriptor, self.submission_doorbell, self.completion_doorbell):
            os.close(descriptor)
