"""Messages of the attach socket, where credentials and descriptors pass: SOCK_SEQPACKET, one message a packet.

Client -> daemon: `ATTACH_MAGIC`, a verb byte, a u32 API version, and for ATTACH the 32-byte session secret.
Daemon -> client: `ATTACH_MAGIC`, a u32 code, then the ticket (TICKET) or nothing with four descriptors (ATTACH:
arena memfd, ring memfd, submission doorbell, completion doorbell), or one sentence of error in UTF-8.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from offloadd.core.errors import Code, OffloadError, known_code
from offloadd.wire.layout import API_VERSION, ATTACH_MAGIC

MESSAGE_BYTES_MAX = 1024
ATTACH_DESCRIPTORS = 4

_REQUEST = struct.Struct("<8sBI")
_RESPONSE = struct.Struct("<8sI")


class Verb(IntEnum):
    TICKET = 1
    """Give me a ticket that stands for my credentials in OpenSession."""
    ATTACH = 2
    """Give me the descriptors of the session with this secret."""


def pack_request(verb: Verb, payload: bytes = b"") -> bytes:
    return _REQUEST.pack(ATTACH_MAGIC, int(verb), API_VERSION) + payload


def unpack_request(raw: bytes) -> tuple[Verb, bytes]:
    """OffloadError BAD_REQUEST or WRONG_VERSION for anything that is not one of our requests."""
    if len(raw) < _REQUEST.size or not raw.startswith(ATTACH_MAGIC):
        raise OffloadError(Code.BAD_REQUEST, "the attach socket got bytes that are not an offloadd request")
    _, verb, version = _REQUEST.unpack_from(raw)
    if version != API_VERSION:
        raise OffloadError(
            Code.WRONG_VERSION,
            f"the client speaks API version {version}, this daemon {API_VERSION}; "
            "install the same offloadd version on both sides",
        )
    if verb not in (Verb.TICKET, Verb.ATTACH):
        raise OffloadError(Code.BAD_REQUEST, f"the attach socket has no verb {verb}")
    return Verb(verb), raw[_REQUEST.size :]


def pack_response(code: Code, payload: bytes = b"") -> bytes:
    return _RESPONSE.pack(ATTACH_MAGIC, int(code)) + payload


def unpack_response(raw: bytes, where: str) -> bytes:
    """The payload; OffloadError with the daemon's own sentence, or saying that `where` is not an offloadd daemon."""
    if len(raw) < _RESPONSE.size or not raw.startswith(ATTACH_MAGIC):
        raise OffloadError(
            Code.UNAVAILABLE, f"what listens on {where} is not an offloadd daemon; check the endpoint's path"
        )
    code = _RESPONSE.unpack_from(raw)[1]
    payload = raw[_RESPONSE.size :]
    if code != Code.OK:
        raise OffloadError(known_code(code), payload.decode("utf-8", "replace"))
    return payload
