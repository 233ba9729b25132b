"""Calls of one session that arrive together: one at a time inside, whatever the order outside."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from offloadd.client import ClientSession, Code, OffloadError, ShardSpec, connect
from offloadd.core.units import KIB, MIB
from offloadd.wire.pb import control_pb2
from tests.daemon import running


def together(calls: list[Callable[[], object]]) -> list[object]:
    """What each call returned or raised."""
    results: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except OffloadError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_reserving_twice_at_once_is_granted_once() -> None:
    with running() as daemon:
        session = connect(daemon.endpoint, timeout_s=20)
        request = session.control.stub.Reserve

        def reserve() -> object:
            asked = control_pb2.ReserveRequest(session=session._ref, host_bytes=16 * MIB, timeout_s=10, pinned_tiles=2)
            return session.control.call(request, asked)

        results = together([reserve] * 8)
        refused = [result for result in results if isinstance(result, OffloadError)]
        assert len(refused) == 7
        assert {error.code for error in refused} == {Code.BAD_REQUEST}
        memory = daemon.status()["memory"]
        assert isinstance(memory, dict)
        assert memory["granted_bytes"] == 16 * MIB
        session.close()


def register(session: ClientSession, name: str) -> Callable[[], object]:
    return lambda: session.register([ShardSpec(name, "float32", 1 * MIB, "param")])[0].number


def test_shards_registered_at_once_get_numbers_of_their_own() -> None:
    with running() as daemon:
        session = daemon.session(host_bytes=8 * MIB, tile_bytes=256 * KIB)
        numbers = together([register(session, f"s{i}") for i in range(16)])
        assert sorted(map(int, numbers)) == list(range(16))  # type: ignore[call-overload]
        session.close()


def test_tiny_tiles_are_refused() -> None:
    with running() as daemon:
        session = daemon.session(host_bytes=8 * MIB, tile_bytes=256 * KIB)
        with pytest.raises(OffloadError, match="between 16384 and") as caught:
            session.register([ShardSpec("a", "uint8", 1 * MIB, "other", tile_bytes=1)])
        assert caught.value.code is Code.BAD_REQUEST
        session.close()
