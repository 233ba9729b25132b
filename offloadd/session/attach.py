"""The attach socket: the one place where peer credentials are read and descriptors leave the daemon.

A client's first packet buys a ticket that stands for its credentials in OpenSession (gRPC shows none); after
Reserve, a second packet on the same connection fetches the session's descriptors. The connection then stays open;
its end, or the end of the process behind it, is reported once.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import secrets
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass

from offloadd.core.errors import Code, ConfigError, OffloadError
from offloadd.session.peer import Peer, peer_of
from offloadd.wire import attach as wire

log = logging.getLogger("offloadd.attach")

CONNECTIONS_MAX = 1024
ACCEPT_PAUSE_SECONDS = 0.5


def remove_stale(path: str) -> None:
    """Remove the socket of a daemon that has died; whoever calls holds the lock. ConfigError for anything else."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} is there and is not a socket; remove it, or choose another control.socket")
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(
            f"cannot replace {path}: {error.strerror}; remove it, or choose another control.socket"
        ) from error


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    peer: Peer
    ticket: str = ""


class AttachServer:
    """Listens on one SOCK_SEQPACKET path. All callbacks run on the event loop.

    `descriptors(secret, peer)` gives the four descriptors of a session or raises OffloadError;
    `lost(ticket)` is told, once, that the holder of a ticket is gone.
    """

    def __init__(
        self,
        path: str,
        descriptors: Callable[[str, Peer], tuple[int, int, int, int]],
        lost: Callable[[str], None],
        allow: Callable[[Peer], bool],
    ) -> None:
        self._path = path
        self._descriptors = descriptors
        self._lost = lost
        self._allow = allow
        self._connections: dict[str, _Connection] = {}
        self._listener: socket.socket | None = None

    def start(self, mode: int) -> None:
        """ConfigError, one sentence, if nobody can listen there."""
        remove_stale(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.bind(self._path)
            os.chmod(self._path, mode)
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"cannot listen on {self._path}: {error.strerror}; choose another control.socket"
            ) from error
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def peer(self, ticket: str) -> Peer:
        """The credentials that a ticket stands for."""
        connection = self._connections.get(ticket)
        if connection is None:
            raise OffloadError(
                Code.BAD_TOKEN, "this ticket was not given out by the attach socket, or its connection has closed"
            )
        return connection.peer

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._listener is not None:
            loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        for connection in list(self._connections.values()):
            self._drop(connection)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors, as a rule: look again in a while instead of spinning.
            log.error("the attach socket cannot accept: %s", error.strerror)
            loop, listener = asyncio.get_running_loop(), self._listener
            loop.remove_reader(listener)
            loop.call_later(ACCEPT_PAUSE_SECONDS, self._listen_again, listener)
            return
        try:
            self._admit(accepted)
        except OSError as error:
            # It went away at once, or the kernel can watch no more descriptors: its own affair alone.
            log.error("the attach socket cannot serve a connection: %s", error.strerror)

    def _admit(self, accepted: socket.socket) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(accepted.close)
            accepted.setblocking(False)
            peer = peer_of(accepted)
            undo.callback(peer.close)
            refusal = self._refusal(peer)
            if refusal:
                self._send(accepted, wire.pack_response(Code.WRONG_USER, refusal.encode()))
                return
            connection = _Connection(accepted, peer, secrets.token_hex(16))
            loop = asyncio.get_running_loop()
            loop.add_reader(accepted, self._receive, connection)
            undo.callback(loop.remove_reader, accepted)
            if peer.pidfd >= 0:
                loop.add_reader(peer.pidfd, self._drop, connection)
            self._connections[connection.ticket] = connection
            undo.pop_all()

    def _refusal(self, peer: Peer) -> str:
        if len(self._connections) >= CONNECTIONS_MAX:
            return f"all {CONNECTIONS_MAX} connections of the attach socket are taken; end some, or try again soon"
        if not self._allow(peer):
            return (
                f"this daemon belongs to user {os.getuid()} and does not serve user {peer.uid}; "
                "set control.group_access or start a daemon of your own"
            )
        return ""

    def _listen_again(self, listener: socket.socket) -> None:
        if self._listener is listener:
            asyncio.get_running_loop().add_reader(listener, self._accept)

    def _receive(self, connection: _Connection) -> None:
        try:
            raw = connection.socket.recv(wire.MESSAGE_BYTES_MAX)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            raw = b""
        if not raw:
            self._drop(connection)
            return
        try:
            verb, payload = wire.unpack_request(raw)
            if verb is wire.Verb.TICKET:
                self._send(connection.socket, wire.pack_response(Code.OK, connection.ticket.encode()))
            else:
                descriptors = self._descriptors(payload.decode("ascii", "replace"), connection.peer)
                self._send(connection.socket, wire.pack_response(Code.OK), descriptors)
        except OffloadError as error:
            self._send(connection.socket, wire.pack_response(error.code, error.message.encode()[:900]))
            if error.code in (Code.BAD_REQUEST, Code.WRONG_VERSION):
                self._drop(connection)

    @staticmethod
    def _send(to: socket.socket, message: bytes, descriptors: tuple[int, ...] = ()) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            to.sendmsg([message], ancillary)
        except OSError as error:
            # The peer is gone or does not read: its end is noticed by the reader, nothing is owed to it.
            log.debug("attach reply not sent: %s", error)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.ticket, None) is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(connection.socket)
        if connection.peer.pidfd >= 0:
            loop.remove_reader(connection.peer.pidfd)
        connection.socket.close()
        self._lost(connection.ticket)
        connection.peer.close()
