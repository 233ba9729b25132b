"""One place where errors become gRPC statuses: typed errors keep their code and sentence, anything else is logged in
full here and reaches the client as INTERNAL without internals."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from offloadd.core.errors import Code, OffloadError
from offloadd.wire.failure import grpc_status, to_metadata

log = logging.getLogger("offloadd.control")

_Method = TypeVar("_Method", bound=Callable[..., Awaitable[Any]])


def guarded(method: _Method) -> _Method:
    """Wrap a unary handler (self, request, context)."""

    @functools.wraps(method)
    async def call(self: object, request: object, context: grpc.aio.ServicerContext[Any, Any]) -> object:
        try:
            return await method(self, request, context)
        except OffloadError as error:
            await refuse(context, error)
        except Exception:  # whatever it is, the client gets a typed error and the log the rest
            log.exception("%s failed", method.__name__)
            await refuse(context, OffloadError(Code.INTERNAL, "the daemon hit a bug of its own; see its log"))
        return None  # not reached: refuse aborts

    return call  # type: ignore[return-value]


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: OffloadError) -> None:
    """End a call with a typed error."""
    await context.abort(grpc_status(error.code), error.message, to_metadata(error))
