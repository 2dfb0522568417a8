"""The commands of the documents, executed: those that need a GPU, page by page, with exit codes and seconds.

    kbsub measure docs --out results/h200/docs.json

A page's fenced blocks (no language, bash, sh or python) run in order in one folder that holds what the documents name
(`lay_out`); a block's `cd` and `export` hold for the blocks below it. The line above a fence says how it is run:

    nothing                 by a fast test, on any machine: every command must end with exit code 0
    <!-- run: slow -->      by a slow test
    <!-- run: gpu -->       by this program
    <!-- run: no (why) -->  by nobody, with the reason

`exit 3` behind the word, as in `<!-- run: slow, exit 3 -->`, is another exit code than 0 that the block's last command
must end with. Here the unmarked blocks above a page's last GPU block run, too. A finished command whose text is the
same is kept, so that the same call goes on after an interruption. Run it from the root of a checkout.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kbsub.adapters.evaluator import write_stand_ins

KINDS = ("fast", "slow", "gpu", "no")
LANGUAGES = ("", "bash", "sh", "python")  # what a person is to run; any other fence (text, json) shows something
LIMIT_S = 600.0
_FENCE = re.compile(r"^ *```(\w*)\s*$")
_MARKER = re.compile(r"^ *<!-- run: (\w+)(?:, exit (\d+))?(?: \((.+)\))? -->\s*$")
RELU = """import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.clamp(x, min=0)
"""
NORM = """import torch


class ModelNew(torch.nn.Module):
    def __init__(self, num_features, eps=1e-5):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + self.eps)
"""


class DocumentError(ValueError):
    """A fence or marker that cannot be read: page, line and rule."""


@dataclass(frozen=True)
class Block:
    """One fence to be run. line: of the fence, from 1. commands: a string each; of python the whole text."""

    page: str
    line: int
    kind: str
    commands: tuple[str, ...]
    language: str = ""
    exit: int = 0
    why: str = ""


def blocks_of(text: str, page: str) -> list[Block]:
    """The blocks of a page that a person is to run. Raises DocumentError for a marker that is none or lacks why."""
    lines, found, k = text.splitlines(), [], 0
    while k < len(lines):
        fence = _FENCE.match(lines[k])
        if fence is None:
            k += 1
            continue
        end = next((j for j in range(k + 1, len(lines)) if lines[j].strip() == "```"), None)
        if end is None:
            raise DocumentError(f"{page}:{k + 1}: the fence is not closed")
        above = next((line for line in reversed(lines[:k]) if line.strip()), "")
        if fence[1] in LANGUAGES:
            found.append(_block(page, k + 1, fence[1], "\n".join(lines[k + 1 : end]), above))
        elif "<!-- run:" in above:
            raise DocumentError(f"{page}:{k + 1}: a {fence[1]} block is not run, so no marker belongs above it")
        k = end + 1
    return found


def _block(page: str, line: int, language: str, text: str, above: str) -> Block:
    kind, code, why = "fast", 0, ""
    if "<!-- run" in above:
        marker = _MARKER.match(above)
        if marker is None or marker[1] not in KINDS[1:] or (marker[1] == "no") != bool(marker[3]):
            raise DocumentError(f"{page}:{line}: {above.strip()}: write run: slow, run: gpu or run: no (why)")
        kind, code, why = marker[1], int(marker[2] or 0), marker[3] or ""
    commands = (text,) if language == "python" else tuple(_commands(text))
    return Block(page, line, kind, commands, language, code, why)


def _commands(text: str) -> Iterator[str]:
    """A command a line; a line that ends in a backslash goes on; what follows two blanks and # is said, not run."""
    for line in text.replace("\\\n", " ").splitlines():
        command = " ".join(re.split(r"\s{2,}#|^#", line, maxsplit=1)[0].split())
        if command:
            yield re.sub(r"^(\$ |\.venv/bin/)", "", command)


def pages(root: Path) -> list[Path]:
    """Every page whose commands are run: README, docs, and what else the site shows."""
    own = [*(root / "docs").rglob("*.md"), *(root / "submissions").glob("*/README.md"), root / "SECURITY.md"]
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted(own)]


def lay_out(folder: Path, root: Path, checkout: Path | None) -> None:
    """Files that the documents name, in `folder`: candidates, samples, a corpus, examples, results, KernelBench."""
    for name in ("kernels/mine.py", "sample.py", "samples/first.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(NORM)
    for name in ("my_run", "model_a", "model_b", "before", "after"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "level_1_problem_19_sample_0_kernel.py").write_text(RELU)
    row = {"level_id": 1, "task_id": 19, "custom_code": RELU}
    (folder / "corpus.jsonl").write_text(json.dumps(row) + "\n")
    shutil.copytree(root / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "results", folder / "results")
    (folder / "submissions").symlink_to(root / "submissions")
    if checkout is not None:
        shutil.copytree(checkout, folder / "KernelBench", symlinks=True)


class Shell:
    """Runs commands one at a time, each in a bash of its own that begins where the last one ended (cd, export)."""

    def __init__(self, folder: Path, state: Path, limit_s: float = LIMIT_S) -> None:
        self.folder, self.state, self.limit_s = folder, state, limit_s
        state.mkdir(parents=True, exist_ok=True)
        for name, module in (("kbsub", "-m kbsub.eval.cli "), ("python", "")):
            program = state / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module}"$@"\n')
            program.chmod(0o755)
        own = write_stand_ins(state / "stand_ins")
        path = os.pathsep.join([str(state / "bin"), os.environ.get("PATH", "")])
        here = os.pathsep.join(str(Path(each).resolve()) for each in (*filter(None, sys.path), str(own)))
        # As little noise as a person's terminal has: no CI's own variables, which change what the gate prints.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "PYTEST_"))}
        self.environment = {**kept, "PATH": path, "PYTHONPATH": here, "OWN_PYTHONPATH": here}

    def run(self, command: str, language: str = "") -> dict[str, Any]:
        """{command, exit, seconds, said: the last lines}. exit 124: it ran into the limit."""
        state = shlex.quote(str(self.state))
        body = f"python - <<'END_OF_BLOCK'\n{command}\nEND_OF_BLOCK" if language == "python" else command
        # A page that sets PYTHONPATH (for upstream's scripts) must not take these packages off the path.
        text = (
            f'if [ -f {state}/env ]; then . {state}/env; cd "$(cat {state}/cwd)"; fi\n'
            'case ":$PYTHONPATH:" in *":$OWN_PYTHONPATH:"*) ;; *) PYTHONPATH="$PYTHONPATH:$OWN_PYTHONPATH" ;; esac\n'
            f"{body}\ncode=$?\n"
            f"export -p > {state}/env; pwd > {state}/cwd; exit $code\n"
        )
        started = time.monotonic()
        try:
            ended = subprocess.run(
                ["/bin/bash", "-o", "pipefail", "-c", text],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=self.limit_s,
            )
            code, said = ended.returncode, ended.stdout
        except subprocess.TimeoutExpired as error:
            code, said = 124, (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        seconds = round(time.monotonic() - started, 2)
        return {"command": command, "exit": code, "seconds": seconds, "said": said.splitlines()[-12:]}


def run_page(
    blocks: list[Block], kinds: tuple[str, ...], run: Callable[[Block, str], dict[str, Any]]
) -> list[tuple[Block, dict[str, Any]]]:
    """The commands of the blocks of these kinds, in the page's order, with how each ended and whether that is right.

    Each record gets `kind` and `right`: exit code 0, and of a block's last command what its marker says.
    """
    found = []
    for block in blocks:
        if block.kind in kinds:
            for k, command in enumerate(block.commands):
                ended = run(block, command)
                meant = block.exit if k == len(block.commands) - 1 else 0
                right = ended["exit"] == meant
                said = {} if right else {"said": ended.get("said", [])}  # of a finished command nobody needs the words
                kept = {name: ended[name] for name in ("command", "exit", "seconds")}
                found.append((block, {**kept, "kind": block.kind, "right": right, **said}))
    return found


def command(
    out: Annotated[Path, typer.Option(help="The record; finished commands of an existing one are kept.")],
    root: Annotated[Path, typer.Option(help="The checkout whose documents are meant.")] = Path("."),
    work: Annotated[
        Path | None, typer.Option(help="Where the pages' folders stay between calls; default: runs/docs of the root.")
    ] = None,
    only: Annotated[str, typer.Option(help="Pages by comma, as paths from the root; default: all.")] = "",
    budget: Annotated[float, typer.Option(help="Seconds after which no further command is begun.")] = 86400.0,
    limit: Annotated[float, typer.Option(help="Seconds for one command.")] = LIMIT_S,
    kernelbench: Annotated[Path | None, typer.Option(help="The checkout; default: as kbsub fetch left it.")] = None,
) -> None:
    """Execute the GPU commands of the documents. Exit code: 0 all right, 1 one is not or was left out, 2 usage."""
    from kbsub.adapters.checkout import CheckoutError, find_checkout
    from kbsub.eval.results.model import write_json_atomic
    from kbsub.eval.run.machine_facts import gpu_name, measured_on

    root = root.resolve()
    try:
        found = {str(page.relative_to(root)): page for page in pages(root)}
        blocks = {name: blocks_of(page.read_text("utf-8"), name) for name, page in found.items()}
        checkout = find_checkout(kernelbench).path
        record = read_record(out, gpu_name())
    except (OSError, DocumentError, CheckoutError) as error:
        typer.echo(f"kbsub measure docs: {error}", err=True)
        raise typer.Exit(2) from None
    if record["gpu"] is None:
        typer.echo(
            "kbsub measure docs: no NVIDIA GPU here; the other commands are tests/repository/test_docs.py", err=True
        )
        raise typer.Exit(2)
    wanted = [name for name in only.split(",") if name] or list(blocks)
    if unknown := [name for name in wanted if name not in blocks]:
        typer.echo(f"kbsub measure docs: --only {unknown[0]}: no page of the documents", err=True)
        raise typer.Exit(2)
    record["environment"] = record.get("environment") or measured_on("cuda")
    started, left = time.monotonic(), 0
    place = (work or root / "runs" / "docs").resolve()
    for name in wanted:
        if not any(block.kind == "gpu" for block in blocks[name]):
            continue
        folder = place / name.replace("/", "_")
        kept = {row["command"]: row for row in record["pages"].get(name, []) if row["right"]}
        if not (folder / "files").is_dir():
            (folder / "files").mkdir(parents=True)
            lay_out(folder / "files", root, checkout)
            kept = {}  # what the finished commands left is not there
        shell = Shell(folder / "files", folder / "state", limit)

        def run(block: Block, text: str, kept: Mapping[str, Any] = kept, shell: Shell = shell) -> dict[str, Any]:
            nonlocal left
            if text in kept and not text.startswith(("cd ", "export ")):
                return dict(kept[text])
            if time.monotonic() - started > budget:
                left += 1
                return {"command": text, "exit": None, "seconds": 0.0, "said": ["not begun: --budget"]}
            ended = shell.run(text, block.language)
            typer.echo(f"{block.page}:{block.line}: exit {ended['exit']}, {ended['seconds']} s: {text}")
            return ended

        last = max(k for k, block in enumerate(blocks[name]) if block.kind == "gpu")
        rows = run_page(blocks[name][: last + 1], ("fast", "gpu"), run)
        record["pages"][name] = [{"line": block.line, **row} for block, row in rows]
        write_json_atomic(out, record)
    rows_of = [row for each in record["pages"].values() for row in each]
    wrong = [row["command"] for row in rows_of if not row["right"]]
    typer.echo(f"{len(rows_of)} commands, {len(wrong)} not right, {left} not begun; written to {out}")
    raise typer.Exit(1 if wrong else 0)


def read_record(path: Path, gpu: str | None) -> dict[str, Any]:
    """The record in `path`, or a new one. Raises DocumentError for one of another GPU, or for no record."""
    if not path.exists():
        return {"schema": 1, "what": "the GPU commands of the documents, executed", "gpu": gpu, "pages": {}}
    try:
        record: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if record["gpu"] != gpu:
            raise DocumentError(f"{path}: was made on {record['gpu']}: give another --out")
        record["pages"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DocumentError(str(error) if isinstance(error, DocumentError) else f"{path}: no record of it") from error
    return record
