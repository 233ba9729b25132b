"""A device that fails or lies under a whole daemon: typed errors that name everything, never wrong bytes, and nobody
but the session concerned notices."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from offloadd.client import ClientSession, Code, Mode, OffloadError, RegisteredShard, ShardSpec
from offloadd.core.units import GRANULE_BYTES, KIB, MIB
from tests.daemon import Daemon, running
from tests.faults.daemon_main import VARIABLE

TILE = 256 * KIB
TILES = 64
HOST = 3 * MIB
"""Room for a fifth of the tiles, so that most of what happens is I/O."""


@contextmanager
def faulty(monkeypatch: pytest.MonkeyPatch, **plan: float) -> Iterator[tuple[Daemon, ClientSession, ClientSession]]:
    """A daemon whose device fails the first session, that session, and a neighbour."""
    monkeypatch.setenv(VARIABLE, json.dumps(plan))
    with running(module="tests.faults.daemon_main", session__slot_wait_seconds=1) as daemon:
        unlucky = daemon.session(job="unlucky", host_bytes=HOST, swap_bytes=32 * MIB, tile_bytes=TILE, pinned_tiles=4)
        sane = daemon.session(job="sane", host_bytes=HOST, swap_bytes=32 * MIB, tile_bytes=TILE, pinned_tiles=4)
        try:
            yield daemon, unlucky, sane
        finally:
            unlucky.close()
            sane.close()


class Actor:
    """Stores and fetches at random, knows what must come back, and keeps what was said."""

    def __init__(self, session: ClientSession, seed: int) -> None:
        self.session = session
        self.shard = session.register([ShardSpec(f"weight{seed}", "float32", TILES * TILE, "param")])[0]
        self.rng = random.Random(seed)
        self.known: dict[int, int] = {}
        self.errors: list[OffloadError] = []

    def put(self, tile: int) -> None:
        self.known.pop(tile, None)
        slot = self.session.fetch(self.shard, tile, Mode.OVERWRITE).wait()
        value = self.rng.randrange(256)
        np.frombuffer(slot.buffer or b"", dtype=np.uint8)[:] = value
        slot.store()
        self.known[tile] = value

    def get(self, tile: int) -> None:
        slot = self.session.fetch(self.shard, tile, Mode.READ).wait()
        right = bool((np.frombuffer(slot.buffer or b"", dtype=np.uint8) == self.known[tile]).all())
        slot.release()
        assert right, f"tile {tile} came back different"

    def run(self, operations: int) -> None:
        for _ in range(operations):
            tile = self.rng.randrange(TILES)
            try:
                if tile in self.known and self.rng.random() < 0.6:
                    self.get(tile)
                else:
                    self.put(tile)
                if self.rng.random() < 0.03:
                    self.session.flush()
            except OffloadError as error:
                self.errors.append(error)
                if error.code is Code.CORRUPT:
                    self.known.pop(tile, None)


def well_said(error: OffloadError, daemon: Daemon, path: bool) -> None:
    said = error.message
    assert "job unlucky rank 0" in said
    assert "\n" not in said
    if path:
        assert str(daemon.directory / "swap") in said


@pytest.mark.parametrize(
    ("fault", "codes"),
    [
        ("eio", {Code.IO_ERROR}),
        ("enospc", {Code.NO_SPACE}),
        ("short", {Code.SHORT_IO}),
        ("eagain", {Code.IO_ERROR}),
        ("flip", {Code.CORRUPT}),
    ],
)
def test_a_fault_is_a_typed_error_and_never_wrong_bytes(
    monkeypatch: pytest.MonkeyPatch, fault: str, codes: set[Code]
) -> None:
    with faulty(monkeypatch, **{fault: 0.05, "delay": 0.1}) as (daemon, unlucky, sane):
        neighbour, actor = Actor(sane, 0), Actor(unlucky, 1)
        found: Counter[Code] = Counter()
        for seed in range(5):
            actor.rng.seed(seed)
            actor.run(200)
            neighbour.run(40)
            for error in actor.errors:
                well_said(error, daemon, path=True)
                found[error.code] += 1
            actor.errors.clear()
        assert set(found) == codes
        assert neighbour.errors == []
        assert daemon.process.poll() is None
        sane.nop()
        unlucky.nop()


def test_a_tile_that_was_corrupt_can_be_stored_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty(monkeypatch, flip=1.0) as (_, unlucky, _):
        actor = Actor(unlucky, 1)
        for tile in range(TILES):
            actor.put(tile)
        with pytest.raises(OffloadError) as caught:
            actor.get(0)
        assert caught.value.code is Code.CORRUPT
        actor.put(0)
        actor.get(0)


def test_a_disk_that_takes_nothing_is_named_when_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty(monkeypatch, eio=1.0) as (daemon, unlucky, sane):
        actor = Actor(unlucky, 1)
        with pytest.raises(OffloadError) as caught:
            _put_all(actor)
        well_said(caught.value, daemon, path=True)
        assert "Input/output error" in caught.value.message
        Actor(sane, 0).run(50)


def test_a_device_that_lies_is_found_by_shard_granule_and_path(tmp_path: Path) -> None:
    with running() as daemon:
        session = daemon.session(job="resnet", host_bytes=HOST, swap_bytes=32 * MIB, tile_bytes=TILE, pinned_tiles=4)
        shard = session.register([ShardSpec("layer.weight", "float32", TILES * TILE, "param")])[0]
        _fill(session, shard)
        spoil(daemon.directory / "swap" / "offloadd" / "resnet" / "tiles.swap", 200 * KIB)
        said = [error for tile in range(TILES) if (error := _check(session, shard, tile)) is not None]
        assert len(said) >= TILES - HOST // TILE
        for error in said:
            assert error.code is Code.CORRUPT
            assert "job resnet rank 0" in error.message
            assert "layer.weight[" in error.message
            assert str(daemon.directory / "swap") in error.message
            # The second granule of each tile is the one that was touched.
            assert f"{GRANULE_BYTES // KIB} KiB" in error.message
        session.nop()
        session.close()


def _put_all(actor: Actor) -> None:
    for tile in range(TILES):
        actor.put(tile)


def _fill(session: ClientSession, shard: RegisteredShard) -> None:
    for tile in range(TILES):
        slot = session.fetch(shard, tile, Mode.OVERWRITE).wait()
        np.frombuffer(slot.buffer or b"", dtype=np.uint8)[:] = tile
        slot.store()
    session.flush()


def _check(session: ClientSession, shard: RegisteredShard, tile: int) -> OffloadError | None:
    """What a fetch said, or None when the right bytes came."""
    try:
        slot = session.fetch(shard, tile, Mode.READ).wait()
    except OffloadError as error:
        return error
    assert (np.frombuffer(slot.buffer or b"", dtype=np.uint8) == tile).all()
    slot.release()
    return None


def spoil(path: Path, offset: int) -> None:
    """Flip one bit of every tile through a descriptor of our own."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        for start in range(0, os.fstat(descriptor).st_size, TILE):
            byte = os.pread(descriptor, 1, start + offset)
            os.pwrite(descriptor, bytes([byte[0] ^ 4]), start + offset)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
