"""Enters a cell, executes a command in it and ends as that ended. Run as a file: `python -I -S launcher.py SPEC`.

It is a program of its own because a process with threads cannot enter namespaces: it imports no package, enters, and
only then becomes the child that imports torch. SPEC is the JSON that kbsub.eval.process.cell writes. Must not know
what the command is. What cannot be entered ends it with CANNOT_ENTER: it never runs the command in a weaker cell.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import importlib.util
import json
import os
import resource
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

CANNOT_ENTER = 98  # exit code
CLONE_FLAGS = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "pid": 0x20000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "net": 0x40000000,
}
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECUREBITS = 1, 4, 24, 28
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
SECUREBITS = 0xEF  # uid 0 gains nothing by exec or setuid, no ambient capabilities; all of it locked
REPORT: list[int] = []  # the descriptor that tells the caller what was entered; no command ever holds it
MAX_PROCESSES = 16384  # in namespaces, where the count is the cell's own

Spec = dict[str, Any]


def sibling(name: str) -> Any:
    """A module beside this file: Python runs isolated here, and has no path to it."""
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    )
    assert spec is not None and spec.loader is not None  # a file of this folder
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from kbsub.eval.process import mounts
else:
    mounts = sibling("mounts")
CannotEnter, checked, write_file, libc = mounts.CannotEnter, mounts.checked, mounts.write_file, mounts.libc


def prctl(option: int, *values: int) -> int:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return int(libc.prctl(option, *padded))


# ---- namespaces ----


def in_namespaces(spec: Spec) -> NoReturn:
    """The outer process: makes the namespaces, forks their init, and ends as the command ended."""
    uid, gid = os.geteuid(), os.getegid()
    refused = spec.get("refuse", [])
    if "unshare" in refused:
        raise CannotEnter("unshare user namespace: refused (simulated)")
    checked(libc.unshare(CLONE_FLAGS["user"]), "unshare user namespace")
    # One identity, mapped to itself: the files of others belong to nobody.
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        write_file(f"/proc/self/{name}", text)
    rest = [name for name in CLONE_FLAGS if name != "user"]
    checked(libc.unshare(sum(CLONE_FLAGS[name] for name in rest)), f"unshare {', '.join(rest)} namespaces")
    die_with(spec["parent"], signal.SIGKILL)  # again: gaining capabilities cleared it
    receive, send = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(receive)
        guarded(lambda: initialise(spec, receive_gone(send), send))
    os.close(send)
    close_report()
    forward(signal.SIGUSR1, init)
    forward(signal.SIGUSR2, init)
    signal.signal(signal.SIGTERM, lambda *_: kill(init, signal.SIGKILL))
    data = os.read(receive, 4)
    os.waitpid(init, 0)  # returns when everything in the namespace has ended
    end_as(struct.unpack("<i", data)[0] if len(data) == 4 else -signal.SIGKILL)


def receive_gone(send: int) -> Callable[[], bool]:
    """Whether the outer process has gone: nobody holds the other end of the pipe."""
    import select

    def gone() -> bool:
        poll = select.poll()
        poll.register(send, 0)
        return bool(poll.poll(0))

    return gone


def initialise(spec: Spec, outer_gone: Callable[[], bool], status: int) -> NoReturn:
    """Process 1 of the new pid namespace: lays the mounts, gives everything up, starts the command, reaps."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if outer_gone():
        os._exit(CANNOT_ENTER)
    lacks = mounts.lay_mounts(spec)
    with contextlib.suppress(OSError), socket.socket() as any_socket:  # loopback up, as programs expect it
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH22x", b"lo", 0x41))
    libc.sethostname(b"cell", 4)
    drop_everything()
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
    prctl(PR_SET_DUMPABLE, 0)  # not to be traced by what it starts
    child = os.fork()
    if child == 0:
        os.close(status)
        guarded(lambda: run(spec, lacks))
    close_report()
    forward(signal.SIGUSR1, child)
    # Everybody at once: the kernel lets no fork slip through, as it does between two looks at /proc from outside.
    signal.signal(signal.SIGUSR2, lambda *_: kill(-1, signal.SIGSTOP))
    code = reap_until(child)
    os.write(status, struct.pack("<i", code))
    os._exit(0)  # and the kernel ends whatever is left


def drop_everything() -> None:
    """No capability, none to be gained."""
    checked(prctl(PR_SET_SECUREBITS, SECUREBITS), "securebits")
    number = 0
    while prctl(PR_CAPBSET_DROP, number) == 0:
        number += 1
    prctl(PR_CAP_AMBIENT, 4)
    checked(libc.capset(struct.pack("<Ii", 0x20080522, 0), bytes(24)), "capset")
    checked(prctl(PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")


# ---- Landlock, and no confinement ----


def under_supervision(spec: Spec, confine: Callable[[Spec], list[str]]) -> NoReturn:
    """The outer process of a cell without namespaces: every orphan becomes its child, and ends with the command."""
    checked(prctl(PR_SET_CHILD_SUBREAPER, 1), "subreaper")
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # there is no word to all at once here
    # A signal that can be handled: whoever goes by SIGKILL leaves its children behind.
    signal.signal(signal.SIGTERM, lambda *_: give_up())
    die_with(spec["parent"], signal.SIGTERM)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        guarded(lambda: run(spec, confine(spec)))
    close_report()
    forward(signal.SIGUSR1, child)
    code = reap_until(child)
    kill_descendants()
    for path in spec["scratch"]:
        shutil.rmtree(path, ignore_errors=True)
    end_as(code)


def landlock(spec: Spec) -> list[str]:
    """Writing only below the writable folders and to harmless devices; no TCP; no signal to anybody outside."""
    version = libc.syscall(444, None, 0, 1)
    if version < 1 or "landlock" in spec.get("refuse", []):
        raise CannotEnter("this kernel has no Landlock")
    bits = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    read = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, read a folder: allowed everywhere
    handled = ((1 << bits) - 1) & ~read
    network = 3 if version >= 4 else 0
    scopes = 3 if version >= 6 else 0
    attributes = struct.pack("QQQ", handled, network, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = checked(libc.syscall(444, attributes, len(attributes), 0), "landlock ruleset")
    of_a_file = handled & (1 << 1 | 1 << 14 | 1 << 15)  # write, truncate, ioctl
    devices = [path for name in mounts.DEVICES for path in glob.glob(f"/dev/{name}") if mounts.is_device(path)]
    for path, access in [(path, handled) for path in spec["writable"]] + [(path, of_a_file) for path in devices]:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("<Qi", access, place)
        checked(libc.syscall(445, ruleset, 1, rule, 0), f"landlock rule for {path}")
        os.close(place)
    checked(prctl(PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
    if os.geteuid() == 0:
        with contextlib.suppress(CannotEnter):
            drop_everything()
    checked(libc.syscall(446, ruleset, 0), "landlock")
    os.close(ruleset)
    missing = {3: "truncating files", 4: "TCP", 5: "device ioctls", 6: "signals and abstract sockets"}
    return [
        *(f"{what} (Landlock ABI {version}, needs {least})" for least, what in missing.items() if version < least),
        "priority, affinity and limits of the user's other processes",
        "modes, owners and times of the user's files",
        "UDP and sockets that have a path",
        "a /tmp and a /dev/shm of its own (it has a private TMPDIR)",
    ]


def unconfined(spec: Spec) -> list[str]:
    checked(prctl(PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
    return ["files, signals, sockets and settings of the same user"]


def give_up() -> NoReturn:
    kill_descendants()
    end_as(-signal.SIGKILL)


def kill_descendants() -> None:
    """Every child, and the orphans that come up in its place, for 5 s at the most."""
    end = time.monotonic() + 5.0
    while time.monotonic() < end:
        for entry in os.listdir("/proc"):
            if entry.isdecimal() and parent_of(int(entry)) == os.getpid():
                kill(int(entry), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.002)


def parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


# ---- both ----


def run(spec: Spec, lacks: list[str]) -> NoReturn:
    """The innermost process: becomes the command; without one it says what this cell lacks."""
    if spec["command"] is None:
        print(json.dumps(lacks), flush=True)
        os._exit(0)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()  # kill(0, ...) of the command does not reach the launcher
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for folder in spec["folders"]:  # made in here: what somebody left in their place can mislead nobody outside
        with contextlib.suppress(OSError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
    report({"level": spec["level"], "lacks": lacks})
    os.execv(spec["command"][0], spec["command"])


def guarded(step: Callable[[], NoReturn]) -> NoReturn:
    """What a forked process does: `step`, and no way out of it into the code of its parent."""
    try:
        step()
    except BaseException as error:
        say(error)
    finally:
        os._exit(CANNOT_ENTER)


def say(error: BaseException) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"the cell cannot be entered: {error}\n".encode("utf-8", "replace"))
    report({"refused": str(error)[:300]})


def report(words: dict[str, Any]) -> None:
    """One line to the caller, from the process that is confined and has not yet become the command."""
    if REPORT:
        with contextlib.suppress(OSError):
            os.write(REPORT[0], json.dumps(words).encode() + b"\n")
        close_report()


def close_report() -> None:
    while REPORT:
        os.close(REPORT.pop())


def reap_until(child: int) -> int:
    """Wait for everybody until `child` has ended; its exit code, negative for a signal."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def end_as(code: int) -> NoReturn:
    """End as the command did, by its signal too, so that the parent's waitpid says the truth."""
    if code < 0:
        code = -code
        with contextlib.suppress(OSError, ValueError):
            signal.signal(code, signal.SIG_DFL)
        os.kill(os.getpid(), code)
        time.sleep(1)
        code = 128 + code
    os._exit(code)


def forward(number: int, pid: int) -> None:
    signal.signal(number, lambda *_: kill(pid, number))


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def die_with(parent: int, number: int) -> None:
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(CANNOT_ENTER)


def main() -> NoReturn:
    spec: Spec = json.loads(sys.argv[1])
    REPORT.extend([spec["report"]] if "report" in spec else [])
    die_with(spec["parent"], signal.SIGKILL)
    with contextlib.suppress(OSError):
        write_file("/proc/self/oom_score_adj", "1000")  # the first to be taken when memory runs out
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if spec.get("data_limit"):
        resource.setrlimit(resource.RLIMIT_DATA, (spec["data_limit"], spec["data_limit"]))
    try:
        if spec["level"] == "namespaces":
            in_namespaces(spec)
        under_supervision(spec, landlock if spec["level"] == "landlock" else unconfined)
    except BaseException as error:
        say(error)
        os._exit(CANNOT_ENTER)


if __name__ == "__main__":
    main()
