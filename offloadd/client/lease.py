"""A slot on loan: the buffer, the lease behind it, and when the lease really ends.

`store` and `release` say what the caller wants; the daemon is told only when the last view of the buffer is gone,
because autograd keeps views that the caller has forgotten. Until then nobody else may use the slot.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from offloadd.client.channel import Buffer
from offloadd.core.records import Mode, Op


@dataclass(slots=True, eq=False)
class Lease:
    """What the daemon lent. `op` is None until the caller has decided how it ends."""

    number: int
    title: str
    mode: Mode
    op: Op | None = None


class LeaseBook:
    """Leases out, and those whose buffers have died and that the daemon must still be told of.

    Buffers die in any thread, even in the middle of a garbage collection under someone's lock, so a death only
    appends to a deque.
    """

    def __init__(self) -> None:
        self._out: dict[int, Lease] = {}
        self.ended: deque[Lease] = deque()

    def lend(self, lease: Lease, buffer: Buffer | None) -> None:
        self._out[lease.number] = lease
        if buffer is not None:
            weakref.finalize(buffer, self._died, lease).atexit = False

    def _died(self, lease: Lease) -> None:
        if self._out.pop(lease.number, None) is not None:
            self.ended.append(lease)

    def end_empty(self, lease: Lease) -> None:
        """A lease without a buffer (a tile of 0 bytes) ends as soon as it is handed back."""
        self._died(lease)

    def stuck(self) -> list[str]:
        """Names of tiles that were handed back while a tensor over them still lives."""
        return [lease.title for lease in list(self._out.values()) if lease.op is not None]

    def held(self) -> list[str]:
        """Names of tiles that are fetched and not handed back."""
        return [lease.title for lease in list(self._out.values()) if lease.op is None]


class SlotOwner(Protocol):
    """What a slot needs of its session."""

    def before_store(self, lease: Lease, buffer: Buffer) -> None: ...

    def send_ended(self) -> None: ...


class Slot:
    """One tile's bytes. Exactly one of `store` and `release` ends it."""

    def __init__(self, owner: SlotOwner, book: LeaseBook, lease: Lease, buffer: Buffer | None, length: int) -> None:
        self._owner = owner
        self._book = book
        self._lease = lease
        self.length = length
        self.buffer: Buffer | None = buffer
        """ctypes array over the bytes, or None for a tile of 0 bytes. Views of it keep the slot."""

    def store(self) -> None:
        """The bytes changed and are complete. Sent when the last view of the buffer has died."""
        if self._lease.mode is Mode.READ:
            raise ValueError(f"{self._lease.title} was fetched for reading; fetch it for update to store it")
        self._end(Op.STORE)

    def release(self) -> None:
        """The bytes are as they were. Sent when the last view of the buffer has died."""
        self._end(Op.RELEASE)

    def _end(self, op: Op) -> None:
        if self._lease.op is not None:
            raise ValueError(f"{self._lease.title} was handed back already")
        if op is Op.STORE and self.buffer is not None:
            self._owner.before_store(self._lease, self.buffer)
        self._lease.op = op
        if self.buffer is None:
            self._book.end_empty(self._lease)
        self.buffer = None
        self._owner.send_ended()
