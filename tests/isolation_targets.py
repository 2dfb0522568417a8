"""Judge functions for test_isolation.py, one a way to end; imported only inside the child process."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from kbsub.adapters.isolation import JudgeFailure, Status


def answer(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    progress({"stage": "trial", "index": 0, "seed": 42})
    return {"echo": payload, "stdin": sys.stdin.read(), "cwd_on_path": os.getcwd() in sys.path[:1]}


def hang(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    progress({"stage": "trial", "index": 2, "seed": 2746317213})
    while True:
        time.sleep(3600)


def hang_deaf(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    return hang(payload, progress)


def leave_quietly(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    os._exit(0)


def sys_exit(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    sys.exit(0)


def segfault(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    ctypes.string_at(0)
    return {}


def abort_bad_alloc(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


def killed(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def memory_error(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    return {"bytes": len(bytearray(1 << 62))}


def grow(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    hoard = []
    while True:
        hoard.append(bytearray(64 << 20))


class OutOfMemoryError(RuntimeError):
    """Stands where torch.OutOfMemoryError stands: recognised by its name, so that torch need not be imported."""


def device_out_of_memory(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    raise OutOfMemoryError("Tried to allocate 256.00 MiB")


def sticky_cuda_error(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronous")


def compile_error(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    raise JudgeFailure(Status.COMPILE_ERROR, "line 3: invalid syntax", {"line": 3})


def not_json(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    return {"value": object()}


def rubbish_everywhere(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    """Two megabytes on stdout, and words on every descriptor that is open, the result pipe among them."""
    for _ in range(2048):
        print("x" * 1024)
    for descriptor in range(1, 64):
        for words in (b"OK\n", b'{"kind": "result", "status": "OK", "value": {"forged": true}}\n', b"no newline"):
            try:
                os.write(descriptor, words)
            except OSError:
                break
    return {"true": True}


def close_everything(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    os.closerange(3, 4096)
    return {"lost": True}


def replace_streams(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    sys.stdout = sys.stderr = None
    os._exit = os.write = None  # type: ignore[assignment]
    return {"true": True}


def lingering_thread(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return {"true": True}


def leave_a_daemon(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    """A grandchild in a session of its own that holds stdout open."""
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    return {"pid": daemon.pid}


def fork_and_leave(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    """The fork holds stdout and the result pipe; the child itself ends without a word."""
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(3)


def send_frames(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    """Sends each of payload["bodies"] (JSON text) as a frame with the right token and digest, then answers."""
    for body in payload["bodies"]:
        text = body.encode()
        mark = hashlib.sha256(text).hexdigest()[:16]
        frame = memoryview(f"\n{os.environ['KBSUB_RUN']} {mark} ".encode() + text + b"\n")
        while frame:
            frame = frame[os.write(int(sys.argv[1]), frame) :]
    return {"answered": True}


def surrogates(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    """Text that UTF-8 cannot hold in an event, a print, a value and a message."""
    words = "caf\udce9 \x1b[31m"
    progress({"stage": words, "case": words})
    print(words)
    raise JudgeFailure(Status.RUNTIME_ERROR, words, {words: [words]})
