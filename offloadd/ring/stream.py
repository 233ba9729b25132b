"""The stream endpoint: the ring's requests over a gRPC stream, with the tiles' bytes in the messages.

The daemon keeps the slot; a copy of its bytes travels to the client before the completion of a FETCH, and back
before the STORE. The service feeds `receive`, and sends what `outgoing` gives.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from offloadd.core.clock import Clock
from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import Mode, Op, Reply, Request
from offloadd.core.units import MIB
from offloadd.ring.validate import Resolve, Validator
from offloadd.wire.layout import RING_ENTRIES, pack_reply, unpack_submissions
from offloadd.wire.pb import data_pb2

PIECE_BYTES = MIB
"""Bytes of a tile per message."""
OUTGOING_MAX = 2 * RING_ENTRIES
"""Replies that may wait for a slow reader before its session ends; never reached by one that reads, since at most
RING_ENTRIES requests are in flight."""


class StreamEndpoint:
    """Daemon's side of one stream. Event loop only."""

    def __init__(self, session: int, generation: int, resolve: Resolve, clock: Clock, memory: memoryview) -> None:
        self.session = session
        self._validator = Validator(session, generation, resolve)
        self._clock = clock
        self._memory = memory
        self._incoming: deque[Request] = deque()
        self._outgoing: deque[Reply] = deque()
        self._ready = asyncio.Event()
        self._inflight = 0
        self._fetching: dict[int, Mode] = {}
        self._leases: dict[int, tuple[int, int]] = {}
        self._closed = False

    def receive(self, message: data_pb2.ExchangeRequest) -> None:
        """One message of the client. OffloadError BAD_REQUEST for what cannot be."""
        if message.data:
            self._fill(message.lease, message.offset, message.data)
        if not message.entry:
            return
        try:
            entries = unpack_submissions(message.entry)
        except ValueError as error:
            raise OffloadError(Code.BAD_REQUEST, f"session {self.session}: {error}") from error
        if self._inflight + len(entries) > RING_ENTRIES:
            raise OffloadError(
                Code.BAD_REQUEST,
                f"session {self.session} has {self._inflight + len(entries)} requests in flight, {RING_ENTRIES} at "
                "most; it is closed: a client must wait for completions before it asks for more",
            )
        for entry in entries:
            self._inflight += 1
            checked = self._validator.check(entry, self._clock.now_ns())
            if isinstance(checked, Reply):
                self.post([checked])
                continue
            if checked.op is Op.FETCH:
                self._fetching[checked.id] = checked.mode
            elif checked.op in (Op.STORE, Op.RELEASE):
                self._leases.pop(checked.lease, None)
            self._incoming.append(checked)

    def _fill(self, lease: int, offset: int, data: bytes) -> None:
        start, length = self._leases.get(lease, (0, 0))
        if offset + len(data) > length:
            raise OffloadError(
                Code.BAD_LEASE,
                f"session {self.session} sent bytes {offset} to {offset + len(data)} of lease {lease}, "
                f"which has {length}",
            )
        self._memory[start + offset : start + offset + len(data)] = data

    def drain(self, limit: int) -> list[Request]:
        count = min(limit, len(self._incoming))
        return [self._incoming.popleft() for _ in range(count)]

    def post(self, replies: Sequence[Reply]) -> None:
        self._inflight -= len(replies)
        if len(self._outgoing) + len(replies) > OUTGOING_MAX:
            raise OffloadError(
                Code.BAD_REQUEST,
                f"session {self.session} does not read its stream: {OUTGOING_MAX} replies wait; it is closed: a client "
                "must read completions before it asks for more",
            )
        self._outgoing.extend(replies)
        self._ready.set()

    async def outgoing(self) -> AsyncIterator[data_pb2.ExchangeResponse]:
        """Messages to send, until `close`."""
        while True:
            while self._outgoing:
                reply = self._outgoing.popleft()
                mode = self._fetching.pop(reply.id, None)
                if mode is not None and reply.code == Code.OK:
                    self._leases[reply.lease] = (reply.offset, reply.length)
                    if mode is not Mode.OVERWRITE:
                        for start in range(0, reply.length, PIECE_BYTES):
                            if self._closed:  # while the piece before was on its way
                                return
                            end = min(start + PIECE_BYTES, reply.length)
                            data = bytes(self._memory[reply.offset + start : reply.offset + end])
                            yield data_pb2.ExchangeResponse(lease=reply.lease, offset=start, data=data)
                yield data_pb2.ExchangeResponse(entries=pack_reply(reply))
            if self._closed:
                return
            self._ready.clear()
            await self._ready.wait()

    def sleep(self) -> bool:
        return not self._incoming

    def wake(self) -> None:
        """Nothing to clear: `receive` runs on the pump's own loop."""

    def close(self) -> None:
        self._closed = True
        # Their bytes lie in memory that is given back now.
        self._outgoing.clear()
        self._ready.set()
