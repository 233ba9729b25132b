"""Sessions that come and go: what is promised returns with the memory behind it, and slow work is not the loop's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from offloadd.control import lifecycle as module
from offloadd.control.lifecycle import Lifecycle
from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import ShardSpec, TileKey
from offloadd.core.units import MIB, PAGE_BYTES
from offloadd.session.registry import Job, OpenRequest, Registry, Session
from offloadd.session.reservation import Need
from offloadd.store.placement import SwapTarget
from tests.pump_world import World


@dataclass
class Files:
    """A job's swap files."""

    targets: tuple[SwapTarget, ...] = (SwapTarget(1, 0, 1.0),)
    removed: bool = False
    removing: threading.Event = field(default_factory=threading.Event)
    may_go: threading.Event | None = None
    """A slow disk: their removal waits for it."""

    def grow(self, file: int, length: int) -> None: ...

    def withdraw(self) -> None: ...

    def remove(self) -> None:
        self.removing.set()
        if self.may_go is not None:
            assert self.may_go.wait(20)
        self.removed = True


class NoDoorbells:
    def watch(self, endpoint: object) -> None: ...

    def unwatch(self, session: int) -> None: ...


@dataclass
class Node:
    """Everything around a Lifecycle."""

    world: World
    registry: Registry
    lifecycle: Lifecycle
    files: list[Files] = field(default_factory=list)
    forgotten: asyncio.Queue[Session] = field(default_factory=asyncio.Queue)
    """Sessions in the order in which they gave back their promise."""

    async def session(self, job: str = "a", host: int = 4 * MIB, reserve: bool = True) -> Session:
        opened = await self.lifecycle.open(OpenRequest(job, "", 0, 1, 1, host, 0, 1.0), 0, None, "")
        if reserve:
            await self.lifecycle.reserve(opened, Need(host, 0, PAGE_BYTES, 1, ""), 10, stream=True)
        return opened


def node(attach_seconds: float = 60) -> Node:
    world = World()
    registry = Registry(64 * MIB, 64 * MIB, 8, lambda: 0)

    async def open_files(job: Job) -> Files:
        made.files.append(Files())
        return made.files[-1]

    forget = registry.forget

    def noted(session: Session) -> Job | None:
        made.forgotten.put_nowait(session)
        return forget(session)

    registry.forget = noted  # type: ignore[method-assign]
    doors: Any = NoDoorbells()
    made = Node(
        world,
        registry,
        Lifecycle(
            registry,
            world.store,
            world.scheduler,
            world.pump,
            world.engine,  # type: ignore[arg-type]
            open_files,
            doors,
            world.clock,
            attach_seconds,
        ),
    )
    return made


@pytest.fixture(autouse=True)
def never_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS_MAX", 0.05)


def test_a_session_over_tcp_that_opens_no_stream_gives_its_promise_back() -> None:
    async def run() -> None:
        n = node(attach_seconds=0.05)
        attached = await n.session("attached")
        n.lifecycle.stream(attached)
        await n.session("opened", reserve=False)
        await n.session("reserved")
        assert n.registry.host.used == 12 * MIB
        for _ in range(2):
            await n.forgotten.get()
        assert n.registry.sessions() == [attached]
        assert n.registry.host.used == 4 * MIB
        with pytest.raises(OffloadError, match="has its stream already"):
            n.lifecycle.stream(attached)
        assert await n.lifecycle.close(attached, "test")

    asyncio.run(asyncio.wait_for(run(), 20))


def test_memory_that_a_device_still_holds_stays_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        n = node()
        session = await n.session()
        quiet: list[Callable[[int], None]] = []
        detach = n.world.pump.detach
        monkeypatch.setattr(n.world.pump, "detach", lambda number, on_quiet: quiet.append(on_quiet))
        assert not await n.lifecycle.close(session, "test")
        # Nobody waits for it any more, and nobody else gets its memory.
        assert await n.lifecycle.wait_empty(0.05)
        assert n.registry.host.used == 4 * MIB
        assert session.region is not None
        assert not n.files[0].removed
        with pytest.raises(OffloadError, match="still held by a transfer") as caught:
            await n.session()
        assert caught.value.code is Code.NO_HOST_BUDGET
        assert n.registry.host.used == 4 * MIB
        assert await n.forgotten.get() is not session
        detach(session.id, quiet[0])
        assert await n.forgotten.get() is session
        assert n.registry.host.used == 0
        assert session.region is None

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_session_whose_end_fails_keeps_memory_and_promise_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        n = node()
        session = await n.session()

        def fails(number: int) -> None:
            raise ValueError(f"region {number} is in use")

        monkeypatch.setattr(n.world.engine, "unregister_region", fails)
        assert not await n.lifecycle.close(session, "test")
        assert n.registry.host.used == 4 * MIB
        assert session.region is not None
        assert n.lifecycle.session_count() == 0

    asyncio.run(asyncio.wait_for(run(), 20))


def test_memory_is_pinned_and_unpinned_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        n = node()
        threads: dict[str, int] = {}
        for name in ("register_region", "unregister_region"):
            real = getattr(n.world.engine, name)

            def noted(*arguments: object, name: str = name, real: Callable[..., None] = real) -> None:
                threads[name] = threading.get_ident()
                real(*arguments)

            monkeypatch.setattr(n.world.engine, name, noted)
        await n.lifecycle.close(await n.session(), "test")
        assert set(threads) == {"register_region", "unregister_region"}
        assert threading.get_ident() not in threads.values()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_job_is_over_before_the_next_of_its_name_opens_files() -> None:
    async def run() -> None:
        n = node()
        first = await n.session()
        ending = asyncio.create_task(n.lifecycle.close(first, "test"))
        await n.forgotten.get()
        await n.session()
        assert n.files[0].removed
        assert len(n.files) == 2
        await ending

    asyncio.run(asyncio.wait_for(run(), 20))


def test_files_that_are_slow_to_remove_hold_up_the_next_job_of_their_name_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS_MAX", 20)

    async def run() -> None:
        n = node()
        first = await n.session("slow")
        may_go = n.files[0].may_go = threading.Event()
        try:
            ending = asyncio.create_task(n.lifecycle.close(first, "test"))
            assert await asyncio.to_thread(n.files[0].removing.wait, 20)
            again = asyncio.create_task(n.session("slow"))
            # Asked later, served now: opened, and removed.
            await n.lifecycle.close(await n.session("other"), "test")
            assert n.files[1].removed
            await n.session("third")
            assert not again.done()
            assert len(n.files) == 3
        finally:
            may_go.set()
        await again
        assert n.files[0].removed
        assert len(n.files) == 4
        await ending

    asyncio.run(asyncio.wait_for(run(), 20))


def test_many_jobs_that_are_slow_to_remove_leave_threads_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS_MAX", 20)

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(module.REMOVALS_AT_ONCE + 1))
        n = node()
        sessions = [await n.session(f"slow{number}") for number in range(6)]
        may_go = threading.Event()
        for files in n.files:
            files.may_go = may_go
        try:
            ending = [asyncio.create_task(n.lifecycle.close(session, "test")) for session in sessions]
            for _ in sessions:
                await n.forgotten.get()
            await n.session("other")
            assert sum(files.removing.is_set() for files in n.files) <= module.REMOVALS_AT_ONCE
        finally:
            may_go.set()
        await asyncio.gather(*ending)
        assert await n.lifecycle.close(await n.session("slow5"), "test")
        assert all(files.removed for files in n.files[:6])

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_plan_is_made_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        n = node()
        session = await n.session()
        await n.lifecycle.register(session, [ShardSpec("a", "float32", 4 * PAGE_BYTES, "param")])
        threads: set[int] = set()
        resolve = n.world.store.resolve

        def noted(*arguments: int) -> TileKey | None:
            threads.add(threading.get_ident())
            return resolve(*arguments)

        monkeypatch.setattr(n.world.store, "resolve", noted)
        await n.lifecycle.plan(session, [0] * 4, range(4), [0] * 4, 1)
        assert threading.get_ident() not in threads
        queue = n.world.scheduler.queue(session.id)
        assert queue is not None
        assert [key[1] for key in queue.plan.entries] == [0, 1, 2, 3]
        with pytest.raises(OffloadError, match="there is no shard 0 tile 9"):
            await n.lifecycle.plan(session, [0], [9], [0], 1)

    asyncio.run(asyncio.wait_for(run(), 20))
