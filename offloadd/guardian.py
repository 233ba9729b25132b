"""Cleans up after a private daemon that was killed.

Swap files have no names, so they vanish with the process; the job's directory with sockets and log does not. Before the
daemon does anything else it forks this small process, which holds one end of a pipe, waits for the other end to close,
removes the directory and ends. A daemon that crashes sends its last words through the pipe: they are added to the log,
and the directory stays until the next start takes it away.
"""

from __future__ import annotations

import contextlib
import os
import signal

from offloadd import jobdir

_WORDS_BYTES = 65536


def watch(directory: str, descriptor: int) -> int:
    """Fork the guardian of `directory`, which `descriptor` has locked. Call before any thread is started. Returns where
    to write last words: whatever is written there keeps the log."""
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(read_end)  # the write end stays open until this process ends, however it ends
        return write_end
    os.close(write_end)
    # A Ctrl-C or a stopping daemon's signals must not end the one who cleans up.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    crashed = False
    with contextlib.suppress(OSError):
        os.chdir("/")
        _close_all_but(read_end, descriptor)
        while words := os.read(read_end, _WORDS_BYTES):
            crashed = True
            jobdir.add_to_log(descriptor, words)
    if not crashed:
        jobdir.remove(descriptor, directory)
    os._exit(0)


def _close_all_but(*kept: int) -> None:
    """What the starter passed on, such as the pipe by whose end it learns of a crash, is the daemon's alone."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))
