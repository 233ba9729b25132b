"""How an OffloadError travels over gRPC: a status code for generic tools, and the typed error in the metadata."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from offloadd.core.errors import Code, OffloadError, known_code
from offloadd.wire.pb import errors_pb2

FAILURE_KEY = "offloadd-error-bin"


def grpc_status(code: Code) -> grpc.StatusCode:
    """The nearest standard status."""
    if code in (Code.WRONG_USER, Code.BAD_TOKEN):
        return grpc.StatusCode.PERMISSION_DENIED
    if code in (Code.STALE_SESSION, Code.RANK_LOST, Code.CANCELLED):
        return grpc.StatusCode.ABORTED
    if code in (Code.DRAINING, Code.UNAVAILABLE):
        return grpc.StatusCode.UNAVAILABLE
    if code == Code.TIMED_OUT:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    if code == Code.CORRUPT:
        return grpc.StatusCode.DATA_LOSS
    if 100 <= code < 200:
        return grpc.StatusCode.INVALID_ARGUMENT
    if 200 <= code < 300 or code == Code.NO_SPACE:
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return grpc.StatusCode.INTERNAL


def to_metadata(error: OffloadError) -> tuple[tuple[str, bytes], ...]:
    failure = errors_pb2.Failure(code=int(error.code), message=error.message)  # type: ignore[arg-type]
    return ((FAILURE_KEY, failure.SerializeToString()),)


@dataclass(frozen=True, slots=True)
class Peer:
    """The daemon at the other end, as far as a sentence about it needs to know."""

    where: str
    answered: bool = False
    """Once at least: so it was an offloadd daemon, and if it does not answer now it has ended."""
    private_log: str = ""
    """The log of a private daemon, which goes with it unless it crashed."""

    def gone(self) -> OffloadError:
        if self.private_log:
            text = (
                f"the job's private daemon at {self.where} is gone (killed or crashed), and its swap files with it; if "
                f"it crashed, {self.private_log} says why until the next start; if that is gone too, the daemon was "
                "killed: look in the kernel's log (dmesg) whether memory ran out, then start the job again"
            )
        else:
            text = (
                f"the daemon at {self.where} is gone (stopped, killed or crashed); look at its log, then start the job "
                "again"
            )
        return OffloadError(Code.UNAVAILABLE, text)


def from_rpc_error(error: grpc.RpcError, peer: Peer) -> OffloadError:
    """The typed error inside, or a sentence about why `peer` did not answer."""
    call = error if isinstance(error, grpc.Call) else None
    metadata: dict[str, str | bytes] = dict(call.trailing_metadata() or ()) if call else {}
    if isinstance(raw := metadata.get(FAILURE_KEY), bytes):
        failure = errors_pb2.Failure.FromString(raw)
        return OffloadError(known_code(int(failure.code)), failure.message)
    status = call.code() if call else None
    if status == grpc.StatusCode.DEADLINE_EXCEEDED:
        return OffloadError(
            Code.TIMED_OUT, f"the daemon at {peer.where} did not answer in time; is it overloaded or stopped?"
        )
    if status == grpc.StatusCode.UNIMPLEMENTED:
        return OffloadError(Code.WRONG_VERSION, f"what answers at {peer.where} is a gRPC server but not this offloadd")
    if peer.answered and status == grpc.StatusCode.UNAVAILABLE:
        return peer.gone()
    detail = call.details() if call else str(error)
    return OffloadError(
        Code.UNAVAILABLE, f"no offloadd daemon answers at {peer.where} ({detail}); start one with 'offloadd serve'"
    )
