"""The control side of a connection: version check, ticket, open, reserve, register. Every call has a deadline."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc

from offloadd import jobdir
from offloadd.client.endpoint import Endpoint
from offloadd.core.errors import Code, ConfigError, OffloadError
from offloadd.wire import attach as wire
from offloadd.wire.failure import Peer, from_rpc_error
from offloadd.wire.layout import API_VERSION
from offloadd.wire.pb import control_pb2, control_pb2_grpc

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

CHANNEL_OPTIONS = (
    # A private daemon's sockets may be unlinked once everybody is connected, so never hang up for idleness.
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.enable_http_proxy", 0),
    # Connections of two sessions in one process must not share a subchannel: one may be closed under the other.
    ("grpc.use_local_subchannel_pool", 1),
)


class ControlClient:
    """One daemon, spoken to over gRPC and, on a Unix socket, over the attach socket."""

    def __init__(self, endpoint: Endpoint, token_file: str | None, timeout_s: float, version: str) -> None:
        self.where = endpoint.text
        self.peer = Peer(self.where)
        self.passes_descriptors = bool(endpoint.path)
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self.token = _read_token(token_file) if endpoint.address else ""
        self._metadata = (("authorization", self.token),) if self.token else ()
        if endpoint.path:
            _check_socket(endpoint.path)
        self.channel = grpc.insecure_channel(endpoint.target, options=CHANNEL_OPTIONS)
        self.stub = control_pb2_grpc.ControlServiceStub(self.channel)
        self.attachment: socket.socket | None = None
        self.ticket = ""
        try:
            if endpoint.path:
                self.attachment = _connect(endpoint.attach_path, timeout_s)
                self.ticket = self._attach_call(wire.Verb.TICKET, b"", 0)[0].decode("ascii", "replace")
            self.hello = self._hello(version)
            self.peer = Peer(self.where, True, _private_log(endpoint) if self.hello.private_daemon else "")
        except BaseException:
            self.close()
            raise

    def _hello(self, version: str) -> control_pb2.HelloResponse:
        hello: control_pb2.HelloResponse = self.call(
            self.stub.Hello, control_pb2.HelloRequest(api_version=API_VERSION, client_version=version)
        )
        if hello.api_version != API_VERSION:
            raise OffloadError(
                Code.WRONG_VERSION,
                f"the daemon at {self.where} is offloadd {hello.daemon_version} with API version {hello.api_version}, "
                f"this client has {API_VERSION}; install the same version on both sides",
            )
        return hello

    def call(self, method: Callable[..., _Response], request: _Request, timeout_s: float | None = None) -> _Response:
        """One unary call; OffloadError for every failure of it."""
        try:
            patience = self._timeout_s if timeout_s is None else timeout_s
            return method(request, timeout=patience, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.peer) from None
        except ValueError as error:  # grpc's word for a channel that was closed
            raise OffloadError(Code.NO_SESSION, f"the connection to {self.where} is closed ({error})") from None

    def attach(self, secret: str) -> tuple[socket.socket, tuple[int, int, int, int]]:
        """The session's descriptors, which are the caller's from now on, and the connection whose end is the daemon's
        end, which is the caller's after `hand_over`."""
        if self.attachment is None:
            raise OffloadError(Code.BAD_REQUEST, f"descriptors cannot pass over {self.where}; use a unix: endpoint")
        connection = self.attachment
        _, descriptors = self._attach_call(wire.Verb.ATTACH, secret.encode(), wire.ATTACH_DESCRIPTORS)
        arena, ring, submission, completion = descriptors
        return connection, (arena, ring, submission, completion)

    def hand_over(self) -> None:
        """The attach connection belongs to a channel now."""
        self.attachment = None

    def _attach_call(self, verb: wire.Verb, payload: bytes, expected: int) -> tuple[bytes, list[int]]:
        """(what was answered, the `expected` descriptors that came with it)."""
        connection = self.attachment
        if connection is None:
            raise OffloadError(Code.UNAVAILABLE, f"the connection to {self.where} is closed")
        descriptors = array.array("i")
        try:
            connection.sendall(wire.pack_request(verb, payload))
            raw, ancillary, _, _ = connection.recvmsg(
                wire.MESSAGE_BYTES_MAX, socket.CMSG_LEN(16 * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError as error:
            raise OffloadError(Code.TIMED_OUT, f"the daemon at {self.where} did not answer in time") from error
        except OSError as error:
            raise self._hung_up(error.strerror or "") from error
        if not raw:
            raise self._hung_up("it closed the connection")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        with contextlib.ExitStack() as undo:
            # They are ours as soon as they are here, whatever the message beside them says.
            for descriptor in descriptors:
                undo.callback(os.close, descriptor)
            answer = wire.unpack_response(raw, self.where)
            if len(descriptors) != expected:
                raise OffloadError(
                    Code.UNAVAILABLE,
                    f"the daemon at {self.where} passed {len(descriptors)} of {expected} descriptors; raise the limit "
                    "of open files (ulimit -n)",
                )
            undo.pop_all()
        return answer, list(descriptors)

    def _hung_up(self, why: str) -> OffloadError:
        if self.peer.answered:
            return self.peer.gone()
        return OffloadError(
            Code.UNAVAILABLE,
            f"what listens on {self.where} hung up unasked ({why}); look whether the daemon still runs",
        )

    def close(self) -> None:
        self.channel.close()
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None


def _private_log(endpoint: Endpoint) -> str:
    """Empty if it logs elsewhere: the key that makes a daemon private is everybody's."""
    path = os.path.join(os.path.dirname(endpoint.path), jobdir.LOG)
    return path if endpoint.path and os.path.exists(path) else ""


def _check_socket(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise OffloadError(
            Code.UNAVAILABLE, f"there is no socket {path}; start the daemon with 'offloadd serve', or fix the endpoint"
        ) from None
    except PermissionError:
        raise OffloadError(Code.WRONG_USER, f"user {os.getuid()} may not reach {path}; ask for its group") from None
    if not stat.S_ISSOCK(mode):
        raise OffloadError(Code.BAD_CONFIG, f"{path} is not a socket; give the path of a daemon's socket")


def _connect(path: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        if error.errno in (errno.EACCES, errno.EPERM):
            raise OffloadError(
                Code.WRONG_USER, f"user {os.getuid()} may not connect to {path}; it belongs to another user"
            ) from error
        if error.errno == errno.ECONNREFUSED:
            reason = "nobody listens there any more: the daemon has died; start it again"
        elif error.errno == errno.ENOENT:
            reason = "what listens beside it is not an offloadd daemon, or is another version"
        elif error.errno == errno.EPROTOTYPE:
            reason = "another program listens there"
        else:
            reason = error.strerror or "no answer"
        raise OffloadError(Code.UNAVAILABLE, f"cannot connect to {path}: {reason}") from error
    return connection


def _read_token(token_file: str | None) -> str:
    if not token_file:
        raise ConfigError("a grpc:// endpoint needs token_file: the file that the daemon's control.token_file names")
    try:
        status = os.stat(token_file)
        token = Path(token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token file {token_file}: {error}") from error
    if status.st_mode & 0o077:
        raise ConfigError(f"token file {token_file} is open to others (mode {status.st_mode & 0o777:o}); chmod it 600")
    return token
