"""Two ways to carry the same entries: the shared-memory ring, and a gRPC stream where descriptors cannot pass.

A channel moves submissions one way and completions the other, and turns a granted slot into a buffer. It knows
nothing of shards. Both pass tests/conformance/test_channel.py. Calls may come from several threads, but `submit`
from one at a time, and `poll` and `wait` from one at a time (the session sees to that).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import grpc

from offloadd.core.errors import Code, OffloadError
from offloadd.core.units import MIB, human
from offloadd.wire.failure import Peer, from_rpc_error
from offloadd.wire.layout import ENTRY_BYTES, RING_ENTRIES, Completion, unpack_completions
from offloadd.wire.pb import control_pb2, data_pb2, data_pb2_grpc
from offloadd_native import Ring, RingCorrupt, ring_bytes

SPIN_US = 0.0
"""How long a waiting rank looks at the ring before it sleeps: about what two wake-ups through the kernel cost."""
_PEER_GONE = 2

Buffer = Any
"""A ctypes array of bytes: writable, weakly referenceable, and alive as long as any view of it."""


class Channel(Protocol):
    """Carries entries."""

    def submit(self, entry: bytes) -> bool:
        """Hand over one entry; False if there is no room now. From one thread at a time."""

    def poll(self) -> list[Completion]:
        """Completions that have arrived; never waits."""

    def wait(self, timeout_s: float) -> None:
        """Return when something may have arrived, at the latest after `timeout_s`. OffloadError UNAVAILABLE when
        the daemon is gone."""

    def buffer(self, lease: int, offset: int, length: int) -> Buffer:
        """The memory of a granted slot (length > 0)."""

    def before_store(self, lease: int, buffer: Buffer) -> None:
        """Called when the bytes are complete and before the STORE entry."""

    def close(self) -> None:
        """Give back what the channel holds. Only when no other call is under way or will come; idempotent."""


class RingChannel:
    """Ring and arena in shared memory. `liveness` is the attach connection: its end means that the daemon ended.

    Owns the descriptors from the call on, even if it fails, and `liveness` once it is made."""

    def __init__(
        self,
        peer: Peer,
        liveness: socket.socket,
        descriptors: tuple[int, int, int, int],
        region: tuple[int, int],
        generation: int,
    ) -> None:
        self._peer = peer
        self._liveness = liveness
        arena, ring, self._submission_doorbell, self._completion_doorbell = descriptors
        offset, length = region
        size = ring_bytes(RING_ENTRIES, ENTRY_BYTES)
        with contextlib.ExitStack() as undo:
            for doorbell in (self._submission_doorbell, self._completion_doorbell):
                undo.callback(os.close, doorbell)
            try:
                self._arena = mmap.mmap(arena, length, offset=offset)
                undo.callback(self._arena.close)
                self._arena.madvise(mmap.MADV_DONTFORK)
                self._ring = mmap.mmap(ring, 2 * size)
                self._ring.madvise(mmap.MADV_DONTFORK)
            except (OSError, ValueError) as error:
                raise OffloadError(
                    Code.UNAVAILABLE,
                    f"this process cannot map the {human(length)} that the daemon at {peer.where} lends it ({error}); "
                    "raise its limit of address space (ulimit -v), or ask for less host memory",
                ) from error
            finally:
                os.close(arena)
                os.close(ring)
            memory = memoryview(self._ring)
            self._submissions = Ring(memory, 0, RING_ENTRIES, ENTRY_BYTES, generation, False)
            self._completions = Ring(memory, size, RING_ENTRIES, ENTRY_BYTES, generation, False)
            undo.pop_all()
        self._closed = False

    def submit(self, entry: bytes) -> bool:
        try:
            taken, sleeping = self._submissions.push(entry)
        except RingCorrupt as error:
            raise self._broken(error) from error
        if sleeping:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._submission_doorbell, 1)
        return taken == 1

    def _broken(self, error: RingCorrupt) -> OffloadError:
        return OffloadError(
            Code.INTERNAL,
            f"the ring shared with the daemon at {self._peer.where} was overwritten ({error}); look for a stray write "
            "in this process, then start the job again",
        )

    def poll(self) -> list[Completion]:
        try:
            raw = self._completions.pop(RING_ENTRIES)
        except RingCorrupt as error:
            raise self._broken(error) from error
        return unpack_completions(raw) if raw else []

    def wait(self, timeout_s: float) -> None:
        timeout_ms = max(0, int(timeout_s * 1000))
        state = self._completions.wait(self._completion_doorbell, self._liveness.fileno(), SPIN_US, timeout_ms)
        if state == _PEER_GONE:
            raise self._peer.gone()

    def buffer(self, lease: int, offset: int, length: int) -> Buffer:
        return (ctypes.c_ubyte * length).from_buffer(self._arena, offset)

    def before_store(self, lease: int, buffer: Buffer) -> None:
        """Nothing: the bytes are where they belong."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._liveness.close()
        os.close(self._submission_doorbell)
        os.close(self._completion_doorbell)
        # An error that somebody keeps holds this channel by its traceback, and must not hold the ring.
        del self._submissions, self._completions
        self._ring.close()
        # Live tensors keep the mapping; it goes with the last of them.
        with contextlib.suppress(BufferError):
            self._arena.close()


class StreamChannel:
    """The same over DataService.Exchange. Slots are private copies; their bytes travel in messages."""

    def __init__(self, peer: Peer, channel: grpc.Channel, session: control_pb2.SessionRef, token: str) -> None:
        self._peer = peer
        self._outgoing: queue.SimpleQueue[data_pb2.ExchangeRequest | None] = queue.SimpleQueue()
        self._outgoing.put(data_pb2.ExchangeRequest(session=session))
        stub = data_pb2_grpc.DataServiceStub(channel)
        self._call = stub.Exchange(iter(self._outgoing.get, None), metadata=(("authorization", token),))
        self._arrived: deque[Completion] = deque()
        self._pieces: dict[int, list[tuple[int, bytes]]] = {}
        self._failure: OffloadError | None = None
        self._condition = threading.Condition()
        self._reader = threading.Thread(target=self._read, args=(self._call,), name="offloadd-stream", daemon=True)
        self._reader.start()

    def _read(self, responses: Iterator[data_pb2.ExchangeResponse]) -> None:
        failure = self._peer.gone()
        try:
            for message in responses:
                with self._condition:
                    if message.data:
                        self._pieces.setdefault(message.lease, []).append((message.offset, message.data))
                    if message.entries:
                        self._arrived.extend(unpack_completions(message.entries))
                        self._condition.notify_all()
        except grpc.RpcError as error:
            failure = from_rpc_error(error, self._peer)
        with self._condition:
            self._failure = failure
            self._condition.notify_all()

    def submit(self, entry: bytes) -> bool:
        self._outgoing.put(data_pb2.ExchangeRequest(entry=entry))
        return True

    def poll(self) -> list[Completion]:
        with self._condition:
            out = list(self._arrived)
            self._arrived.clear()
        return out

    def wait(self, timeout_s: float) -> None:
        with self._condition:
            if not self._arrived and self._failure is None:
                self._condition.wait(timeout_s)
            if not self._arrived and self._failure is not None:
                raise self._failure

    def buffer(self, lease: int, offset: int, length: int) -> Buffer:
        # A mapping of its own: page-aligned, as tensors over an arena's slot are.
        memory = (ctypes.c_ubyte * length).from_buffer(mmap.mmap(-1, length))
        view = memoryview(memory).cast("B")
        with self._condition:
            pieces = self._pieces.pop(lease, [])
        for start, data in pieces:
            view[start : start + len(data)] = data
        return memory

    def before_store(self, lease: int, buffer: Buffer) -> None:
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), MIB):
            data = bytes(view[start : start + MIB])
            self._outgoing.put(data_pb2.ExchangeRequest(lease=lease, offset=start, data=data))

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()
        self._reader.join(5)
