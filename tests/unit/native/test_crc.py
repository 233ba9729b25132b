"""CRC-32C: known values, every instruction set, and the pool."""

from __future__ import annotations

import select
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import offloadd_native
from offloadd_native import ChecksumPool, crc32c

LEVELS = offloadd_native.cpu_levels()


@pytest.fixture(autouse=True)
def best_level_afterwards() -> Iterator[None]:
    yield
    offloadd_native.set_cpu_level(LEVELS[0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_known_values(level: str, data: bytes, value: int) -> None:
    offloadd_native.set_cpu_level(level)
    assert crc32c(data) == value


@settings(deadline=None, max_examples=40)
@given(length=st.integers(0, 60_000), offset=st.integers(0, 63), cut=st.floats(0, 1), level=st.sampled_from(LEVELS))
def test_every_level_and_every_cut_agree(length: int, offset: int, cut: float, level: str) -> None:
    data = np.random.default_rng(length).integers(0, 256, length + 64, dtype=np.uint8).data[offset : offset + length]
    middle = int(cut * length)
    offloadd_native.set_cpu_level("baseline")
    plain = crc32c(data)
    offloadd_native.set_cpu_level(level)
    assert crc32c(data[middle:], crc32c(data[:middle])) == plain


def collect(pool: ChecksumPool, count: int) -> dict[int, bytes]:
    poller = select.poll()
    poller.register(pool.fileno(), select.POLLIN)
    results: dict[int, bytes] = {}
    while len(results) < count:
        assert poller.poll(10_000), "the pool announced nothing"
        for user, sums in pool.reap():
            assert user not in results
            results[user] = sums
    assert not poller.poll(0)
    return results


@pytest.mark.parametrize("threads", [1, 3])
def test_the_pool_sums_each_granule(threads: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, 1_000_000, dtype=np.uint8)
    pool = ChecksumPool(threads, 4096)
    lengths = [0, 1, 4095, 4096, 4097, 999_999]
    for user, length in enumerate(lengths):
        pool.submit(user, data.ctypes.data, length)
    results = collect(pool, len(lengths))
    pool.close()
    for user, length in enumerate(lengths):
        sums = [crc32c(data[at : min(at + 4096, length)].data) for at in range(0, length, 4096)]
        assert results[user] == struct.pack(f"<{len(sums)}I", *sums)


def test_closing_finishes_what_is_queued() -> None:
    data = np.zeros(1 << 20, dtype=np.uint8)
    pool = ChecksumPool(1, 4096)
    for user in range(20):
        pool.submit(user, data.ctypes.data, data.nbytes)
    pool.close()
    pool.close()
    assert sorted(user for user, _ in pool.reap()) == list(range(20))


def test_a_closed_pool_takes_nothing() -> None:
    pool = ChecksumPool(1, 4096)
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.submit(1, 0, 0)
