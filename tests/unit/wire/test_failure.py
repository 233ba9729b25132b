"""The sentence about a daemon that does not answer: what is true of this daemon, and what helps."""

from __future__ import annotations

import grpc
import pytest

from offloadd.core.errors import Code
from offloadd.wire.failure import Peer, from_rpc_error


class Unavailable(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "connection refused"

    def trailing_metadata(self) -> tuple[()]:
        return ()

    initial_metadata = trailing_metadata

    def _nothing(self, *_: object) -> None: ...

    is_active = time_remaining = cancel = add_callback = _nothing


@pytest.mark.parametrize(
    ("peer", "helps"),
    [
        (Peer("unix:///s"), "start one with 'offloadd serve'"),
        (Peer("unix:///s", answered=True), "look at its log"),
        (Peer("unix:///s", answered=True, private_log="/d/log"), r"if it crashed, /d/log says why.*kernel's log"),
    ],
    ids=["never answered", "shared", "private"],
)
def test_what_helps_depends_on_whose_daemon_it_was(peer: Peer, helps: str) -> None:
    error = from_rpc_error(Unavailable(), peer)
    assert error.code == Code.UNAVAILABLE
    with pytest.raises(type(error), match=helps):
        raise error
