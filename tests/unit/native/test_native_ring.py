"""The shared-memory ring: order, wrap, bounds, doorbells, and a peer that lies."""

from __future__ import annotations

import mmap
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloadd_native import Ring, RingCorrupt, ring_bytes

ENTRIES, SIZE = 8, 16
HEAD, TAIL, MAGIC, GENERATION = 64, 128, 0, 8


class Pair:
    """Both ends of one ring, and its raw memory."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, ring_bytes(ENTRIES, SIZE))
        self.producer = Ring(memoryview(self.map), 0, ENTRIES, SIZE, 5, True)
        self.consumer = Ring(memoryview(self.map), 0, ENTRIES, SIZE, 5, False)

    def poke(self, offset: int, value: int) -> None:
        struct.pack_into("<Q", self.map, offset, value)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def entry(number: int) -> bytes:
    return struct.pack("<QQ", number, ~number & (2**64 - 1))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40))
@settings(deadline=None)
def test_whatever_goes_in_comes_out_once_and_in_order(steps: list[tuple[int, int]]) -> None:
    pair, sent, received = Pair(), 0, b""
    for push, pop in steps:
        taken, _ = pair.producer.push(b"".join(entry(sent + i) for i in range(push)))
        sent += taken
        received += pair.consumer.pop(pop)
    received += pair.consumer.pop(ENTRIES)
    assert received == b"".join(entry(number) for number in range(sent))


def test_push_takes_what_fits(pair: Pair) -> None:
    assert pair.producer.push(entry(0) * (ENTRIES + 3)) == (ENTRIES, False)
    assert (pair.producer.free(), pair.consumer.pending()) == (0, ENTRIES)
    assert pair.producer.push(entry(0)) == (0, False)


def test_push_refuses_part_of_an_entry(pair: Pair) -> None:
    with pytest.raises(ValueError, match="whole entries"):
        pair.producer.push(b"x")


def test_a_sleeping_consumer_is_rung_once(pair: Pair) -> None:
    assert pair.consumer.sleep()
    assert pair.producer.push(entry(1)) == (1, True)
    assert pair.producer.push(entry(2)) == (1, False)


def test_a_consumer_does_not_sleep_on_a_full_ring(pair: Pair) -> None:
    pair.producer.push(entry(1))
    assert not pair.consumer.sleep()
    assert pair.producer.push(entry(2)) == (1, False)


def test_a_woken_consumer_is_not_rung(pair: Pair) -> None:
    assert pair.consumer.sleep()
    pair.consumer.wake()
    assert pair.producer.push(entry(1)) == (1, False)


@pytest.mark.parametrize("tail", [ENTRIES + 1, 2**63, 2**64 - 1])
def test_a_tail_out_of_bounds_is_corrupt_to_the_consumer(pair: Pair, tail: int) -> None:
    pair.poke(TAIL, tail)
    for look in (pair.consumer.pending, pair.consumer.sleep, lambda: pair.consumer.pop(1)):
        with pytest.raises(RingCorrupt):
            look()


@pytest.mark.parametrize("head", [1, 2**63, 2**64 - 1 - ENTRIES])
def test_a_head_out_of_bounds_is_corrupt_to_the_producer(pair: Pair, head: int) -> None:
    pair.poke(HEAD, head)
    with pytest.raises(RingCorrupt):
        pair.producer.push(entry(1))
    with pytest.raises(RingCorrupt):
        pair.producer.free()


@pytest.mark.parametrize("offset", [MAGIC, GENERATION])
def test_a_changed_header_is_noticed_at_the_next_pop(pair: Pair, offset: int) -> None:
    pair.producer.push(entry(1))
    pair.poke(offset, 99)
    with pytest.raises(RingCorrupt):
        pair.consumer.pop(1)


def test_what_the_peer_does_to_our_own_index_changes_nothing(pair: Pair) -> None:
    pair.producer.push(entry(1) + entry(2))
    assert pair.consumer.pop(1) == entry(1)
    pair.poke(HEAD, 0)  # the consumer's index, overwritten by the producer's process
    assert pair.consumer.pop(5) == entry(2)


@pytest.mark.parametrize(("entries", "size"), [(0, 8), (3, 8), (8, 0), (8, 12), (2**21, 8), (8, 8192)])
def test_a_geometry_that_cannot_be_is_refused(entries: int, size: int) -> None:
    with pytest.raises(ValueError, match="a ring's"):
        ring_bytes(entries, size)


@pytest.mark.parametrize(("entries", "size", "generation"), [(16, SIZE, 5), (ENTRIES, 8, 5), (ENTRIES, SIZE, 6)])
def test_attaching_with_other_facts_than_the_creator_is_corrupt(
    pair: Pair, entries: int, size: int, generation: int
) -> None:
    with pytest.raises(RingCorrupt):
        Ring(memoryview(pair.map), 0, entries, size, generation, False)


def test_memory_too_short_is_refused() -> None:
    with mmap.mmap(-1, 4096) as memory, pytest.raises(ValueError, match="too short"):
        Ring(memoryview(memory), 64, 8, 16, 1, True)


def test_the_ring_keeps_its_memory_mapped(pair: Pair) -> None:
    with pytest.raises(BufferError):
        pair.map.close()
