"""Where io_uring is forbidden or memory may not be locked, the same bytes come back, and the daemon says why."""

from __future__ import annotations

import numpy as np
import pytest

from offloadd.client import ClientSession, Mode, ShardSpec
from offloadd.core.units import KIB, MIB
from tests.daemon import running


def round_trip(session: ClientSession) -> bool:
    """Four times more than memory holds, out and back."""
    shard = session.register([ShardSpec("a", "float32", 16 * MIB, "param")])[0]
    for tile in range(len(shard.tiles)):
        slot = session.fetch(shard, tile, Mode.OVERWRITE).wait()
        np.frombuffer(slot.buffer or b"", dtype=np.uint8)[:] = tile
        slot.store()
    session.flush()
    for tile in range(len(shard.tiles)):
        slot = session.fetch(shard, tile, Mode.READ).wait()
        if not (np.frombuffer(slot.buffer or b"", dtype=np.uint8) == tile).all():
            return False
        slot.release()
    return True


@pytest.mark.parametrize("errno", ["eperm", "enosys"])
def test_without_io_uring_it_runs_on_threads_and_says_why(errno: str) -> None:
    with running((f"uring-{errno}",)) as daemon:
        session = daemon.session(host_bytes=4 * MIB, tile_bytes=256 * KIB)
        assert round_trip(session)
        session.close()
        engine = daemon.status()["engine"]
        assert isinstance(engine, dict)
        assert engine["name"] == "threads"
        assert any(errno.upper() in note and "seccomp" in note for note in engine["notes"])


def test_an_explicit_io_uring_that_cannot_run_is_refused_at_start() -> None:
    with (
        pytest.raises(RuntimeError, match=r"io\.engine=uring .* cannot run here .*EPERM"),
        running(("uring-eperm",), io__engine="uring"),
    ):
        pass


@pytest.mark.uring
def test_with_64_kib_of_locked_memory_the_same_bytes_come_back() -> None:
    with running(("memlock",)) as daemon:
        session = daemon.session(host_bytes=4 * MIB, tile_bytes=256 * KIB)
        assert round_trip(session)
        session.close()


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_every_engine_runs_the_daemon(engine: str) -> None:
    with running(io__engine=engine) as daemon:
        session = daemon.session(host_bytes=4 * MIB, tile_bytes=256 * KIB)
        assert round_trip(session)
        session.close()
