"""`kbsub blindspots`: which tasks are meant, and what a call that means none is told. One child, one small task."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kbsub.eval.cli import app
from kbsub.eval.commands.blindspots import chosen, numbers
from kbsub.eval.results.blindspots import read_blindspots


def call(*arguments: str):
    return CliRunner().invoke(app, ["blindspots", *arguments])


def test_numbers():
    assert numbers("1, 5,33-35") == {1, 5, 33, 34, 35}
    assert numbers("") == set()
    for wrong in ("a", "3-", "-4", "1-b"):
        with pytest.raises(ValueError, match="write ids by comma and ranges"):
            numbers(wrong)


@pytest.mark.kernelbench
def test_which_tasks_are_meant(kernelbench):
    def names(*arguments: str) -> list[str]:
        return [each.task for each in chosen(list(arguments[2:]), *arguments[:2], kernelbench.path, "fp32", "small")]

    assert len(names("1,2,3", "")) == 250
    assert names("3", "4-6") == ["level3_4", "level3_5", "level3_6"]
    assert names("1", "", "level2_9") == ["level2_9"]


@pytest.mark.kernelbench
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--level", "5"], "levels at the pin are 1, 2, 3, 4"),
        (["--only", "x"], "write ids by comma and ranges"),
        (["relu"], "write level<L>_<id>"),
        (["level1_900"], "one file starts with 900_"),
        (["--size", "tiny"], "--size tiny: there are official, check, small"),
        (["--precision", "fp64"], "KernelBench knows fp32, fp16, bf16"),
    ],
)
def test_a_call_that_means_nothing_is_told(arguments, words):
    found = call(*arguments, "--device", "cpu")
    assert found.exit_code == 2
    assert words in " ".join(found.output.split())


@pytest.mark.kernelbench
def test_a_record_is_kept_and_not_made_again(tmp_path):
    arguments = ("level2_66", "--device", "cpu", "--out", str(tmp_path))
    first = call(*arguments)
    assert first.exit_code == 0, first.output
    assert "level2_66: unstable" in first.output
    record = read_blindspots(tmp_path / "level2_66.json")
    assert (record.size, record.worst, record.environment.gpu) == ("small", "unstable", None)
    assert "1 tasks, 1 have a record" in call(*arguments).output
