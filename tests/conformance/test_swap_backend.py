"""What every SwapBackend promises. `backend` is the only thing to add to for another implementation."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from offloadd.client import PLAN_LENGTH_MAX
from tests.daemon import Daemon, running
from trainer.swap.backend import Access, SwapBackend, SwapError, SwapSpec
from trainer.swap.daemon import DaemonBackend
from trainer.swap.inprocess import InProcessBackend

TILE = 1024


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running() as daemon:
        yield daemon


@pytest.fixture(params=["plain", "guarded", "daemon"])
def backend(request: pytest.FixtureRequest) -> Iterator[SwapBackend]:
    made: SwapBackend
    if request.param == "daemon":
        made = _connected(request.getfixturevalue("daemon").endpoint)
    else:
        made = InProcessBackend(tile_numel=TILE, guarded=request.param == "guarded")
    yield made
    made.close()


def _connected(endpoint: str) -> DaemonBackend:
    place = {"rank": 0, "world": 1, "local_rank": 0, "local_world": 1}
    sizes = {"host_bytes": 8 << 20, "swap_bytes": 64 << 20}
    rest = {"job": None, "nvme_path": None, "timeout_s": 20.0, "token_file": None}
    return DaemonBackend.connect(endpoint, **place, **sizes, **rest)  # type: ignore[arg-type]


def spec(numel: int, dtype: torch.dtype = torch.float32, name: str = "a") -> SwapSpec:
    return SwapSpec(name, numel, dtype, "param")


def fill(backend: SwapBackend, tiles: object, value: float) -> None:
    for tile in tiles:  # type: ignore[attr-defined]
        slot = backend.fetch(tile, "overwrite").wait()
        slot.tensor.fill_(value)
        slot.store()


@pytest.mark.parametrize("numel", [0, 1, 7, TILE - 1, TILE, TILE + 1, 3 * TILE + 5])
def test_tiles_cover_a_shard_in_order(backend: SwapBackend, numel: int) -> None:
    (shard,) = backend.register([spec(numel)])
    at = 0
    for index, tile in enumerate(shard.tiles):
        assert (tile.index, tile.start) == (index, at)
        assert 0 < tile.numel <= backend.tile_numel
        at += tile.numel
    assert at == numel


def test_shards_of_equal_length_have_equal_tiles_whatever_their_dtype(backend: SwapBackend) -> None:
    shards = backend.register(
        [spec(5000, dtype, str(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    )
    cuts = [[(tile.start, tile.numel) for tile in shard.tiles] for shard in shards]
    assert cuts[0] == cuts[1] == cuts[2]


def test_tile_numel_is_a_multiple_of_1024(backend: SwapBackend) -> None:
    assert backend.tile_numel > 0
    assert backend.tile_numel % 1024 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_stored_is_fetched(backend: SwapBackend, dtype: torch.dtype) -> None:
    (shard,) = backend.register([spec(2 * TILE + 3, dtype)])
    values = torch.randn(2 * TILE + 3).to(dtype)
    for tile in shard.tiles:
        slot = backend.fetch(tile, "overwrite").wait()
        slot.tensor.copy_(values[tile.start : tile.start + tile.numel])
        slot.store()
    for tile in shard.tiles:
        slot = backend.fetch(tile, "read").wait()
        assert torch.equal(slot.tensor, values[tile.start : tile.start + tile.numel])
        slot.release()


def test_a_slot_is_one_dimensional_and_aligned(backend: SwapBackend) -> None:
    (shard,) = backend.register([spec(TILE + 9, torch.bfloat16)])
    for tile in shard.tiles:
        slot = backend.fetch(tile, "overwrite").wait()
        assert slot.tensor.shape == (tile.numel,)
        assert slot.tensor.dtype == torch.bfloat16
        assert slot.tensor.data_ptr() % 64 == 0
        slot.tensor.zero_()
        slot.store()


def test_an_update_is_seen_by_the_next_fetch(backend: SwapBackend) -> None:
    (shard,) = backend.register([spec(10)])
    fill(backend, shard.tiles, 1.0)
    slot = backend.fetch(shard.tiles[0], "update").wait()
    slot.tensor.add_(1.0)
    slot.store()
    read = backend.fetch(shard.tiles[0], "read").wait()
    assert read.tensor.tolist() == [2.0] * 10
    read.release()


def test_readers_share_a_tile(backend: SwapBackend) -> None:
    (shard,) = backend.register([spec(10)])
    fill(backend, shard.tiles, 3.0)
    slots = [backend.fetch(shard.tiles[0], "read").wait() for _ in range(3)]
    assert all(slot.tensor[0] == 3.0 for slot in slots)
    for slot in slots:
        slot.release()


def test_fetching_what_was_never_stored_is_refused(backend: SwapBackend) -> None:
    (shard,) = backend.register([spec(10, name="layer.weight")])
    with pytest.raises(SwapError, match=r"layer\.weight"):
        backend.fetch(shard.tiles[0], "read").wait()


def test_an_overwrite_that_is_released_leaves_nothing(backend: SwapBackend) -> None:
    (shard,) = backend.register([spec(10)])
    fill(backend, shard.tiles, 3.0)
    backend.fetch(shard.tiles[0], "overwrite").wait().release()
    with pytest.raises(SwapError):
        backend.fetch(shard.tiles[0], "read").wait()


def test_a_read_slot_cannot_be_stored(backend: SwapBackend) -> None:
    (shard,) = backend.register([spec(10)])
    fill(backend, shard.tiles, 3.0)
    slot = backend.fetch(shard.tiles[0], "read").wait()
    with pytest.raises((ValueError, SwapError)):
        slot.store()
    slot.release()


def test_writing_to_a_read_slot_is_an_error_at_release(backend: SwapBackend) -> None:
    (shard,) = backend.register([spec(10)])
    fill(backend, shard.tiles, 3.0)
    slot = backend.fetch(shard.tiles[0], "read").wait()
    slot.tensor.add_(1)
    with pytest.raises(SwapError):
        slot.release()


def test_a_lease_ends_once(backend: SwapBackend) -> None:
    (shard,) = backend.register([spec(10)])
    slot = backend.fetch(shard.tiles[0], "overwrite").wait()
    slot.tensor.zero_()
    slot.store()
    with pytest.raises((SwapError, ValueError)):
        slot.release()


def test_names_are_unique(backend: SwapBackend) -> None:
    backend.register([spec(10)])
    with pytest.raises(SwapError, match="a"):
        backend.register([spec(5, name="b"), spec(5)])


def test_a_plan_is_only_a_hint(backend: SwapBackend) -> None:
    a, b = backend.register([spec(10), spec(10, name="b")])
    fill(backend, a.tiles + b.tiles, 1.0)
    backend.plan([Access(a.id, 0, "read"), Access(b.id, 0, "read")])
    for shard in (b, a, b):
        backend.fetch(shard.tiles[0], "read").wait().release()
    backend.flush()


def test_a_plan_too_long_to_be_taken_is_only_a_hint_too(backend: SwapBackend) -> None:
    (shard,) = backend.register([spec(10)])
    fill(backend, shard.tiles, 1.0)
    backend.plan([Access(shard.id, 0, "read")] * (PLAN_LENGTH_MAX + 1))
    backend.fetch(shard.tiles[0], "read").wait().release()


def test_many_fetches_may_be_under_way(backend: SwapBackend) -> None:
    shards = backend.register([spec(TILE, name=str(i)) for i in range(8)])
    for value, shard in enumerate(shards):
        fill(backend, shard.tiles, float(value))
    pending = [backend.fetch(shard.tiles[0], "read") for shard in shards]
    for value, one in enumerate(pending):
        slot = one.wait()
        assert slot.tensor[0] == float(value)
        slot.release()


def test_statistics_count_bytes(backend: SwapBackend) -> None:
    (shard,) = backend.register([spec(10)])
    fill(backend, shard.tiles, 1.0)
    backend.fetch(shard.tiles[0], "read").wait().release()
    counted = backend.statistics()
    assert counted["stores"] >= 1
    assert counted["fetches"] >= 1
    assert counted["bytes_fetched"] >= 40


def test_closing_twice_is_fine(backend: SwapBackend) -> None:
    backend.register([spec(10)])
    gc.collect()
    backend.close()
    backend.close()
