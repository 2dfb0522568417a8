"""The documentation site: it builds without a warning, the catalogue quotes what is said."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from kbsub.eval.cli import app
from support.paths import ROOT

SITE = ROOT / "docs" / "site"
GROUP: Any = typer.main.get_command(app)


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
