"""`python -m tests.restrict KIND... -- COMMAND`: run a command under a restriction that containers and users meet.

uring-eperm, uring-enosys: a seccomp filter answers io_uring_setup with that errno. memlock: 64 KiB of locked memory and
no CAP_IPC_LOCK, as an ordinary user has, also when started by root. tmpfs=OPTIONS:DIRECTORY: a file system of its own,
with those mount options, that only the command sees.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_IO_URING_SETUP = 425  # the same number on every architecture
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD_NR, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06


def refuse_io_uring(number: int) -> None:
    """Install the filter in this process and all it starts."""
    program = b"".join(
        struct.pack("<HBBI", *instruction)
        for instruction in (
            (_LOAD_NR, 0, 0, 0),
            (_JUMP_EQUAL, 0, 1, _IO_URING_SETUP),
            (_RETURN, 0, 0, _ERRNO | number),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 4, ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def main() -> None:
    split = sys.argv.index("--")
    command = sys.argv[split + 1 :]
    for kind in sys.argv[1:split]:
        if kind == "memlock":
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
            if os.getuid() == 0:
                command = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", *command]
        elif kind.startswith("tmpfs="):
            options, _, directory = kind.removeprefix("tmpfs=").partition(":")
            script = 'mount -t tmpfs -o "$1" none "$2" && shift 2 && exec "$@"'
            unshare = ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-rm"]
            command = [*unshare, "sh", "-c", script, "sh", options, directory, *command]
        else:
            refuse_io_uring(errno.EPERM if kind == "uring-eperm" else errno.ENOSYS)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
