"""Memory and swap files that grow while they are closed, or cannot grow: nothing of them stays."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from offloadd.core.errors import Code, OffloadError
from offloadd.core.units import MIB
from offloadd.io.swapfiles import SwapFiles, SwapPath
from offloadd.session.arena import Arena


def open_files() -> set[str]:
    return {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }


def close_during(monkeypatch: pytest.MonkeyPatch, grow: Callable[[], object], close: Callable[[], None]) -> object:
    """Close in one thread while `grow` allocates in another; what `grow` returned."""
    allocate = os.posix_fallocate
    growing, closing, go_on = threading.Event(), threading.Event(), threading.Event()

    def held_up(descriptor: int, offset: int, length: int) -> None:
        growing.set()
        assert go_on.wait(20)
        allocate(descriptor, offset, length)

    def close_now() -> None:
        closing.set()
        close()

    monkeypatch.setattr(os, "posix_fallocate", held_up)
    grown: list[object] = []
    threads = [threading.Thread(target=lambda: grown.append(grow())), threading.Thread(target=close_now)]
    threads[0].start()
    assert growing.wait(20)
    threads[1].start()
    assert closing.wait(20)
    go_on.set()
    for thread in threads:
        thread.join(20)
    monkeypatch.undo()
    return grown[0]


def test_an_arena_closed_while_it_grows_leaves_no_descriptor_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena("closing")
    watched = os.dup(arena.descriptor)
    region = close_during(monkeypatch, lambda: arena.grow(4 * MIB), arena.close)
    assert os.fstat(watched).st_blocks * 512 >= 4 * MIB
    region.close()  # type: ignore[attr-defined]
    assert os.fstat(watched).st_blocks == 0
    os.close(watched)
    assert not [name for name in open_files() if "offloadd-closing" in name]
    assert "offloadd-closing" not in Path("/proc/self/maps").read_text()
    with pytest.raises(OffloadError) as caught:
        arena.grow(MIB)
    assert caught.value.code is Code.STALE_SESSION


def test_swap_files_closed_while_they_grow_leave_no_descriptor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = SwapPath(str(tmp_path))
    files = SwapFiles([path], None)
    close_during(monkeypatch, lambda: files.grow(0, MIB), files.close)
    path.close()
    assert not [name for name in open_files() if str(tmp_path) in name]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_memory_refused_half_way_is_given_back_and_the_arena_goes_on(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    arena = Arena("refused")
    allocate = os.posix_fallocate

    def half(descriptor: int, offset: int, length: int) -> None:
        allocate(descriptor, offset, length // 2)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", half)
        with pytest.raises(OffloadError) as caught:
            arena.grow(4 * MIB)
    assert caught.value.code is Code.NO_HOST_BUDGET
    assert os.fstat(arena.descriptor).st_blocks == 0
    assert "offloadd-refused" not in Path("/proc/self/maps").read_text()
    arena.grow(MIB).close()
    arena.close()
