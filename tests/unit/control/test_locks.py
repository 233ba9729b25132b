"""A lock per name, and none for names that nobody holds."""

from __future__ import annotations

import asyncio

import pytest

from offloadd.control.locks import NamedLocks


def test_a_name_is_held_by_one_at_a_time_in_order_and_names_do_not_wait_for_each_other() -> None:
    async def run() -> None:
        locks, done, seen = NamedLocks(), asyncio.Event(), []

        async def take(name: str, number: int, until: asyncio.Event | None = None) -> None:
            async with locks.hold(name):
                seen.append((name, number))
                if until is not None:
                    await until.wait()

        first = asyncio.create_task(take("a", 0, done))
        await asyncio.sleep(0)  # its turn
        others = [asyncio.create_task(take("a", number)) for number in (1, 2)]
        await take("b", 0)
        assert seen == [("a", 0), ("b", 0)]
        assert len(locks) == 1
        done.set()
        await asyncio.gather(first, *others)
        assert seen == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
        assert len(locks) == 0

    asyncio.run(asyncio.wait_for(run(), 20))


def test_whoever_fails_or_gives_up_leaves_no_lock() -> None:
    async def run() -> None:
        locks = NamedLocks()
        waiting: list[asyncio.Task[None]] = []

        async def fail() -> None:
            async with locks.hold("a"):
                waiting.append(asyncio.create_task(locks.hold("a").__aenter__()))
                await asyncio.sleep(0)
                waiting[0].cancel()
                raise KeyError("a")

        with pytest.raises(KeyError):
            await fail()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        assert len(locks) == 0

    asyncio.run(asyncio.wait_for(run(), 20))
