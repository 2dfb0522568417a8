"""`kbsub starters`: which rows of its record stay, which are judged again, and which record it goes on with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kbsub.eval.cli import app


class Starters:
    """`kbsub starters` of one task and style, whose judge says what the test wants and whose writer writes `text`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.asked = self.written = 0
        self.text, self.out = "x = 1\n", folder / "starters.json"
        monkeypatch.setattr("kbsub.eval.interface.judge", self.judge)
        monkeypatch.setattr("kbsub.eval.process.isolated.run_isolated", self.write)

    def judge(self, file: Path, task: str, **_: Any) -> Any:
        self.asked += 1
        row = SimpleNamespace(status=self.said.pop(0), reason="", sha256=hashlib.sha256(file.read_bytes()).hexdigest())
        return SimpleNamespace(rows={"row": row}, certified=False)

    def write(self, target: str, payload: Any, **_: Any) -> Any:
        self.written += 1
        file = Path(payload["file"])
        file.parent.mkdir(exist_ok=True)
        file.write_text(self.text)
        return SimpleNamespace(value={})

    def run(self, *more: str) -> Any:
        call = ["starters", "--style", "torch", "--device", "cpu", "--first", "1", "--out", str(self.out)]
        return CliRunner().invoke(app, [*call, *more])


@pytest.fixture
def starters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starters:
    return Starters(tmp_path, monkeypatch)


@pytest.mark.kernelbench
def test_a_failed_starter_is_judged_once_more_only_with_again(starters: Starters) -> None:
    """A run that goes on leaves failures alone; `--again` asks after those, and never after what is OK."""
    starters.said = ["OOM", "OK", "ERROR"]
    assert [starters.run(*more).exit_code for more in ([], [], ["--again"], ["--again"])] == [1, 1, 0, 0]
    assert (starters.asked, starters.written) == (2, 2)


@pytest.mark.kernelbench
def test_a_starter_that_reads_otherwise_is_judged_again(starters: Starters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what writes it has changed it is written again, and judged where its text is another one."""
    starters.said = ["OK", "ERROR"]
    assert starters.run().exit_code == 0
    monkeypatch.setattr("kbsub.eval.commands.starters.writer_digest", lambda: "another writer, the same text")
    assert [starters.run().exit_code for _ in range(2)] == [0, 0]
    assert (starters.asked, starters.written) == (1, 2), "written once more to be looked at, and not judged"
    monkeypatch.setattr("kbsub.eval.commands.starters.writer_digest", lambda: "another writer, another text")
    starters.text = "x = 2\n"
    assert starters.run("--format", "json").exit_code == 1
    assert starters.asked == 2
    (row,) = json.loads(starters.out.read_text())["rows"].values()
    assert (row["status"], row["sha256"]) == ("ERROR", hashlib.sha256(b"x = 2\n").hexdigest())


@pytest.mark.kernelbench
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "is no record of kbsub starters"),
        ('{"gpu": null, "device": "cpu", "size": "small", "rows": {"level1_5/torch": 1}}', "is no record"),
        ('{"gpu": "NVIDIA H200", "device": "cuda", "size": "small", "rows": {}}', "made with gpu NVIDIA H200"),
        ('{"gpu": null, "device": "none", "size": "small", "rows": {}}', "made with device none"),
        ('{"gpu": null, "device": "cpu", "size": "check", "rows": {}}', "made with size check"),
        ('{"gpu": null, "rows": {}}', "made with device unknown"),
    ],
)
def test_a_record_of_other_terms_is_exit_2_and_stays(starters: Starters, content: str, words: str) -> None:
    starters.out.write_text(content)
    said = starters.run("--size", "small")
    assert said.exit_code == 2 and words in said.output and "another file with --out" in said.output, said.output
    assert (starters.out.read_text(), starters.asked) == (content, 0)
