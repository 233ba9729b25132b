"""Cleans up after a private daemon that was killed.

Swap files have no names, so they vanish with the process; the directory with sockets and log does not. Before the
daemon does anything else it forks this small process, which holds one end of a pipe, waits for the other end to close,
removes the directory and ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal


def watch(directory: str) -> None:
    """Fork the guardian. Call before any thread is started and any other descriptor is opened."""
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(read_end)  # the write end stays open until this process ends, however it ends
        return
    os.close(write_end)
    # A Ctrl-C or a stopping daemon's signals must not end the one who cleans up.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.chdir("/")
        os.closerange(0, read_end)
        os.closerange(read_end + 1, 256)
        while os.read(read_end, 1):
            pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)
