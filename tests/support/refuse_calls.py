"""Runs a command on a machine that refuses some system calls: `python refuse_calls.py NAME,... COMMAND ...`.

"namespaces": unshare and clone3 with EPERM, as a container's seccomp filter does it; "landlock": ENOSYS, as a kernel
without it. By a filter of the kernel's own, so that nothing below can tell it from such a machine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

EPERM, ENOSYS = 1, 38
UNSHARE = {"x86_64": 272, "aarch64": 97}
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF: load a word, jump when equal, return
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
PR_SET_SECCOMP, FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38


def refuse(calls: dict[int, int]) -> None:
    """From here on, in this process and all it starts: system call number -> the error it ends with."""
    rows = [(LOAD, 0, 0, 0)]  # seccomp_data.nr
    for index, (number, error) in enumerate(calls.items()):
        rows += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | error)]
        assert index < 8
    rows.append((RETURN, 0, 0, ALLOW))
    program = b"".join(struct.pack("HBBI", *row) for row in rows)
    held = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(rows), ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    for option in ((PR_SET_NO_NEW_PRIVS, 1, 0), (PR_SET_SECCOMP, FILTER, header)):
        if libc.prctl(option[0], ctypes.c_ulong(option[1]), option[2], 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "this machine takes no seccomp filter")


def main() -> None:
    names, command = sys.argv[1].split(","), sys.argv[2:]
    kinds = {"namespaces": {UNSHARE[platform.machine()]: EPERM}, "landlock": dict.fromkeys((444, 445, 446), ENOSYS)}
    refuse({number: error for name in names for number, error in kinds[name].items()})
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
