"""What a corpus of JSON lines is: its fields, its samples, and what is ignored with which words."""

from __future__ import annotations

import json

import pytest

from kbsub.adapters.source import SOURCE_LIMIT
from kbsub.eval.run.batch.samples import BatchError, find_in_corpus, read_fields

FIELDS = "level=level_id,problem=task_id,code=custom_code"


def corpus(tmp_path, *lines):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def line(level=1, task=40, code="x = 'ü'", **more):
    return {"level_id": level, "task_id": task, "custom_code": code, **more}


def test_every_line_with_code_is_a_sample_and_its_text_comes_back(tmp_path):
    path = corpus(tmp_path, line(2, 7), line(code="y = 1"), line("level_1", "40", "z = 2"), line(3, 1, "w = 3"))
    found = find_in_corpus(path, read_fields(FIELDS))
    assert [each.stem for each in found.samples] == [
        "level_1_problem_40_sample_0",
        "level_1_problem_40_sample_1",
        "level_2_problem_7_sample_0",
        "level_3_problem_1_sample_0",
    ]
    assert [each.read() for each in found.samples] == [
        ("y = 1", None),
        ("z = 2", None),
        ("x = 'ü'", None),
        ("w = 3", None),
    ]
    assert found.samples[0].task == "level1_40" and not found.ignored


def test_a_run_and_a_sample_number_may_be_named(tmp_path):
    path = corpus(tmp_path, line(model="a/../b", n=3), line(model="c", n=3), line(model="c", n=3))
    found = find_in_corpus(path, read_fields(f"{FIELDS},run=model,sample=n"))
    assert [each.stem for each in found.samples] == [
        "a_.._b/level_1_problem_40_sample_3",
        "c/level_1_problem_40_sample_3",
    ]
    assert found.ignored == {"the same sample as a line before": ["line 3"]}


IGNORED = {
    "{no": "no JSON",
    "[1]": "no JSON object",
    json.dumps(line(code=None)): "without code in custom_code",
    json.dumps(line(code=" ")): "without code in custom_code",
    json.dumps(line(level="one")): "without a number in level_id and task_id",
    json.dumps(line(task=True)): "without a number in level_id and task_id",
}


@pytest.mark.parametrize("text", IGNORED)
def test_a_line_that_is_none_is_said_and_costs_itself(tmp_path, text):
    found = find_in_corpus(corpus(tmp_path, text, "", line()), read_fields(FIELDS))
    assert len(found.samples) == 1 and found.ignored == {IGNORED[text]: ["line 1"]}
    assert found.notes() == [f"ignored, {IGNORED[text]}: line 1"]


def test_a_corpus_without_a_sample_says_why(tmp_path):
    with pytest.raises(BatchError, match=r"--fields names; ignored, no JSON: line 1, line 2, line 3 and 2"):
        find_in_corpus(corpus(tmp_path, *["no"] * 5), read_fields(FIELDS))


def test_a_text_that_is_too_large_is_a_row_of_its_own(tmp_path):
    found = find_in_corpus(corpus(tmp_path, line(code="#" * (SOURCE_LIMIT + 1))), read_fields(FIELDS))
    source, problem = found.samples[0].read()
    assert source == "" and "the limit is 262144" in problem


WRONG = ["level=a,problem=b", "level=a,level=b,problem=c,code=d", "level", "size=a,level=a,problem=b,code=c", ""]


@pytest.mark.parametrize("text", WRONG)
def test_fields_of_another_form_are_refused_with_an_example(text):
    with pytest.raises(BatchError, match=r"--fields"):
        read_fields(text)


def test_a_corpus_through_the_command(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from kbsub.eval.cli import app

    monkeypatch.chdir(tmp_path)
    path = corpus(tmp_path, line(code='CUDA_SOURCE = ""\nclass ModelNew: ...'), line(code=None))
    done = CliRunner().invoke(app, ["eval", str(path), "--fields", FIELDS, "--only", "official"])
    assert done.exit_code == 0 and "ignored, without code in custom_code: line 2" in done.output, done.output
    row = json.loads((tmp_path / "runs/corpus/kbsub_rows/level_1_problem_40_sample_0.json").read_text())
    assert row["status"] == "NOT_RUN" and "CUDA_SOURCE" in row["message"]
    assert path.read_text().count("\n") == 2, "the corpus is only read"
