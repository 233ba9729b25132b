"""The daemon's side of a ring: what it opens it closes, even half-way."""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

import pytest

from offloadd.core.clock import ManualClock
from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import Reply
from offloadd.ring.shared import RingEndpoint
from offloadd.wire.layout import RING_ENTRIES


def endpoint() -> RingEndpoint:
    return RingEndpoint(7, 1, lambda shard, tile: None, ManualClock(0))


@pytest.mark.parametrize(("module", "name"), [(os, "eventfd"), (os, "posix_fallocate"), (mmap, "mmap")])
def test_a_ring_that_cannot_be_made_closes_what_it_had(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    real = getattr(module, name)
    calls: list[object] = []

    def second_fails(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 1 or name != "eventfd":
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*arguments)

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(module, name, second_fails)
    with pytest.raises(OffloadError, match=r"cannot make a ring for session 7: Too many open files; raise") as caught:
        endpoint()
    assert caught.value.code is Code.UNAVAILABLE
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_client_that_never_reaps_is_told_what_where_and_how_much() -> None:
    ring = endpoint()
    ring.post([Reply(7, number, Code.OK) for number in range(RING_ENTRIES)])
    with pytest.raises(
        OffloadError, match=rf"session 7 has left all {RING_ENTRIES} completions .*unread.* 3 more .* reap"
    ):
        ring.post([Reply(7, number, Code.OK) for number in range(3)])
    ring.close()
