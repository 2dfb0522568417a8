"""Every command of README and docs is executed: here, in a slow test here, or by `kbsub measure docs` on a GPU."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kbsub.eval.cli import app
from kbsub.eval.measure import docs
from support.judged_rows import official, put
from support.paths import ROOT

PAGES = {str(page.relative_to(ROOT)): page for page in docs.pages(ROOT)}
BLOCKS = {name: docs.blocks_of(page.read_text("utf-8"), name) for name, page in PAGES.items()}
GROUP: Any = typer.main.get_command(app)


def of_kind(kind: str) -> list[str]:
    return [name for name, blocks in BLOCKS.items() if any(block.kind == kind for block in blocks)]


def laid_out(folder: Path, checkout: Path, *, judged: bool) -> docs.Shell:
    """The folder of a page; judged: the run folders that a page shows or compares have rows, as a batch leaves them."""
    (folder / "files").mkdir()
    docs.lay_out(folder / "files", ROOT, checkout)
    if judged:
        for run in ("model_a", "model_b", "before", "after"):
            for sample in range(2):
                put(folder / "files" / "runs" / run, 1, 19, sample, official(True, 1.0, 2.0))
    return docs.Shell(folder / "files", folder / "state")


def wrong(found: list[tuple[docs.Block, dict[str, Any]]]) -> str:
    """What a person must know of each command that did not end as its page says."""
    lines = []
    for block, ended in found:
        if not ended["right"]:
            meant = f"meant {block.exit}; mend the page, or say how it is run above its fence (eval/measure/docs.py)"
            lines += [f"{block.page}:{block.line}: exit {ended['exit']}, {meant}: {ended['command']}", *ended["said"]]
    return "\n".join(lines)


@pytest.mark.kernelbench
@pytest.mark.parametrize("page", of_kind("fast"))
def test_the_commands_of_a_page_run(page: str, tmp_path: Path, kernelbench: Any) -> None:
    shell = laid_out(tmp_path, kernelbench.path, judged=True)
    found = docs.run_page(BLOCKS[page], ("fast",), lambda block, text: shell.run(text, block.language))
    assert not wrong(found), wrong(found)


@pytest.mark.slow
@pytest.mark.kernelbench
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", of_kind("slow"))
def test_the_slow_commands_of_a_page_run(page: str, tmp_path: Path, kernelbench: Any) -> None:
    """On a machine without a GPU, in the page's order, what the page says above them first."""
    shell = laid_out(tmp_path, kernelbench.path, judged=True)
    shell.environment["CUDA_VISIBLE_DEVICES"] = ""
    found = docs.run_page(BLOCKS[page], ("fast", "slow"), lambda block, text: shell.run(text, block.language))
    assert not wrong(found), wrong(found)


def test_every_start_page_has_commands_that_run() -> None:
    pages = [f"docs/site/{name}.md" for name in ("index", "start/try", "start/ci", "start/folder")]
    assert all(any(block.kind in ("fast", "slow") for block in BLOCKS[page]) for page in pages)


# What stands in a row of text, as `kbsub bench mine.py`, is not run, and must parse; PLACEHOLDERS and ... are left out.
INLINE = re.compile(r"`(kbsub [^`]+)`")


@pytest.mark.parametrize("page", PAGES)
def test_commands_named_in_a_sentence_parse(page: str) -> None:
    for line in INLINE.findall(re.sub(r"```.*?```", "", PAGES[page].read_text("utf-8"), flags=re.DOTALL)):
        if re.search(r"\b[A-Z][A-Z_.]*\b|\.\.\.|[\[$]", line) or "--help" in line:
            continue
        words = shlex.split(line)[1:]
        if words[0] in ("--version", "--install-completion"):
            continue
        assert words[0] in GROUP.commands, line
        if len(words) > 1 and words[0] != "measure":
            assert_parses(words, line)


def assert_parses(words: list[str], line: str) -> None:
    """Of a command that is named without its files only the options are looked at."""
    known = {name for each in GROUP.commands[words[0]].params for name in (*each.opts, *each.secondary_opts)}
    unknown = [word for word in words[1:] if word.startswith("-") and word.partition("=")[0] not in known]
    assert not unknown, f"{line}: no such option"


TEXT = """
<!-- run: slow, exit 3 -->
```
kbsub eval a.py \\
    --task b.py   # what it is for
```
```json
{"kbsub": "no command"}
```
```python
print(1)
```

<!-- run: no (it is yours) -->

```bash
# a line of its own
$ kbsub doctor
```
"""


def test_the_blocks_of_a_page() -> None:
    slow, python, no = docs.blocks_of(TEXT, "page.md")
    assert (slow.line, slow.kind, slow.exit, slow.commands) == (3, "slow", 3, ("kbsub eval a.py --task b.py",))
    assert (python.kind, python.language, python.commands) == ("fast", "python", ("print(1)",))
    assert (no.kind, no.why, no.commands) == ("no", "it is yours", ("kbsub doctor",))


@pytest.mark.parametrize(
    "text",
    [
        "<!-- run: sometimes -->\n```\nx\n```",
        "<!-- run: no -->\n```\nx\n```",  # without its reason
        "<!-- run: gpu (why) -->\n```\nx\n```",
        "<!-- run:gpu -->\n```\nx\n```",
        "<!-- run: gpu -->\n```json\n{}\n```",
        "```\nx\n",
    ],
)
def test_a_marker_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(docs.DocumentError, match=r"page.md:\d"):
        docs.blocks_of(text, "page.md")


def test_the_shell_keeps_folder_and_variables_and_tells_exit_codes(tmp_path: Path) -> None:
    shell = docs.Shell(tmp_path, tmp_path / "state", limit_s=20)
    text = (
        "<!-- run: slow, exit 3 -->\n```\nmkdir a\ncd a\nexport X=1\ntest $X = 1 -a $(basename $PWD) = a\n(exit 3)\n```"
    )
    text += "\n```\nfalse\npython -c 'import kbsub.eval'\n```\n```python\nimport sys; sys.exit(4)\n```"
    found = docs.run_page(docs.blocks_of(text, "page.md"), ("fast", "slow"), lambda b, t: shell.run(t, b.language))
    assert [(ended["exit"], ended["right"]) for _, ended in found] == [
        *[(0, True)] * 4, (3, True), (1, False), (0, True), (4, False),
    ]  # fmt: skip


@pytest.mark.parametrize("gpu", [None, "NVIDIA H200"])
@pytest.mark.kernelbench
def test_measure_docs_runs_gpu_blocks_once_and_goes_on(tmp_path: Path, monkeypatch: Any, gpu: str | None) -> None:
    """Only pages with a GPU block, what stands above it too; a finished command is kept, a failed one is not."""
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        (tmp_path / name).write_text("```\nfalse\n```\n")
    for name in ("docs", "examples", "results", "submissions"):
        (tmp_path / name).mkdir()
    lines = "echo made >> log", "test -e done", "echo after >> log"
    text = f"```\n{lines[0]}\n```\n<!-- run: gpu -->\n```\n{lines[1]}\n```\n```\n{lines[2]}\n```\n"
    (tmp_path / "docs" / "page.md").write_text(text)
    monkeypatch.setattr("kbsub.eval.run.machine_facts.gpu_name", lambda *_: gpu)
    monkeypatch.setattr("kbsub.eval.run.machine_facts.measured_on", lambda _: {"gpu": gpu})
    out = tmp_path / "docs.json"
    call = ["measure", "docs", "--out", str(out), "--root", str(tmp_path)]
    first = CliRunner().invoke(app, call)
    if gpu is None:
        assert first.exit_code == 2 and "no NVIDIA GPU here" in first.output
        return
    assert first.exit_code == 1, first.output
    (page,) = json.loads(out.read_text())["pages"].values()
    assert [(row["command"], row["kind"], row["exit"]) for row in page] == [(lines[0], "fast", 0), (lines[1], "gpu", 1)]
    folder = tmp_path / "runs" / "docs" / "docs_page.md" / "files"
    (folder / "done").touch()
    assert CliRunner().invoke(app, call).exit_code == 0
    assert (folder / "log").read_text() == "made\n"
    monkeypatch.setattr("kbsub.eval.run.machine_facts.gpu_name", lambda *_: "another")
    assert CliRunner().invoke(app, call).exit_code == 2
