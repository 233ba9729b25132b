"""The attach socket: a connection that cannot be served leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from offloadd.core.errors import ConfigError
from offloadd.session.attach import AttachServer


def server(path: Path) -> AttachServer:
    return AttachServer(str(path), lambda secret, peer: (0, 0, 0, 0), lambda ticket: None, lambda peer: True)


def test_a_connection_that_cannot_be_watched_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        attach = server(tmp_path / "a")
        attach.start(0o600)
        loop = asyncio.get_running_loop()
        real = loop.add_reader
        refused = asyncio.Event()

        def add_reader(watched: Any, callback: Any, *arguments: Any) -> None:
            if isinstance(watched, int):  # the pidfd
                refused.set()
                raise OSError(errno.ENOSPC, "No space left on device")
            real(watched, callback, *arguments)

        monkeypatch.setattr(loop, "add_reader", add_reader)
        before = set(os.listdir("/proc/self/fd"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(tmp_path / "a"))
            await asyncio.wait_for(refused.wait(), 10)
            client.settimeout(10)
            assert client.recv(1) == b""
        assert set(os.listdir("/proc/self/fd")) == before
        attach.close()

    asyncio.run(run())


@pytest.mark.parametrize("what", ["file", "directory"])
def test_what_is_not_a_socket_is_never_removed(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a"
    if what == "file":
        path.write_text("mine")
    else:
        path.mkdir()

    async def run() -> None:
        server(path).start(0o600)

    with pytest.raises(ConfigError, match=rf"{path} is there and is not a socket"):
        asyncio.run(run())
    assert path.exists()
