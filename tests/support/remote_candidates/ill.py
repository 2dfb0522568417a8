"""A candidate that does not answer: what it does instead is in its `forward`'s second argument."""

import array
import ctypes
import gc
import json
import os
import signal
import socket
import struct
import sys
import time

import torch
import torch.nn as nn


def put(body, fds=()):
    link = socket.socket(fileno=os.dup(int(sys.argv[1])))
    link.setblocking(True)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    link.sendmsg([struct.pack(">I", len(body)) + body], rights)


def reply(fds=(), **changes):
    """The reply of an honest call, but for `changes`."""
    facts = {
        "type": "Tensor",
        "device": "cpu",
        "layout": "torch.strided",
        "requires_grad": False,
        "aliases_input": False,
    }
    told = {
        "dtype": "float32",
        "shape": [6, 8],
        "strides": [8, 1],
        "offset": 0,
        "handle": None,
        "number": None,
        "copied": False,
    }
    block = {"number": 77, "fresh": True, **changes.pop("block", {})}
    whole = {"value": {"tensor": 0}, "tensors": [{**told, **changes, "facts": facts}], "block": block, "error": None}
    put(json.dumps(whole).encode(), fds)
    time.sleep(60)


def memory_file(size, seals=True):
    import fcntl

    file = os.memfd_create("mine", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    if seals:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return file


def pipe_end():
    return os.pipe()[0]


WAYS = {
    "hangs": lambda: time.sleep(3600),
    "exits": lambda: os._exit(0),
    "segfault": lambda: ctypes.string_at(0),
    "aborts": os.abort,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "rubbish": lambda: put(b"\x80\x04rubbish"),
    "huge": lambda: os.write(int(sys.argv[1]), b"\x7f\xff\xff\xff"),
    "no frame at all": lambda: os.close(int(sys.argv[1])) or os._exit(0),
    "floods": lambda: [os.write(2, b"x" * 65536) for _ in range(2000)] and os._exit(3),
    "lying shape": lambda: reply([memory_file(192)], shape=[600, 8]),
    "lying strides": lambda: reply([memory_file(192)], strides=[1 << 40, 1]),
    "negative offset": lambda: reply([memory_file(192)], offset=-8),
    "endless shape": lambda: reply([memory_file(192)], shape=[1 << 62, 1 << 62], strides=[0, 0]),
    "unknown dtype": lambda: reply([memory_file(192)], dtype="__class__"),
    "truncated file": lambda: reply([memory_file(100)]),
    "unsealed file": lambda: reply([memory_file(192, seals=False)]),
    "a pipe": lambda: reply([pipe_end()]),
    "no file": lambda: reply(),
    "another block": lambda: reply(block={"fresh": False}),
    "three files": lambda: reply([memory_file(192)] * 3),
}


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x, way):
        WAYS[way]()
        time.sleep(60)

    def find(self, x, mark):
        """Every float tensor of the process, and all readable memory, searched for the mark of the judge's truth."""
        found = [1 for each in gc.get_objects() if isinstance(each, torch.Tensor) and (each == mark).any()]
        needle = struct.pack("<f", mark) * 4
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
            for line in maps:
                span, rights = line.split()[:2]
                start, end = (int(each, 16) for each in span.split("-"))
                if rights[0] != "r" or "[v" in line:
                    continue
                try:
                    memory.seek(start)
                    data = memory.read(end - start)
                except (OSError, OverflowError, ValueError):
                    continue
                at = data.find(needle)
                while at >= 0:  # the needle itself lies in memory, too: a longer run is the judge's
                    if all(data[at + more : at + more + 16] == needle for more in range(16, 128, 16)):
                        found.append(2)
                    at = data.find(needle, at + 1)
                del data
        parents = []
        for pid in os.listdir("/proc"):
            if pid.isdecimal() and int(pid) != os.getpid():
                try:
                    open(f"/proc/{pid}/mem", "rb").close()
                    parents.append(pid)
                except OSError:
                    pass
        return len(found), len(parents)
