"""Finding, fetching and verifying a checkout, on small repositories made here: no network, no KernelBench."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kbsub.adapters import checkout as module
from kbsub.adapters.checkout import CheckoutError, CheckoutMissing, fetch, find_checkout, verify
from kbsub.adapters.git import git, is_local, last_words

FILES = {
    "KernelBench/level1/40_LayerNorm.py": "features = 64\n",
    "src/kernelbench/eval.py": "def eval_kernel_against_ref(): ...\n",
    "src/kernelbench/utils.py": "x = 1\n",
    "crlf.txt": "a\r\nb\r\n",
}


def commit_all(folder: Path, message: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    git("-C", str(folder), "add", "--all")
    git("-C", str(folder), *who, "commit", "--quiet", "--message", message)
    return git("-C", str(folder), "rev-parse", "HEAD").decode().strip()


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """A plain repository of two commits; the first is the pin. The user cache is a folder of this test."""
    folder = tmp_path / "upstream"
    git("init", "--quiet", str(folder))
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    pin = commit_all(folder, "pinned")
    (folder / "src/kernelbench/utils.py").write_text("x = 2\n")
    later = commit_all(folder, "later")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KERNELBENCH_DIR", raising=False)
    monkeypatch.setattr(module, "PIN", pin)
    monkeypatch.setattr(verify, "__kwdefaults__", {"pin": pin})
    monkeypatch.setattr(fetch, "__kwdefaults__", {**fetch.__kwdefaults__, "pin": pin})
    return folder, pin, later


def left_over(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if "fetch-" in entry.name)


@pytest.mark.parametrize("kind", ["plain", "bare", "shallow", "file-url"])
def test_fetch_takes_any_kind_of_repository(upstream, tmp_path, kind):
    folder, pin, _ = upstream
    source = str(folder)
    if kind == "bare":
        git("clone", "--quiet", "--bare", source, str(tmp_path / "bare.git"))
        source = str(tmp_path / "bare.git")
    elif kind == "shallow":
        source = str(fetch(source, tmp_path / "shallow").checkout.path)
    elif kind == "file-url":
        source = folder.as_uri()
    done = fetch(source)
    assert (done.new, done.checkout.commit, done.checkout.path) == (True, pin, module.cache_folder().resolve())
    assert {name: (done.checkout.path / name).read_bytes().decode() for name in FILES} == FILES
    depth = git("-C", str(done.checkout.path), "rev-list", "--count", "HEAD").decode().strip()
    assert depth == "1", f"expected one commit, got {depth}"


def test_second_fetch_is_a_no_op(upstream):
    folder, _, _ = upstream
    first = fetch(str(folder))
    stamp = first.checkout.path.stat().st_mtime_ns
    second = fetch("/nowhere/at/all")  # not even asked
    assert (second.new, second.checkout, first.checkout.path.stat().st_mtime_ns) == (False, first.checkout, stamp)


def test_search_order(upstream, tmp_path, monkeypatch):
    folder, _, _ = upstream
    with pytest.raises(CheckoutMissing, match="kbsub fetch"):
        find_checkout()
    cached = fetch(str(folder)).checkout
    named = fetch(str(folder), tmp_path / "named").checkout
    explicit = fetch(str(folder), tmp_path / "explicit").checkout
    assert find_checkout() == cached
    monkeypatch.setenv("KERNELBENCH_DIR", str(named.path))
    assert find_checkout() == named
    assert find_checkout(explicit.path) == explicit


def test_a_wrong_named_checkout_is_not_passed_over(upstream, tmp_path, monkeypatch):
    folder, pin, later = upstream
    fetch(str(folder))
    monkeypatch.setenv("KERNELBENCH_DIR", str(folder))
    with pytest.raises(CheckoutError) as caught:
        find_checkout()
    assert pin in str(caught.value) and later in str(caught.value) and "KERNELBENCH_DIR" in str(caught.value)
    monkeypatch.setenv("KERNELBENCH_DIR", str(tmp_path / "absent"))
    with pytest.raises(CheckoutMissing, match="no such folder"):
        find_checkout()


def run_mend(error: CheckoutError) -> None:
    command = str(error).split("Mend it with: ")[1]
    subprocess.run(command, shell=True, check=True, capture_output=True, stdin=subprocess.DEVNULL)


def edit(tree: Path) -> None:
    (tree / "src/kernelbench/eval.py").write_text("def eval_kernel_against_ref(): return True\n")


def edit_hidden_from_the_index(tree: Path) -> None:
    git("-C", str(tree), "update-index", "--assume-unchanged", "src/kernelbench/eval.py")
    edit(tree)


def edit_and_stage(tree: Path) -> None:
    edit(tree)
    git("-C", str(tree), "add", "--all")


def delete(tree: Path) -> None:
    (tree / "src/kernelbench/eval.py").unlink()


def add_module(tree: Path) -> None:
    (tree / "src/torch.py").write_text("print('not torch')\n")


@pytest.mark.parametrize(
    "damage, named",
    [
        (edit, "src/kernelbench/eval.py"),
        (edit_hidden_from_the_index, "src/kernelbench/eval.py"),
        (edit_and_stage, "src/kernelbench/eval.py"),
        (delete, "src/kernelbench/eval.py"),
        (add_module, "src/torch.py"),
    ],
)
def test_a_difference_is_named_and_the_mending_command_mends_it(upstream, tmp_path, damage, named):
    folder, pin, _ = upstream
    tree = fetch(str(folder), tmp_path / "a tree").checkout.path
    damage(tree)
    with pytest.raises(CheckoutError) as caught:
        verify(tree, origin="--kernelbench")
    assert named in str(caught.value) and "utils.py" not in str(caught.value)
    run_mend(caught.value)
    assert verify(tree, origin="--kernelbench").commit == pin


def test_files_that_upstream_scripts_write_are_no_difference(upstream, tmp_path):
    folder, pin, _ = upstream
    tree = fetch(str(folder), tmp_path / "tree").checkout.path
    for name in ("runs/a/level_1_problem_40_sample_0_kernel.py", "cache/x.o", "src/kernelbench/__pycache__/eval.pyc"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("")
    assert verify(tree, origin="--kernelbench").commit == pin


def test_a_damaged_cache_is_replaced_and_a_damaged_folder_of_the_user_is_not(upstream, tmp_path):
    folder, pin, _ = upstream
    edit(fetch(str(folder)).checkout.path)
    done = fetch(str(folder))
    assert done.new and "src/kernelbench/eval.py" in (done.replaced or "")
    assert find_checkout().commit == pin
    mine = fetch(str(folder), tmp_path / "mine").checkout.path
    edit(mine)
    with pytest.raises(CheckoutError, match=r"eval\.py"):
        fetch(str(folder), mine)
    assert "return True" in (mine / "src/kernelbench/eval.py").read_text()


def test_a_folder_inside_another_repository_is_not_a_checkout(upstream):
    folder, _, _ = upstream
    git("-C", str(folder), "checkout", "--quiet", "HEAD~1")
    with pytest.raises(CheckoutError, match="not a usable git checkout"):
        verify(folder / "src", origin="--kernelbench")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root can give a folder to another user")
@pytest.mark.parametrize("as_url", [False, True], ids=["path", "file-url"])
def test_a_repository_of_another_user_is_read(upstream, tmp_path, as_url):
    folder, pin, _ = upstream
    for entry in [folder, *folder.rglob("*")]:
        os.chown(entry, 65534, 65534, follow_symlinks=False)
    tree = fetch(folder.as_uri() if as_url else str(folder), tmp_path / "tree").checkout.path
    os.chown(tree, 65534, 65534)
    os.chown(tree / ".git", 65534, 65534)
    assert verify(tree, origin="--kernelbench").commit == pin


def test_the_users_git_settings_change_no_byte(upstream, tmp_path, monkeypatch):
    folder, pin, _ = upstream
    hook = tmp_path / "hooks" / "post-checkout"
    hook.parent.mkdir()
    hook.write_text("#!/bin/sh\ntouch " + str(tmp_path / "hook-ran") + "\n")
    hook.chmod(0o755)
    config = tmp_path / "gitconfig"
    config.write_text(f"[core]\n\tautocrlf = true\n\thooksPath = {hook.parent}\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", str(folder / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert fetch(str(folder), tmp_path / "tree").checkout.commit == pin
    assert not (tmp_path / "hook-ran").exists()


@pytest.mark.parametrize(
    "source, said",
    [("absent-folder", "could not get commit"), ("other.git", "could not get commit")],
)
def test_a_failed_fetch_says_why_and_leaves_nothing(upstream, tmp_path, monkeypatch, source, said):
    monkeypatch.chdir(tmp_path)
    git("init", "--quiet", "--bare", "other.git")  # a repository without the commit
    with pytest.raises(CheckoutError, match=said) as caught:
        fetch(source)
    assert source in str(caught.value) and "kbsub fetch --from" in str(caught.value)
    assert left_over(module.cache_folder().parent) == [] and not module.cache_folder().exists()


def test_a_silent_server_is_given_up_on(upstream):
    """A server that accepts the connection and never answers: what a dead network looks like from here."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/KernelBench.git"
        began = time.monotonic()
        with pytest.raises(CheckoutError, match="no answer for 1 s"):
            fetch(url, silence_s=1.0)
        assert time.monotonic() - began < 5
    assert left_over(module.cache_folder().parent) == []


def test_the_default_patience_keeps_the_promise_of_20_seconds():
    assert module.SILENCE_S <= 18


def test_a_server_that_wants_a_password_is_not_answered(upstream):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(4):
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(65536)
                    peer.sendall(
                        b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm=x\r\n"
                        b"Content-Length: 0\r\nConnection: close\r\n\r\n"
                    )

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(CheckoutError, match="could not get commit"):
            fetch(f"http://127.0.0.1:{server.getsockname()[1]}/KernelBench.git", silence_s=5.0)


CHILD = """
import sys
from pathlib import Path
from kbsub.adapters import checkout
checkout.verify.__kwdefaults__["pin"] = sys.argv[3]
done = checkout.fetch(sys.argv[1], Path(sys.argv[2]), pin=sys.argv[3], silence_s=30, say=print)
print("new" if done.new else "there", flush=True)
"""


def start_fetch(source: str, target: Path, pin: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", CHILD, source, str(target), pin]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "kill"])
def test_an_interrupted_fetch_leaves_nothing_half_made(upstream, tmp_path, how):
    folder, pin, _ = upstream
    target = tmp_path / "home" / "tree"
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = start_fetch(f"http://127.0.0.1:{server.getsockname()[1]}/x.git", target, pin)
        peer, _ = server.accept()  # git is now waiting for an answer
        child.send_signal(how)
        child.communicate(timeout=20)
        peer.close()
    assert child.returncode != 0 and not target.exists()
    if how is signal.SIGINT:
        assert left_over(target.parent) == []
    assert fetch(str(folder), target).new
    assert left_over(target.parent) == []


def test_two_fetches_at_once_make_one(upstream, tmp_path):
    folder, pin, _ = upstream
    target = tmp_path / "home" / "tree"
    children = [start_fetch(str(folder), target, pin) for _ in range(3)]
    said = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], said
    assert sorted(out.split()[-1] for out, _ in said) == ["new", "there", "there"]
    assert verify(target, origin="--kernelbench").commit == pin


def test_a_folder_that_cannot_be_written_is_named(upstream, tmp_path):
    folder, _, _ = upstream
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckoutError, match=r"cannot write to .*--to FOLDER"):
        fetch(str(folder), blocked / "tree")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc: not on this machine")
def test_a_folder_that_takes_no_file_is_no_lock_that_is_held(upstream):
    with pytest.raises(CheckoutError, match=r"cannot write to /proc.*--to FOLDER"):
        fetch(str(upstream[0]), Path("/proc/x"))


def test_a_file_is_not_a_folder_that_is_missing(upstream, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckoutError, match=r"is a file, not a folder") as found:
        fetch(str(upstream[0]), tmp_path / "file")
    assert not isinstance(found.value, CheckoutMissing)


def test_without_git_the_way_out_is_git_and_not_another_checkout(upstream, monkeypatch):
    fetch(str(upstream[0]))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CheckoutError, match=r"git is not on PATH; install it") as found:
        find_checkout()
    assert "kbsub fetch" not in str(found.value)


@pytest.mark.parametrize(
    "source, local",
    [
        ("https://example.org/x.git", False),
        ("git@example.org:x.git", False),
        ("/srv/x.git", True),
        ("x/y:z", True),
        ("../x", True),
    ],
)
def test_is_local(source, local):
    assert is_local(source) is local


def test_last_words_drop_progress_and_keep_the_reason():
    stderr = b"remote: Counting 1/2\rremote: Counting 2/2\nfatal: couldn't find remote ref\nhint: try x\n"
    assert last_words(stderr) == "fatal: couldn't find remote ref"


@pytest.mark.kernelbench
def test_the_real_checkout_holds_what_this_project_uses(kernelbench):
    for name in ("src/kernelbench/eval.py", "KernelBench/level1/40_LayerNorm.py", "scripts/run_and_check.py"):
        assert (kernelbench.path / name).is_file(), name
