"""How requests and replies lie in the ring, and how a ring lies in its memfd. Shared by daemon and client.

Entries are 64 bytes, little-endian. The daemon copies an entry out once and then checks it: nothing in here trusts
the other side. The same bytes travel in the gRPC stream, so both channels speak one format.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from offloadd.core.errors import Code, known_code
from offloadd.core.records import Reply

API_VERSION = 1
"""Client and daemon must agree on this exactly."""

ENTRY_BYTES = 64
RING_ENTRIES = 512
"""Entries per queue; also the most requests a session may have in flight."""

PLAN_LENGTH_MAX = 1 << 20
"""Most entries of an access plan."""

_SUBMISSION = struct.Struct("<QHHIIIQQI20x")
_COMPLETION = struct.Struct("<QiiQQQIIQI4x")

ATTACH_MAGIC = b"OFLDATT1"
"""First bytes of every message on the attach socket."""


class Submission(NamedTuple):
    """One entry of the submission queue as the client wrote it; `shard` is numbered within the session."""

    id: int
    op: int
    mode: int
    shard: int
    tile: int
    generation: int
    lease: int
    blocked_ns: int = 0
    blocked_cause: int = 0


class Completion(NamedTuple):
    """One entry of the completion queue as the daemon wrote it. Field meanings: `core.records.Reply`."""

    id: int
    code: Code
    errno: int
    offset: int
    length: int
    lease: int
    granule: int
    path: int
    waited_ns: int
    cause: int


def pack_submission(entry: tuple[int, ...]) -> bytes:
    """The bytes of an entry: a Submission, or a plain tuple of its fields."""
    return _SUBMISSION.pack(*entry)


def unpack_submissions(raw: bytes) -> list[Submission]:
    """Every whole entry in `raw`; ValueError if it is not a whole number of entries."""
    if len(raw) % ENTRY_BYTES:
        raise ValueError(f"{len(raw)} bytes are not a whole number of {ENTRY_BYTES}-byte entries")
    return [Submission._make(fields) for fields in _SUBMISSION.iter_unpack(raw)]


def pack_reply(reply: Reply) -> bytes:
    return _COMPLETION.pack(
        reply.id,
        int(reply.code),
        reply.errno,
        reply.offset,
        reply.length,
        reply.lease,
        reply.granule,
        reply.path,
        reply.waited_ns,
        reply.cause,
    )


def unpack_completions(raw: bytes) -> list[Completion]:
    """Every whole entry in `raw`. A code this version does not know reads as INTERNAL."""
    out = []
    for fields in _COMPLETION.iter_unpack(raw):
        out.append(Completion(fields[0], known_code(fields[1]), *fields[2:]))
    return out
