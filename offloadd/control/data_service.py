"""DataService: the stream for sessions to which descriptors cannot pass. Feeds a StreamEndpoint, sends its answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from offloadd.control.guard import refuse
from offloadd.control.lifecycle import Lifecycle
from offloadd.control.service import Authenticator
from offloadd.core.errors import Code, OffloadError
from offloadd.ring.stream import StreamEndpoint
from offloadd.wire.pb import data_pb2, data_pb2_grpc

log = logging.getLogger("offloadd.data")

Context = grpc.aio.ServicerContext[Any, Any]

FIRST_MESSAGE_SECONDS = 10.0


class DataService(data_pb2_grpc.DataServiceServicer):
    """One Exchange per session."""

    def __init__(self, lifecycle: Lifecycle, authenticator: Authenticator, kick: Callable[[], None]) -> None:
        self._lifecycle = lifecycle
        self._authenticator = authenticator
        self._kick = kick

    async def Exchange(
        self, request_iterator: AsyncIterator[data_pb2.ExchangeRequest], context: Context
    ) -> AsyncIterator[data_pb2.ExchangeResponse]:
        try:
            self._authenticator.check_token(context)
            first = await asyncio.wait_for(anext(request_iterator), FIRST_MESSAGE_SECONDS)
            session = self._lifecycle.authenticate(first.session.session, first.session.secret)
            endpoint = self._lifecycle.stream(session)
        except (asyncio.TimeoutError, StopAsyncIteration):
            await refuse(context, OffloadError(Code.BAD_REQUEST, "the stream's first message must name the session"))
            return
        except OffloadError as error:
            await refuse(context, error)
            return
        failure: list[OffloadError] = []
        reader = asyncio.create_task(self._read(request_iterator, endpoint, failure))
        try:
            async for message in endpoint.outgoing():
                yield message
            if failure:
                await refuse(context, failure[0])
        finally:
            reader.cancel()
            # The stream's end is the session's end, and goes on if this call is cancelled. A session already closing
            # is left to whoever closes it.
            await self._lifecycle.close(session, "its stream ended")

    async def _read(
        self,
        messages: AsyncIterator[data_pb2.ExchangeRequest],
        endpoint: StreamEndpoint,
        failure: list[OffloadError],
    ) -> None:
        try:
            async for message in messages:
                endpoint.receive(message)
                self._kick()
        except OffloadError as error:
            log.warning("%s", error.message)
            failure.append(error)
        except grpc.aio.UsageError:
            pass  # the call is over: there is nothing to read and nobody to tell
        finally:
            endpoint.close()
