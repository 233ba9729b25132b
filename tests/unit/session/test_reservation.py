"""All ranks or none, within a bound, with figures."""

import asyncio
import dataclasses
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from offloadd.core.errors import Code, OffloadError
from offloadd.core.units import KIB, MIB
from offloadd.session.registry import OpenRequest, Registry, Session
from offloadd.session.reservation import Grant, Need, Reservations


def two_ranks(host: int, swap: int = 1000 * MIB) -> tuple[Registry, Reservations, list[Session]]:
    registry = Registry(host, swap, 8, lambda: 0)
    sessions = [registry.open(OpenRequest("job", "", rank, 2, 2, 0, 0, 1.0), 0, None)[0] for rank in range(2)]
    return registry, Reservations(registry), sessions


def need(host: int = 0, swap: int = 100 * MIB, tile: int = 0, pinned: int = 2, fingerprint: str = "") -> Need:
    return Need(host, swap, tile, pinned, fingerprint)


async def both(*calls: Coroutine[Any, Any, Grant]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


def test_an_unspecified_budget_is_an_equal_share() -> None:
    registry, reservations, (a, b) = two_ranks(64 * MIB)

    async def run() -> list[Any]:
        return await both(reservations.reserve(a, need(), 5), reservations.reserve(b, need(), 5))

    grants = asyncio.run(run())
    assert [g.host_bytes for g in grants] == [32 * MIB, 32 * MIB]
    assert all(g.tile_bytes >= 64 * KIB for g in grants)
    assert registry.host.used == 64 * MIB


def test_a_budget_that_is_no_multiple_of_a_page_is_granted_in_whole_pages() -> None:
    odd = 32 * MIB + 1389
    registry, reservations, (a, b) = two_ranks(2 * odd)

    async def run() -> list[Any]:
        return await both(reservations.reserve(a, need(odd), 5), reservations.reserve(b, need(odd), 5))

    grants = asyncio.run(run())
    assert [g.host_bytes for g in grants] == [32 * MIB, 32 * MIB]
    assert registry.host.used == 64 * MIB


def test_if_one_rank_does_not_fit_nobody_is_granted_anything() -> None:
    registry, reservations, (a, b) = two_ranks(64 * MIB)

    async def run() -> list[Any]:
        return await both(reservations.reserve(a, need(20 * MIB), 5), reservations.reserve(b, need(50 * MIB), 5))

    errors = asyncio.run(run())
    assert [e.code for e in errors] == [Code.NO_HOST_BUDGET] * 2
    assert "70 MiB" in errors[0].message
    assert "64 MiB" in errors[0].message
    assert registry.host.used == 0


def test_a_region_too_small_for_the_working_set_is_refused_before_anything_starts() -> None:
    _, reservations, (a, b) = two_ranks(64 * MIB)

    async def run() -> list[Any]:
        small = need(1 * MIB, tile=1 * MIB, pinned=4)
        return await both(reservations.reserve(a, small, 5), reservations.reserve(b, small, 5))

    errors = asyncio.run(run())
    assert errors[0].code is Code.NO_HOST_BUDGET
    assert "9 MiB" in errors[0].message


def test_ranks_with_different_models_are_named() -> None:
    _, reservations, (a, b) = two_ranks(64 * MIB)

    async def run() -> list[Any]:
        return await both(
            reservations.reserve(a, need(fingerprint="x"), 5), reservations.reserve(b, need(fingerprint="y"), 5)
        )

    errors = asyncio.run(run())
    assert [e.code for e in errors] == [Code.RANKS_DISAGREE] * 2
    assert "ranks 0 and 1" in errors[0].message


def test_a_rank_that_never_asks_is_noticed_within_the_bound() -> None:
    _, reservations, (a, _) = two_ranks(64 * MIB)
    with pytest.raises(OffloadError, match=r"only ranks \[0\] of 2") as caught:
        asyncio.run(reservations.reserve(a, need(), 0.01))
    assert caught.value.code is Code.TIMED_OUT


def test_a_rank_that_ends_late_takes_no_successor_along() -> None:
    """The job is started again before all of it has ended."""
    registry, reservations, (a, b) = two_ranks(64 * MIB)

    async def run() -> list[Any]:
        await both(reservations.reserve(a, need(8 * MIB), 5), reservations.reserve(b, need(8 * MIB), 5))
        a.region = b.region = SimpleNamespace()  # type: ignore[assignment]  # what they were granted
        again = OpenRequest("job", "", 0, 2, 2, 0, 0, 1.0)
        successors = [registry.open(dataclasses.replace(again, rank=rank), 0, None)[0] for rank in range(2)]
        waiting = asyncio.create_task(reservations.reserve(successors[0], need(8 * MIB), 5))
        await asyncio.sleep(0)
        reservations.rank_lost(b)
        return await both(waiting, reservations.reserve(successors[1], need(8 * MIB), 5))

    assert [grant.host_bytes for grant in asyncio.run(run())] == [8 * MIB] * 2


def test_a_rank_that_dies_is_named_to_those_who_wait() -> None:
    _, reservations, (a, b) = two_ranks(64 * MIB)

    async def run() -> Grant:
        waiting = asyncio.create_task(reservations.reserve(a, need(), 5))
        await asyncio.sleep(0)
        reservations.rank_lost(b)
        return await waiting

    with pytest.raises(OffloadError, match="rank 1 ended") as caught:
        asyncio.run(run())
    assert caught.value.code is Code.RANK_LOST
