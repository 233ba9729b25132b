"""Who closes descriptors, and when: nobody under another thread's feet, and whoever got them if it cannot use them."""

from __future__ import annotations

import array
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offloadd.client import ClientSession, Code, OffloadError
from offloadd.client.channel import RingChannel
from offloadd.client.control import ControlClient
from offloadd.client.endpoint import parse
from offloadd.core.units import PAGE_BYTES
from offloadd.wire import attach as wire
from offloadd.wire.failure import Peer
from offloadd.wire.layout import Completion
from offloadd.wire.pb import control_pb2


class WaitedFor:
    """A channel in which a thread waits until it is told to leave; knows whether it was closed meanwhile."""

    def __init__(self) -> None:
        self.entered, self.leave, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.closed_under_a_user = False

    def submit(self, entry: bytes) -> bool:
        return True

    def poll(self) -> list[Completion]:
        self.closed_under_a_user |= self.closed.is_set()
        return []

    def wait(self, timeout_s: float) -> None:
        self.entered.set()
        assert self.leave.wait(20)
        self.closed_under_a_user |= self.closed.is_set()

    def close(self) -> None:
        assert not self.closed.is_set(), "closed twice"
        self.closed.set()


def session_over(channel: WaitedFor) -> ClientSession:
    control = SimpleNamespace(
        where="here",
        stub=SimpleNamespace(CloseSession=None),
        call=lambda *_: None,
        close=lambda: None,
    )
    opened = control_pb2.OpenSessionResponse(session=1, secret="s", job="a")
    session = ClientSession(control, opened, 0, 20)  # type: ignore[arg-type]
    session._channel = channel  # type: ignore[assignment]
    return session


def test_a_session_closed_while_a_thread_waits_is_closed_by_that_thread() -> None:
    channel = WaitedFor()
    session = session_over(channel)
    caught: list[OffloadError] = []

    def wait() -> None:
        try:
            session.nop()
        except OffloadError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert channel.entered.wait(20)
    session.close()
    assert not channel.closed.is_set()
    channel.leave.set()
    waiting.join(20)
    assert channel.closed.is_set()
    assert not channel.closed_under_a_user
    assert [error.code for error in caught] == [Code.NO_SESSION]
    session.close()


def test_a_session_nobody_waits_in_is_closed_at_once() -> None:
    channel = WaitedFor()
    session_over(channel).close()
    assert channel.closed.is_set()


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("wrong", [{"region": (0, 1 << 62)}, {"region": (1, PAGE_BYTES)}, {"ring": "/dev/null"}])
def test_a_channel_that_cannot_be_mapped_closes_what_it_was_given(wrong: dict[str, Any]) -> None:
    near, far = socket.socketpair()
    before = open_files()
    arena = os.memfd_create("arena")
    os.ftruncate(arena, PAGE_BYTES)
    ring = os.open(wrong["ring"], os.O_RDWR) if "ring" in wrong else os.memfd_create("ring")
    descriptors = (arena, ring, os.eventfd(0), os.eventfd(0))
    with pytest.raises(OffloadError, match="cannot map"):
        RingChannel(Peer("here"), near, descriptors, wrong.get("region", (0, PAGE_BYTES)), 1)
    assert open_files() == before
    near.send(b"still open")
    near.close()
    far.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[ControlClient, socket.socket]]:
    """A client of a daemon of which there is only the attach socket."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client = ControlClient.__new__(ControlClient)
    client.where, client.attachment, client.peer = "here", near, Peer("here", answered=True)
    yield client, far
    near.close()
    far.close()


def test_descriptors_that_come_with_a_refusal_or_in_a_wrong_number_are_closed(
    daemon: tuple[ControlClient, socket.socket],
) -> None:
    client, far = daemon
    before = open_files()
    for code, count in ((Code.STALE_SESSION, 4), (Code.OK, 3), (Code.OK, 5)):
        sent = [os.eventfd(0) for _ in range(count)]
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", sent))
        far.sendmsg([wire.pack_response(code, b"no")], [rights])
        for descriptor in sent:
            os.close(descriptor)
        with pytest.raises(OffloadError):
            client.attach("secret")
    assert open_files() == before


def test_a_daemon_that_ends_before_it_passes_descriptors_is_gone(daemon: tuple[ControlClient, socket.socket]) -> None:
    client, far = daemon
    far.close()
    with pytest.raises(OffloadError, match="the daemon at here is gone"):
        client.attach("secret")
    client.peer = Peer("here")
    with pytest.raises(OffloadError, match="what listens on here hung up"):
        client.attach("secret")


def test_a_client_interrupted_while_it_connects_closes_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ControlClient, "_attach_call", interrupted)
    closed: list[ControlClient] = []
    close = ControlClient.close
    monkeypatch.setattr(ControlClient, "close", lambda self: (closed.append(self), close(self)))
    with socket.socket(socket.AF_UNIX) as control, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as attach:
        control.bind(f"{tmp_path}/o.sock")
        attach.bind(f"{tmp_path}/o.sock.attach")
        attach.listen()
        with pytest.raises(KeyboardInterrupt):
            ControlClient(parse(f"unix://{tmp_path}/o.sock"), None, 5, "test")
    assert [client.attachment for client in closed] == [None]
