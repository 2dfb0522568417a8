"""Tries every way out that is no file of its own: mounts, shared memory, a daemon, somebody's memory, the network."""

import ctypes
import os
import socket
import subprocess
import sys

import torch.nn as nn

MARK, HOME = os.environ["CASE_MARK"], os.environ["CASE_RESULTS"]
RUN = int(open(os.environ["CASE_PID_FILE"]).read())
libc = ctypes.CDLL(None, use_errno=True)
done = []


def attempt(name, act):
    try:
        if act():
            done.append(name)
    except OSError:
        pass


def mounts():
    """Remount what is read-only, unmount it, change its attributes, lay something over it, or get capabilities anew."""
    for _ in range(2):
        for place in (HOME.encode(), b"/", b"/proc", b"/etc"):
            for flags in (32, 32 | 4096):  # MS_REMOUNT, with MS_BIND
                yield libc.mount(None, place, None, flags, None)
            yield libc.umount2(place, 2)
            if os.statvfs(place).f_flag & os.ST_RDONLY:
                yield libc.syscall(442, -100, place, 0, bytes(8) + b"\1" + bytes(23), 32)  # mount_setattr: not so
            yield libc.mount(b"none", place, b"tmpfs", 0, None)
        libc.unshare(0x10000000 | 0x00020000)  # once more with a user and a mount namespace of its own


def daemon():
    """A double fork with an empty environment and a session of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-c", f"import time; time.sleep(60) # {MARK}"], {})
        os._exit(0)
    os.wait()


attempt("mount", lambda: any(result == 0 for result in mounts()))
attempt("file beside the results", lambda: open(f"{HOME}/{MARK}", "w"))
attempt("link", lambda: os.link(f"{HOME}/result.json", f"{HOME}/{MARK}.link") is None)
attempt("mode", lambda: os.chmod(f"{HOME}/notes.txt", 0o777) is None)
attempt("memory of the run", lambda: open(f"/proc/{RUN}/mem", "r+b"))
attempt("environment of the run", lambda: open(f"/proc/{RUN}/environ", "rb").read())
attempt("core pattern", lambda: open("/proc/sys/kernel/core_pattern", "w"))
attempt("disk", lambda: any(os.open(f"/dev/{name}", os.O_WRONLY) for name in ("sda", "vda", "nvme0n1", "mem")))
attempt("network", lambda: socket.create_connection(("127.0.0.1", int(os.environ["CASE_PORT"])), 1))
attempt("signal", lambda: os.kill(RUN, 0) is None)
attempt("shared memory", lambda: open(f"/dev/shm/{MARK}", "w").write("x") and False)  # may be its own: see outside
attempt("temporary", lambda: open(f"/tmp/{MARK}", "w").write("x") and False)
attempt("daemon", daemon)
subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(60) # {MARK}"], start_new_session=True)
assert not done, f"reached: {', '.join(done)}"


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return self.ln(x)
