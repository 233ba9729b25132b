"""The stream endpoint, without a stream."""

from __future__ import annotations

import asyncio
import mmap

from offloadd.core.clock import ManualClock
from offloadd.core.errors import Code
from offloadd.core.records import Mode, Op, Reply, TileKey
from offloadd.ring.stream import PIECE_BYTES, StreamEndpoint
from offloadd.wire.layout import pack_submission
from offloadd.wire.pb import data_pb2

GENERATION = 3


def test_nothing_is_read_from_memory_that_was_given_back_between_two_pieces() -> None:
    async def run() -> None:
        memory = memoryview(mmap.mmap(-1, 3 * PIECE_BYTES))
        endpoint = StreamEndpoint(1, GENERATION, lambda shard, tile: TileKey(0, 0), ManualClock(0), memory)
        fetch = pack_submission((7, int(Op.FETCH), int(Mode.READ), 0, 0, GENERATION, 0, 0, 0))
        endpoint.receive(data_pb2.ExchangeRequest(entry=fetch))
        (request,) = endpoint.drain(1)
        endpoint.post([Reply(1, request.id, Code.OK, 0, 3 * PIECE_BYTES, 5)])
        outgoing = endpoint.outgoing()
        assert (await anext(outgoing)).offset == 0
        endpoint.close()
        memory.release()
        assert [message async for message in outgoing] == []

    asyncio.run(run())
