"""Promises about the text of this repository: one pin, no path of somebody's machine, the licences."""

from __future__ import annotations

import re
import subprocess

import pytest

from kbsub.adapters.pin import PIN, read_pin
from support.paths import ROOT

# Recorded evidence says which pin *it* was made with, also after the pin has moved.
RECORDS = ("results/", "tests/golden/")
# Ways of writing the pin short. A 40-digit word needs no context: outside the records the pin is the only commit named.
SHORT_MENTIONS = (
    r"kernelbench(?:\.git)?@([0-9a-f]{7,39})\b",
    r"\bpin(?:ned)?\b[^\n0-9a-f]{0,12}\b([0-9a-f]{7,39})\b",
    r"\bKernelBench\b[^\n]{0,20}\bcommit\b[^\n0-9a-f]{0,6}\b([0-9a-f]{7,39})\b",
)
# Written in two pieces, so that this file does not trip over itself.
MACHINE_PATHS = [rf"(?<![\w.$-])/{top}/[\w.]" for top in ("wo" + "rk", "ro" + "ot", "tm" + "p", "ho" + "me")]


def tracked() -> dict[str, str]:
    """Relative path -> text of every tracked text file."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git work tree: tracked files are unknown")
    listing = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True).stdout
    texts = {}
    for name in filter(None, listing.decode().split("\0")):
        file = ROOT / name
        if file.is_file() and b"\0" not in (data := file.read_bytes())[:8192]:
            texts[name] = data.decode("utf-8", errors="replace")
    return texts


def wrong_pins(text: str) -> list[str]:
    found = re.findall(r"\b[0-9a-f]{40}\b", text)
    for pattern in SHORT_MENTIONS:
        found += re.findall(pattern, text, flags=re.IGNORECASE)
    return [word for word in found if not PIN.startswith(word) and not word.isdigit()]


def machine_paths(text: str) -> list[str]:
    return [match.group() for pattern in MACHINE_PATHS for match in re.finditer(pattern, text)]


def test_the_pin_is_one_line_of_40_hex_digits():
    assert (ROOT / "KERNELBENCH_COMMIT").read_text() == PIN + "\n"


def test_every_other_mention_of_the_pin_agrees():
    texts = {name: text for name, text in tracked().items() if not name.startswith(RECORDS)}
    wrong = {name: bad for name, text in texts.items() if (bad := wrong_pins(text))}
    assert not wrong, f"KERNELBENCH_COMMIT says {PIN}, these files say otherwise: {wrong}"


def test_the_extra_names_the_pin():
    assert f"KernelBench.git@{PIN} " in (ROOT / "pyproject.toml").read_text()


OTHER = "fedcba9876543210" * 2 + "fedcba98"


@pytest.mark.parametrize(
    "text, count",
    [
        (f"x @ git+https://example.org/K.git@{OTHER}", 1),
        ("provenance kernelbench@" + OTHER[:12], 1),
        ("at the pin (" + OTHER[:7] + ")", 1),
        ("KernelBench, commit " + OTHER[:10], 1),
        (f"git fetch {PIN}; kernelbench@{PIN[:7]}; the pin ({PIN[:7]})", 0),
        ("sha256 " + "a" * 64, 0),
    ],
)
def test_a_wrong_mention_is_seen(text, count):
    assert len(wrong_pins(text)) == count, wrong_pins(text)


@pytest.mark.parametrize("content", ["", "main\n", PIN[:39], PIN.upper(), f"{PIN}\n{PIN}\n"])
def test_a_pin_file_that_is_not_one_commit_is_refused(tmp_path, content):
    (tmp_path / "KERNELBENCH_COMMIT").write_text(content)
    with pytest.raises(ValueError, match="40 hex digits"):
        read_pin((tmp_path,))


def test_a_missing_pin_file_says_how_to_mend_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="pip install"):
        read_pin((tmp_path,))


def test_no_tracked_file_names_a_path_of_a_machine():
    named = {name: bad for name, text in tracked().items() if (bad := machine_paths(text))}
    assert not named, f"write these relative to the repository or to an environment variable: {named}"


@pytest.mark.parametrize(
    "text, count",
    [
        ("see /wo" + "rk/main/x.py", 1),
        ('Path("/ro' + 'ot/.cache")', 1),
        ("cd /ho" + "me/someone", 1),
        ("results/work/x and ../work/y and $HOME/work/z", 0),
        ("GET https://example.org/work/x", 0),
    ],
)
def test_a_machine_path_is_seen(text, count):
    assert len(machine_paths(text)) == count, machine_paths(text)


def test_nothing_of_upstream_is_tracked(kernelbench):
    """No tracked file has the bytes of an upstream file (empty and trivial ones aside)."""
    theirs = {
        file.read_bytes(): file.relative_to(kernelbench.path).as_posix()
        for folder in ("src", "KernelBench", "scripts")
        for file in (kernelbench.path / folder).rglob("*.py")
        if file.stat().st_size > 200
    }
    copies = {name: theirs[data] for name, text in tracked().items() if (data := text.encode()) in theirs}
    assert not copies, f"copied from upstream: {copies}"


def test_the_licence_of_the_reference_arithmetic_travels():
    text = (ROOT / "licenses" / "PYTORCH_251_LICENSE.txt").read_text()
    assert text.startswith("From PyTorch:") and "IN NO EVENT SHALL THE COPYRIGHT OWNER" in text
    assert "licenses/PYTORCH_251_LICENSE.txt" in (ROOT / "NOTICE").read_text()


def test_each_file_that_follows_pytorchs_arithmetic_credits_its_authors():
    from kbsub.eval.tasks.declarations import read_declarations

    following = [ROOT / "eval" / "operators" / "layer_norm" / "order.py"]
    for table in ROOT.glob("submissions/*/candidates.toml"):
        rows = read_declarations(table.parent)
        following += [table.parent / f"{stem}.py" for stem, row in rows.items() if row.contract == "bit-identical"]
    assert len(following) >= 3
    silent = [str(f.relative_to(ROOT)) for f in following if "PyTorch contributors" not in f.read_text()]
    assert not silent, f"credit the PyTorch contributors and name licenses/PYTORCH_251_LICENSE.txt in {silent}"


def test_every_relative_link_of_a_paper_leads_somewhere():
    broken = []
    for name, text in tracked().items():
        if name.endswith(".md"):
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
                # Pages that are made when the site is built: `mkdocs build --strict` (test_site.py) follows those.
                made = name.startswith("docs/site/") and re.match(r"(\.\./)*(papers|reference)/", target)
                if "://" not in target and not made and not (ROOT / name).parent.joinpath(target).exists():
                    broken.append(f"{name}: {target}")
    assert not broken, broken


def test_every_command_the_readme_names_exists():
    from kbsub.eval.cli import app

    named = set(re.findall(r"`kbsub ([a-z]+)", (ROOT / "README.md").read_text()))
    there = {command.name or command.callback.__name__ for command in app.registered_commands}
    there |= {group.name for group in app.registered_groups}
    assert named <= there, f"README names {sorted(named - there)}, which are no commands"


SCREEN = 40  # lines of a terminal, or of a page before one scrolls
FIRST_SCREEN = (
    "**candidate**",
    "<!-- report:headline -->",
    "make eval",
    "make test",
    "](docs/install.md)",
    "](CONTRIBUTING.md)",
)


def test_the_first_screen_of_the_readme_says_what_it_is():
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 120, f"README.md has {len(lines)} lines; details belong into docs/ or beside the ladder"
    missing = [words for words in FIRST_SCREEN if words not in "\n".join(lines[:SCREEN])]
    assert not missing, f"not on the first screen: {missing}"


def test_no_text_cites_a_file_or_an_issue_that_is_not_here():
    """A reader of the repository has no tracker and no design folder."""
    pattern = re.compile(r"\bresults\.md\b|\b[Ii]ssue \d|\.\./shared\b")
    cited = {name: found for name, text in tracked().items() if (found := pattern.findall(text))}
    assert not cited, f"say what is meant instead: {cited}"
