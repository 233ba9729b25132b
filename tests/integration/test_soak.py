"""Long use and misuse of one daemon: descriptors and memory stay flat, hostile neighbours hurt only themselves."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from offloadd.client import ClientSession, Code, Mode, OffloadError, ShardSpec
from offloadd.core.units import KIB, MIB
from offloadd.wire.layout import ENTRY_BYTES, RING_ENTRIES, Submission, pack_submission
from offloadd_native import ring_bytes
from tests.daemon import ROOT, Daemon, running, until

QUEUE_BYTES = ring_bytes(RING_ENTRIES, ENTRY_BYTES)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running(session__slot_wait_seconds=1) as started:
        yield started


class Bystander:
    """A sane session that checks every byte it gets back."""

    def __init__(self, daemon: Daemon, job: str = "sane", tiles: int = 64, tile: int = 4 * KIB) -> None:
        self.session = daemon.session(
            job=job, host_bytes=16 * tile, swap_bytes=4 * MIB, tile_bytes=tile, pinned_tiles=4
        )
        self.shard = self.session.register([ShardSpec("a", "float32", tiles * tile, "param")])[0]
        self.known: dict[int, int] = {}
        self.rng = random.Random(0)

    def act(self) -> None:
        """Fetch a tile, check it, change it, store it."""
        tile, value = self.rng.randrange(len(self.shard.tiles)), self.rng.randrange(256)
        mode = Mode.UPDATE if tile in self.known else Mode.OVERWRITE
        slot = self.session.fetch(self.shard, tile, mode).wait()
        view = np.frombuffer(slot.buffer or b"", dtype=np.uint8)
        if tile in self.known and not (view == self.known[tile]).all():
            raise AssertionError(f"tile {tile} came back different")
        view[:] = value
        del view
        slot.store()
        self.known[tile] = value


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_kib(pid: int, field: str = "VmRSS") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise AssertionError(f"no {field}")


def granted(daemon: Daemon) -> int:
    memory = daemon.status()["memory"]
    assert isinstance(memory, dict)
    return int(memory["granted_bytes"])


@pytest.mark.parametrize("swaps", [10_000, pytest.param(100_000, marks=[pytest.mark.full, pytest.mark.slow])])
def test_many_swaps_leave_descriptors_and_memory_flat(daemon: Daemon, swaps: int) -> None:
    bystander = Bystander(daemon)
    pids = (daemon.process.pid, os.getpid())
    for _ in range(3000):
        bystander.act()
    before = [(descriptors(pid), resident_kib(pid)) for pid in pids]
    for _ in range(swaps):
        bystander.act()
    after = [(descriptors(pid), resident_kib(pid)) for pid in pids]
    read = bystander.session.statistics()["disk_read_bytes"]
    bystander.session.close()
    assert read > swaps * 2 * KIB, "most of it went through the disk"
    for (descriptors_before, kib_before), (descriptors_after, kib_after) in zip(before, after, strict=True):
        assert descriptors_after == descriptors_before
        assert kib_after - kib_before < 4 * 1024


# ---- misuse ----------------------------------------------------------------------------------------------------------


class Hostile:
    """A session that writes what it likes into its ring, and comes back when it is thrown out."""

    def __init__(self, daemon: Daemon, number: int, rng: random.Random) -> None:
        self.daemon, self.number, self.rng = daemon, number, rng
        self.ends = -1
        self._open()

    def _open(self) -> None:
        self.ends += 1
        self.session = self.daemon.session(
            job=f"mad{self.number}", host_bytes=1 * MIB, swap_bytes=8 * MIB, tile_bytes=64 * KIB
        )
        self.session.register([ShardSpec("a", "float32", 4 * MIB, "param"), ShardSpec("b", "float32", 0, "param")])

    def act(self) -> None:
        """One burst of nonsense; a ring too broken even for its own writer is given up."""
        try:
            self._write()
        except OffloadError:
            self.renew()

    def _write(self) -> None:
        channel, rng = self.session._channel, self.rng
        ring = channel._ring  # type: ignore[union-attr]
        kind = rng.random()
        if kind < 0.7:
            for _ in range(rng.randrange(1, 64)):
                entry = self._plausible() if kind < 0.5 else rng.randbytes(ENTRY_BYTES)
                channel.submit(entry)  # type: ignore[union-attr]
        elif kind < 0.9:
            at = 64 * rng.randrange(len(ring) // 64)
            ring[at : at + 8] = rng.randbytes(8)
        else:
            # The indices themselves: head and tail of either queue.
            at = rng.choice([0, QUEUE_BYTES]) + rng.choice([64, 128, 192])
            value = rng.choice([0, 1, rng.randrange(RING_ENTRIES * 2), 2**63, 2**64 - 1])
            ring[at : at + 8] = value.to_bytes(8, "little")
        os.eventfd_write(channel._submission_doorbell, 1)  # type: ignore[union-attr]
        channel.poll()  # type: ignore[union-attr]

    def _plausible(self) -> bytes:
        rng, generation = self.rng, self.session._generation
        lease = rng.choice([0, 1, rng.randrange(10_000), 2**64 - 1])
        mode, shard, tile = rng.randrange(4), rng.randrange(3), rng.randrange(70)
        blocked = rng.choice([0, 1, 2**64 - 1])
        return pack_submission(
            Submission(rng.randrange(2**64), rng.randrange(8), mode, shard, tile, generation, lease, blocked, 9)
        )

    def renew(self) -> None:
        self.session.close()
        self._open()

    def alive(self) -> bool:
        try:
            self.session.statistics()
        except OffloadError:
            return False
        return True


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=[pytest.mark.full, pytest.mark.slow])])
def test_nonsense_in_rings_hurts_only_those_who_write_it(daemon: Daemon, seconds: int) -> None:
    rng = random.Random(seconds)
    bystander = Bystander(daemon)
    mad = [Hostile(daemon, number, rng) for number in range(4)]
    deadline = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < deadline:
        rounds += 1
        for hostile in mad:
            hostile.act()
        for _ in range(5):
            bystander.act()
        if rounds % 20 == 0:
            for hostile in mad:
                if not hostile.alive():
                    hostile.renew()
    assert daemon.process.poll() is None
    assert sum(hostile.ends for hostile in mad) > 3, "some were thrown out"
    for hostile in mad:
        hostile.session.close()
    bystander.session.flush()
    bystander.act()
    bystander.session.close()
    assert until(lambda: granted(daemon) == 0)
    assert "Traceback" not in daemon.log()
    assert "INTERNAL" not in daemon.log()


def test_a_client_that_never_reaps_is_ended_alone(daemon: Daemon) -> None:
    bystander = Bystander(daemon)
    mad = daemon.session(job="mad", host_bytes=1 * MIB, tile_bytes=64 * KIB)
    for number in range(20 * RING_ENTRIES):
        mad._channel.submit(pack_submission(Submission(number, 0, 0, 0, 0, mad._generation, 0)))  # type: ignore[union-attr]
    for _ in range(200):
        bystander.act()
    assert until(lambda: re.search(r"job mad rank 0: session \d+ has left all \d+ completions", daemon.log()))
    mad.close()
    bystander.session.close()
    assert until(lambda: granted(daemon) == 0)
    assert "Traceback" not in daemon.log()


def _hold(session: ClientSession) -> list[object]:
    shard = session.register([ShardSpec("a", "float32", 4 * MIB, "param")])[0]
    return [session.fetch(shard, tile, Mode.OVERWRITE).wait() for tile in range(16)]


def test_a_client_that_holds_every_slot_stops_only_itself(daemon: Daemon) -> None:
    bystander = Bystander(daemon)
    greedy = daemon.session(job="greedy", host_bytes=1 * MIB, tile_bytes=64 * KIB, pinned_tiles=4)
    held = _hold(greedy)
    shard = greedy.register([ShardSpec("b", "float32", 64 * KIB, "param")])[0]
    one_more = greedy.fetch(shard, 0, Mode.OVERWRITE)
    for _ in range(500):
        bystander.act()
    with pytest.raises(OffloadError, match="16 tiles fetched and not handed back") as caught:
        one_more.wait()
    assert caught.value.code is Code.SLOTS_EXHAUSTED
    assert len(held) == 16
    greedy.close()
    bystander.session.close()


def test_sessions_dropped_without_a_word_give_everything_back(daemon: Daemon) -> None:
    pid = daemon.process.pid

    def drop() -> None:
        session = daemon.session(host_bytes=1 * MIB, tile_bytes=64 * KIB)
        session.register([ShardSpec("a", "float32", 256 * KIB, "param")])
        session._channel.close()  # type: ignore[union-attr]
        session.control.close()

    drop()
    assert until(lambda: granted(daemon) == 0)
    before, kib = descriptors(pid), resident_kib(pid)
    for _ in range(200):
        drop()
    assert until(lambda: granted(daemon) == 0)
    assert until(lambda: descriptors(pid) <= before + 2)
    assert resident_kib(pid) - kib < 8 * 1024
    assert not list((daemon.directory / "swap").iterdir())


RANK = """
import sys
import numpy as np
from offloadd.client import connect, ShardSpec, Mode
session = connect(sys.argv[1], timeout_s=20)
session.reserve(host_bytes=48 << 20, tile_bytes=1 << 20)
shard = session.register([ShardSpec("a", "float32", 40 << 20, "param")])[0]
for tile in range(40):
    slot = session.fetch(shard, tile, Mode.OVERWRITE).wait()
    np.frombuffer(slot.buffer, dtype=np.uint8)[:] = tile
    slot.store()
session.flush()
print("full", flush=True)
sys.stdin.read()
"""


def test_the_memory_of_killed_ranks_returns(daemon: Daemon) -> None:
    pid = daemon.process.pid
    command = [sys.executable, "-c", RANK, daemon.endpoint]
    for _ in range(3):
        rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert rank.stdout is not None
        assert rank.stdout.readline() == "full\n"
        assert resident_kib(pid, "RssShmem") > 32 * 1024
        rank.kill()
        rank.communicate(timeout=10)
        assert until(lambda: resident_kib(pid, "RssShmem") < 1024)
    assert granted(daemon) == 0
