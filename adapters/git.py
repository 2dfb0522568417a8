"""Runs git for checkout.py: no prompts, no hooks, no rewriting of bytes, no waiting on a dead network."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import time
from pathlib import Path

# git's own list of variables that would point it at another repository (`git rev-parse --local-env-vars`):
# a test run from inside a git hook has them set.
REPOSITORY_VARIABLES = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_GRAFT_FILE",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_REPLACE_REF_BASE",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
)
# safe.directory: a checkout that another user owns (a container, a shared disk) is fine, its bytes are verified.
# autocrlf, eol, attributes, hooks: nothing of the user's set-up may change a byte or run a program.
SETTINGS = {
    "safe.directory": "*",
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.attributesFile": os.devnull,
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "fetch.fsckObjects": "true",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "protocol.version": "2",  # serves any commit by its id
}
FLAGS = [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]


class GitError(RuntimeError):
    """git failed, was killed for silence, or is not installed. The text is what git said last."""


class GitMissing(GitError):
    """There is no git on this machine's PATH."""


def environment() -> dict[str, str]:
    """This process's environment, with every way git has of asking a question closed."""
    env = {name: value for name, value in os.environ.items() if name not in REPOSITORY_VARIABLES}
    return env | {
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "true",
        "SSH_ASKPASS": "true",
        "GCM_INTERACTIVE": "never",
        "GIT_SSH_COMMAND": os.environ.get("GIT_SSH_COMMAND", "ssh -oBatchMode=yes -oConnectTimeout=10"),
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "LC_ALL": "C",
    }


def git(*arguments: str, silence_s: float = 60.0) -> bytes:
    """What `git ARGUMENTS` printed on stdout. Raises GitError.

    `silence_s`: seconds without a byte of output (progress included) after which git and its helpers are killed.
    """
    program = shutil.which("git")
    if program is None:
        raise GitMissing("git is not on PATH; install it with your package manager")
    child = subprocess.Popen(
        [program, *FLAGS, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        start_new_session=True,  # no terminal to prompt on, and one group to kill: git-remote-https is a grandchild
    )
    try:
        out, err = _read(child, silence_s)
    except BaseException:
        _kill(child)
        raise
    if child.wait() != 0:
        raise GitError(last_words(err) or f"git {arguments[0]} exited with {child.returncode}")
    return out


def _read(child: subprocess.Popen[bytes], silence_s: float) -> tuple[bytes, bytes]:
    """Both streams of `child` until they close; GitError after `silence_s` seconds without a byte on either."""
    assert child.stdout is not None and child.stderr is not None
    streams = {child.stdout: bytearray(), child.stderr: bytearray()}
    with selectors.DefaultSelector() as selector, child.stdout, child.stderr:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        heard = time.monotonic()
        while selector.get_map():
            ready = selector.select(timeout=max(0.0, heard + silence_s - time.monotonic()))
            if not ready:
                raise GitError(f"no answer for {silence_s:g} s")
            heard = time.monotonic()
            for key, _ in ready:
                block = os.read(key.fd, 1 << 16)
                if block:
                    streams[key.fileobj] += block  # type: ignore[index]
                else:
                    selector.unregister(key.fileobj)
        return bytes(streams[child.stdout]), bytes(streams[child.stderr])


def _kill(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def last_words(stderr: bytes) -> str:
    """The lines of git's stderr that say what went wrong, on one line, without progress and hints."""
    lines = stderr.decode(errors="replace").replace("\r", "\n").splitlines()
    telling = [line.strip() for line in lines if line.startswith(("fatal:", "error:", "remote: error", "ssh:"))]
    return "; ".join(dict.fromkeys(telling)) or " ".join(lines[-1:]).strip()


def is_local(source: str) -> bool:
    """Whether `source` names a folder of this machine rather than a URL or an scp-like host:path."""
    return "://" not in source and (":" not in source.split("/")[0] or Path(source).exists())
