"""The mounts of a cell: read-only but for private folders, a /dev without disks, the system's /proc held.

Part of the launcher, which loads it by its path before anything is entered: it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import stat
import struct
from typing import Any

HIDDEN = ("/tmp", "/run", "/dev")  # replaced: /run has the sockets of daemons (docker), /dev the raw disks
# What is laid back into the new /dev and /run, where it exists. CUDA needs the nvidia devices; NixOS and the GPU
# operator keep the driver's libraries below /run.
DEVICES = ("null", "zero", "full", "random", "urandom", "nvidia*", "nvidia-caps/*", "nvhost*", "nvmap", "dxg")
KEPT_RUN = ("/run/opengl-driver", "/run/current-system", "/run/nvidia")
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 4096, 8192, 16384, 1 << 18
MOUNT_SETATTR, AT_RECURSIVE, AT_FDCWD, ATTR_RDONLY = 442, 0x8000, -100, 1
LOCKED_OPTIONS = {
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
}

Spec = dict[str, Any]
libc = ctypes.CDLL(None, use_errno=True)


class CannotEnter(Exception):
    """A step that this machine refuses, in words."""


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise CannotEnter(f"{what}: {os.strerror(number)}")
    return result


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    checked(libc.mount(*texts, ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def lay_mounts(spec: Spec) -> list[str]:
    """Every mount read-only but the private ones. Returns what could not be had, in words."""
    lacks: list[str] = []
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    writable = [os.path.realpath(path) for path in spec["writable"]]
    readable = [os.path.realpath(path) for path in spec["readable"]] + [path for path in KEPT_RUN if is_there(path)]
    wanted = sorted({path for path in readable + writable if inside(path, HIDDEN)} | set(writable), key=len)
    devices = [path for name in DEVICES for path in sorted(glob.glob(f"/dev/{name}")) if is_device(path)]
    held = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in wanted if is_there(path)}
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    lay_devices(devices)
    if os.path.isdir("/run") and not os.path.islink("/run"):
        mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for path, descriptor in held.items():
        make_mountpoint(path, stat.S_ISDIR(os.fstat(descriptor).st_mode))
        mount(f"/proc/self/fd/{descriptor}", path, None, MS_BIND | MS_REC)
        os.close(descriptor)
    try:
        if "proc" in spec.get("refuse", []):
            raise CannotEnter("mount /proc: refused (simulated)")
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except CannotEnter as error:  # a container that masks parts of /proc may not mount it anew
        lacks.append(f"a /proc of its own ({error})")
    # Nobody inside makes namespaces of his own, where he would have capabilities again.
    with contextlib.suppress(OSError):
        write_file("/proc/sys/user/max_user_namespaces", "0")
    hold_the_systems_proc()
    make_read_only([*writable, "/tmp", "/dev/shm", "/proc"], at_once="mount_setattr" not in spec.get("refuse", []))
    with contextlib.suppress(OSError):
        os.chdir(spec["cwd"])  # by its path: the old working directory may be in a place that is now hidden
        return lacks
    os.chdir("/")
    return lacks


def hold_the_systems_proc() -> None:
    """A mount of its own for every entry of /proc that is no process, so that it is read-only with all the others.

    /proc itself stays writable: CUDA's cuInit ends with error 304 where it is not (H200, driver 580). A process that is
    root outside could otherwise write /proc/sys/kernel/core_pattern without any capability: its uid is enough.
    """
    for name in os.listdir("/proc"):
        path = f"/proc/{name}"
        if not name.isdecimal() and not os.path.islink(path):
            mount(path, path, None, MS_BIND)


def lay_devices(devices: list[str]) -> None:
    """A /dev that has the harmless devices and the GPU's, and no disk: a read-only mount does not protect a device."""
    staging = os.path.join(HIDDEN[0], "dev")  # below the new /tmp, before anybody else is there
    os.mkdir(staging)
    mount("tmpfs", staging, "tmpfs", MS_NOSUID, "mode=755,size=1m")
    for path in devices:
        place = staging + path.removeprefix("/dev")
        make_mountpoint(place, directory=False)
        mount(path, place, None, MS_BIND)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{staging}/{name}")
    os.mkdir(f"{staging}/shm")
    mount("tmpfs", f"{staging}/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    mount(staging, "/dev", None, MS_MOVE)
    os.rmdir(staging)


def make_read_only(writable: list[str], at_once: bool) -> None:
    """One system call for all where the kernel has it (5.12), else mount by mount."""
    if at_once and set_attributes("/", AT_RECURSIVE, ATTR_RDONLY, 0):
        for path in writable:
            if not set_attributes(path, 0, 0, ATTR_RDONLY):
                raise CannotEnter(f"{path} cannot be made writable: {os.strerror(ctypes.get_errno())}")
        return
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        rows = [line.split() for line in table]
    for row in rows:
        path = row[4].encode("utf-8", "surrogateescape").decode("unicode_escape")
        if path in writable:
            continue
        flags = sum(LOCKED_OPTIONS.get(option, 0) for option in row[5].split(","))
        try:
            mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
        except CannotEnter:
            with contextlib.suppress(OSError):  # one that is hidden below another cannot be reached, nor by anybody
                if not os.statvfs(path).f_flag & os.ST_RDONLY:
                    raise


def set_attributes(path: str, flags: int, to_set: int, to_clear: int) -> bool:
    attributes = struct.pack("QQQQ", to_set, to_clear, 0, 0)
    return bool(libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, len(attributes)) == 0)


# ---- files ----


def write_file(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def inside(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def is_there(path: str) -> bool:
    return os.path.lexists(path)


def is_device(path: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISCHR(os.stat(path).st_mode)
    return False


def make_mountpoint(path: str, directory: bool) -> None:
    if os.path.lexists(path):
        return
    os.makedirs(path if directory else os.path.dirname(path), mode=0o755, exist_ok=True)
    if not directory:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
