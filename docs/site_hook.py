"""Adds to the documentation site what is not written for it: papers of the repository, and the reference of commands.

A paper's links are made links of the site where their target is a page of it or a picture; another file of the
repository is named instead. Runs inside mkdocs (hooks of mkdocs.yml), with this repository's packages importable.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "build" / "types"))

# File of the repository -> its page.
PAPERS = {
    **{f"docs/{file.name}": f"papers/{file.name}" for file in sorted((ROOT / "docs").glob("*.md"))},
    "SECURITY.md": "papers/security.md",
    "CONTRIBUTING.md": "papers/contributing.md",
    "CHANGELOG.md": "papers/changelog.md",
    "README.md": "index.md",
    **{
        f"submissions/{file.parent.name}/README.md": f"papers/{file.parent.name}.md"
        for file in sorted((ROOT / "submissions").glob("*/README.md"))
    },
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Papers, their pictures, and the reference of commands become files of the site."""
    from mkdocs.structure.files import File

    pictures: dict[str, Path] = {}
    for source, page in PAPERS.items():
        if page != "index.md":
            text = paper((ROOT / source).read_text("utf-8"), source, page, pictures)
            files.append(File.generated(config, page, content=text))
    for name, path in pictures.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    files.append(File.generated(config, "reference/examples.md", content=examples()))
    return files


def paper(text: str, source: str, page: str, pictures: dict[str, Path]) -> str:
    """The text of `source` as the text of `page`: links that hold there. What is code stays as it is."""

    def link(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return match[0]
        path, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        behind = f"#{anchor}" if anchor else ""
        known = PAPERS.get(file) or PAPERS.get(f"{file}/README.md")
        if known:
            return f"{mark}[{words}]({posixpath.relpath(known, posixpath.dirname(page))}{behind})"
        if file.endswith((".png", ".svg")) and (ROOT / file).is_file():
            name = f"pictures/{file.replace('/', '_')}"
            pictures[name] = ROOT / file
            return f"{mark}[{words}]({posixpath.relpath(name, posixpath.dirname(page))})"
        return f"{words} (`{file}`)" if words.strip("`") != file else f"`{file}`"

    out, fenced = [], False
    for line in text.split("\n"):
        fenced ^= line.lstrip().startswith("```")
        out.append(line if fenced else LINK.sub(link, line))
    return "\n".join(out)


def examples() -> str:
    """The scripts of examples/, which no wheel holds, to be read and saved."""
    lines = ["# Example scripts", "", "Complete programs over [the Python interface](python.md); each has a test.", ""]
    for file in sorted((ROOT / "examples").glob("*.py")):
        lines += [f"## {file.name}", "", "```python", file.read_text("utf-8").rstrip(), "```", ""]
    return "\n".join(lines)


def commands() -> str:
    """Every command of `kbsub`, as typer knows it: what it does, its arguments and options, its examples."""
    import typer

    from kbsub.eval.cli import app

    group: Any = typer.main.get_command(app)
    lines = ["# Commands", "", "Made from the program itself. `kbsub COMMAND --help` says the same.", ""]
    for name, command in sorted(group.commands.items()):
        text, _, examples = (command.help or "").partition("\b")
        lines += [f"## kbsub {name}", "", text.strip(), ""]
        shown = [line.strip() for line in examples.splitlines() if line.strip()]
        if shown:
            lines += ["```", *shown, "```", ""]
        lines += ["| argument or option | default | what it is |", "|---|---|---|"]
        for parameter in command.params:
            names = ", ".join(parameter.opts) if parameter.param_type_name == "option" else str(parameter.name).upper()
            default = "" if parameter.default in (None, "", False) or callable(parameter.default) else parameter.default
            words = " ".join((getattr(parameter, "help", None) or "").split())
            cells = (f"`{names}`", f"`{default}`" if default != "" else "", words)
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)
