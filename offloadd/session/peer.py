"""Who is at the other end of a Unix socket, and whether that process still lives.

The pidfd, not the socket, says that a rank is gone: a forked data loader keeps the socket open. SO_PEERPIDFD works
across pid namespaces, where SO_PEERCRED shows pid 0.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

_SO_PEERPIDFD = 77  # Linux 6.5


@dataclass(slots=True)
class Peer:
    """Credentials taken when the peer connected. `pidfd` is -1 where the kernel gives none."""

    uid: int
    gid: int
    pid: int
    pidfd: int

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def peer_of(connection: socket.socket) -> Peer:
    """Credentials of a connected Unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        try:
            pidfd = os.pidfd_open(pid) if pid > 0 else -1
        except OSError:
            pidfd = -1
    return Peer(uid, gid, pid, pidfd)
