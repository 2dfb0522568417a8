"""Find, fetch and verify the pinned KernelBench checkout.

A checkout is used only when it *is* the pin: HEAD is the pinned commit, every tracked file has the bytes of that
commit, and nothing importable was added beside upstream's modules. Nothing of it is ever copied into this
repository. This module knows git and folders; it knows neither tasks nor candidates, and imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kbsub.adapters.git import GitError, GitMissing, git, is_local
from kbsub.adapters.pin import PIN, UPSTREAM_URL

SILENCE_S = 15.0  # a network without a byte for so long is dead; `kbsub fetch` has given up within 20 s
LOCK_WAIT_S = 300.0
IMPORTABLE = (".py", ".so", ".pyd", ".pth")
SHOWN = 5  # differing files an error names before it counts the rest


class CheckoutError(RuntimeError):
    """A checkout cannot be used. The text says why and ends with the command that mends it."""


class CheckoutMissing(CheckoutError):
    """Nowhere to be found, as opposed to found and wrong: only then may a run fall back to the embedded task."""


@dataclass(frozen=True)
class Checkout:
    """A verified KernelBench checkout: `path` (absolute) is the root of its work tree, `commit` its HEAD."""

    path: Path
    commit: str

    @property
    def source(self) -> Path:
        """The folder to put on `sys.path` so that `import kernelbench` is upstream's package."""
        return self.path / "src"

    @property
    def problems(self) -> Path:
        """The folder that holds `level1/`, `level2/`, ..."""
        return self.path / "KernelBench"


def cache_folder() -> Path:
    """Where `kbsub fetch` puts the checkout: `<user cache>/kbsub/KernelBench-<first 12 digits of the pin>`."""
    import platformdirs

    return platformdirs.user_cache_path("kbsub") / f"KernelBench-{PIN[:12]}"


def find_checkout(explicit: Path | None = None) -> Checkout:
    """The verified checkout: `explicit` (--kernelbench), else $KERNELBENCH_DIR, else the user cache folder.

    The first of the three that is set decides: a wrong one is an error, never a reason to look further.
    Raises CheckoutMissing when there is none and CheckoutError when it is not the pin.
    """
    if explicit is not None:
        return verify(explicit, origin="--kernelbench")
    if named := os.environ.get("KERNELBENCH_DIR"):
        return verify(Path(named), origin="KERNELBENCH_DIR")
    cache = cache_folder()
    if not cache.exists():
        raise CheckoutMissing(
            f"no KernelBench checkout: --kernelbench is not given, KERNELBENCH_DIR is not set and {cache} does not "
            "exist. Get it with: kbsub fetch"
        )
    return verify(cache, origin="the user cache")


def checkout_or_none() -> Path | None:
    """The folder of `find_checkout`, or None where there is none. CheckoutError for one that is not the pin."""
    try:
        return find_checkout().path
    except CheckoutMissing:
        return None


def verify(folder: Path, *, origin: str, pin: str = PIN) -> Checkout:
    """`folder` as a Checkout when it is exactly the commit `pin`; `origin` says in errors who named the folder.

    Raises CheckoutMissing when there is no such folder and CheckoutError when its HEAD or a file differs.
    """
    path = folder.expanduser().resolve()
    named = f"{path} (from {origin})"
    ours = path == cache_folder().resolve()
    here = f"git -C {shlex.quote(str(path))}"
    elsewhere = "kbsub fetch" if ours else f"kbsub fetch --to {shlex.quote(str(path))}"
    if path.exists() and not path.is_dir():
        raise CheckoutError(f"{named}: is a file, not a folder. Choose a folder, such as: kbsub fetch --to KernelBench")
    if not path.is_dir():
        raise CheckoutMissing(f"{named}: no such folder. Get it with: {elsewhere}")
    try:
        # An explicit git folder: neither a parent repository nor the ownership of this one can get in the way.
        repository = f"--git-dir={path / '.git'}"
        head = git(repository, "rev-parse", "--verify", "HEAD^{commit}").decode().strip()
        listing = git(repository, "ls-tree", "-r", "-z", pin) if head == pin else b""
    except GitMissing as error:  # another checkout would not help
        raise CheckoutError(f"{named} cannot be verified: {error}, then run this again") from error
    except GitError as error:
        mend = "kbsub fetch" if ours else f"kbsub fetch --to a new folder, or unset {origin}"
        raise CheckoutError(f"{named} is not a usable git checkout: {error}. Mend it with: {mend}") from error
    if head != pin:
        mend = "kbsub fetch" if ours else f"{here} fetch --depth 1 {UPSTREAM_URL} {pin} && {here} checkout {pin}"
        raise CheckoutError(f"{named} is at commit {head}, this project is pinned to {pin}. Mend it with: {mend}")
    tracked = _parse(listing)
    if differing := [name for name, sha in tracked.items() if _blob_id(path / name) != sha]:
        mend = "kbsub fetch" if ours else f"{here} checkout {pin} -- {_quoted(differing)}"
        raise CheckoutError(f"{named}: {_some(differing)} differ from commit {pin}. Mend it with: {mend}")
    if added := _added_modules(path, set(tracked)):
        mend = "kbsub fetch" if ours else f"{here} clean -f -- {_quoted(added)}"
        raise CheckoutError(
            f"{named}: {_some(added)} are not upstream's and could be imported in place of it. Mend it with: {mend}"
        )
    return Checkout(path, head)


def _parse(listing: bytes) -> dict[str, str]:
    """Path -> blob id of a `git ls-tree -r -z`, submodules left out."""
    entries = (entry.split(b"\t", 1) for entry in listing.split(b"\0") if entry)
    return {os.fsdecode(name): facts.split()[2].decode() for facts, name in entries if b" blob " in facts}


def _blob_id(file: Path) -> str | None:
    """git's id of the file's bytes as they are on disk: no index, no filter and no flag can hide a change."""
    try:
        data = os.fsencode(os.readlink(file)) if file.is_symlink() else file.read_bytes()
    except OSError:
        return None
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _added_modules(path: Path, tracked: set[str]) -> list[str]:
    found = (file for file in (path / "src").rglob("*") if file.suffix in IMPORTABLE)
    return sorted(name for file in found if (name := file.relative_to(path).as_posix()) not in tracked)


def _some(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _quoted(names: list[str]) -> str:
    return shlex.join(names) if len(names) <= SHOWN else "."


@dataclass(frozen=True)
class Fetched:
    """What `fetch` did: `new` is False when a good checkout was there already; `replaced` says what was mended."""

    checkout: Checkout
    new: bool
    replaced: str | None = None


def fetch(
    source: str = UPSTREAM_URL,
    target: Path | None = None,
    *,
    pin: str = PIN,
    silence_s: float = SILENCE_S,
    say: Callable[[str], None] = lambda text: None,
) -> Fetched:
    """Get commit `pin` (depth 1) from `source`, a URL or a bare or plain repository, into `target` and verify it.

    `target` defaults to the user cache folder, which is replaced when it is damaged; any other folder that exists
    and is not the pin is refused. The work is done in a temporary folder beside the target and renamed at the end,
    under a lock: an interrupted fetch leaves nothing half made, and two at once make one.
    Raises CheckoutError, after at most about `silence_s` seconds when nothing answers.
    """
    import filelock

    target = (target or cache_folder()).expanduser().absolute()
    source = str(Path(source).expanduser().resolve()) if is_local(source) else source
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass  # a folder that takes no file can look like a lock that is held
        lock = filelock.FileLock(target.parent / f".{target.name}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            say(f"another fetch is at work on {target}: waiting for it")
            lock.acquire(timeout=LOCK_WAIT_S)
    except filelock.Timeout:
        raise CheckoutError(
            f"another `kbsub fetch` has held {lock.lock_file} for {LOCK_WAIT_S:g} s. End it, then run: kbsub fetch"
        ) from None
    except OSError as error:
        raise CheckoutError(
            f"cannot write to {target.parent}: {error}. Choose another folder with: kbsub fetch --to FOLDER"
        ) from error
    with lock:
        return _fetch_locked(source, target, pin, silence_s, say)


def _fetch_locked(source: str, target: Path, pin: str, silence_s: float, say: Callable[[str], None]) -> Fetched:
    replaced = None
    if target.exists():
        try:
            return Fetched(verify(target, origin="the target of this fetch", pin=pin), new=False)
        except CheckoutError as error:
            if target.resolve() != cache_folder().resolve():
                raise
            replaced = str(error).split(". Mend it with")[0]
    prefix = f".{target.name}.fetch-"
    for left_over in target.parent.iterdir():  # no glob: a folder may be called "kb[1]"
        if left_over.name.startswith(prefix):  # of a fetch that was killed: we hold the lock
            shutil.rmtree(left_over, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        tree = draft / "tree"
        say(f"fetching commit {pin} from {source}")
        _clone_commit(source, tree, pin, silence_s)
        verify(tree, origin="this fetch", pin=pin)
        if target.exists():
            os.rename(target, draft / "old")
        os.rename(tree, target)
    except OSError as error:
        raise CheckoutError(f"cannot write {target}: {error}. Then run again: kbsub fetch") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Fetched(verify(target, origin="this fetch", pin=pin), new=True, replaced=replaced)


def _clone_commit(source: str, tree: Path, pin: str, silence_s: float) -> None:
    """A depth-1 work tree of commit `pin` of `source` at `tree`, which must not exist. Raises CheckoutError."""
    where = f"--git-dir={tree / '.git'}"
    served_here = is_local(source) or source.startswith("file://")
    try:
        git("init", "--quiet", "--template=", str(tree))
        git(
            where,
            "fetch",
            "--depth=1",
            "--no-tags",
            "--progress",  # the watchdog listens to it
            # The serving side of a local repository does not get our -c flags by itself.
            "--upload-pack=" + ("git -c 'safe.directory=*' upload-pack" if served_here else "git-upload-pack"),
            source,
            pin,
            silence_s=silence_s,
        )
        git(where, f"--work-tree={tree}", "checkout", "--quiet", "--detach", pin)
    except GitError as error:
        raise CheckoutError(
            f"could not get commit {pin} from {source}: {error}. With a copy of the repository at hand, run: "
            "kbsub fetch --from PATH_OR_URL"
        ) from error
