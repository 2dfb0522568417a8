"""The documentation site: it builds without a warning, its commands parse, the catalogue quotes what is said."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from kbsub.eval.cli import app
from support.paths import ROOT

SITE = ROOT / "docs" / "site"
PAGES = [*sorted(SITE.rglob("*.md")), ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUP: Any = typer.main.get_command(app)


def commands_of(page: Path) -> list[str]:
    """The `kbsub ...` lines of the page's code blocks, without comments and without those that hold a PLACEHOLDER."""
    blocks = re.findall(r"```(?:bash|sh)?\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines = [re.sub(r"^(\.venv/bin/|\$ )", "", line) for line in lines]
    return [line for line in lines if line.startswith("kbsub ") and not re.search(r"\b[A-Z]{3,}\b(?!_)", line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_the_documents_parses(page: Path) -> None:
    """Renamed commands and options are found here; what they do is tested where they are."""
    for line in commands_of(page):
        words = shlex.split(line)[1:]
        if words[0] in ("--version", "--help", "--install-completion") or "--help" in words:
            continue
        assert words[0] in GROUP.commands, line
        if words[0] != "measure":
            GROUP.commands[words[0]].make_context(words[0], words[1:])


def test_the_pages_of_the_site_have_commands() -> None:
    found = {page.name: commands_of(page) for page in SITE.rglob("*.md")}
    assert all(found[name] for name in ("index.md", "try.md", "ci.md", "folder.md"))


def test_the_catalogue_quotes_what_the_program_says() -> None:
    """Each text of the catalogue stands in the sources, so that a person who searches for it finds it."""
    sources = "".join(file.read_text("utf-8") for top in ("adapters", "eval") for file in (ROOT / top).rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)  # a message that is written on several lines
    joined = re.sub(r"\{[^{}]*\}", "...", joined)
    rows = [line for line in (SITE / "errors.md").read_text().splitlines() if line.startswith("| `")]
    texts = [re.match(r"\| `([^`]+)`", row)[1] for row in rows]  # type: ignore[index]
    assert len(texts) > 25
    missing = [text for text in texts if text not in joined and text != "line ...: ..."]
    assert not missing


def test_a_paper_keeps_its_code_and_names_what_is_no_page() -> None:
    spec = importlib.util.spec_from_file_location("site_hook", ROOT / "docs" / "site_hook.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    code = "\n```\n[f](g)\n```"
    pictures: dict[str, Path] = {}
    text = "[a](../SECURITY.md#x) [b](../Makefile) [c](https://d) ![e](../results/h200/level1_40_time.png)" + code
    shown = "![e](../pictures/results_h200_level1_40_time.png)"
    expected = f"[a](security.md#x) b (`Makefile`) [c](https://d) {shown}{code}"
    assert hook.paper(text, "docs/gate.md", "papers/gate.md", pictures) == expected
    assert list(pictures.values()) == [ROOT / "results/h200/level1_40_time.png"]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    reference = (tmp_path / "site" / "reference" / "commands" / "index.html").read_text()
    assert all(f"kbsub {name}" in reference for name in GROUP.commands)
    assert "Judge candidates as" in (tmp_path / "site" / "reference" / "python" / "index.html").read_text()
