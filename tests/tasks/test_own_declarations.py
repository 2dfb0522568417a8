"""A candidates.toml beside somebody's own file is that person's word, and lowers nothing.

What this repository declares of its own files counts, and what the caller vouches for, as it was when the call began.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kbsub.submissions
from kbsub.adapters.task import load_local_task
from kbsub.eval.bench.plan import read_candidate
from kbsub.eval.cli import app
from kbsub.eval.run.runner import Plan, _declared_payloads
from kbsub.eval.tasks.declarations import DeclarationError, declaration_of, is_ours, read_declarations, read_declared
from support.paths import ROOT, TESTS

pytestmark = pytest.mark.usefixtures("warm_children")

SUBMISSIONS = ROOT / "submissions"
OWN = sorted(file for table in SUBMISSIONS.rglob("candidates.toml") for file in table.parent.glob("*.py"))
OWN = [file for file in OWN if file.stem not in ("reference", "__init__")]
SMALL = ["--task", str(TESTS / "support" / "small_layer_norm_task" / "reference.py"), "--device", "cpu"]

CANDIDATE = """
import torch
{first}
class ModelNew(torch.nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = torch.nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return self.ln(x){wrong}
"""
CONTROL = '[{stem}]\ntitle = "Fast"\nprecision = ["fp32"]\ncontract = "control"\n'
CONTROL += 'expect = {{ official = "fail", identity = "fail" }}\n'
ELSEWHERE = '[{stem}]\ntitle = "Fast"\nprecision = ["bf16"]\ncontract = "tolerance"\n'
EVERYTHING_FAILS = CONTROL + '[{stem}.stress]\nfail = ["*"]\n'


def submit(folder: Path, stem: str, wrong: str, toml: str = CONTROL, first: str = "") -> Path:
    """A folder as somebody hands it in: a candidate, and a declaration of its own beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.py").write_text(CANDIDATE.format(wrong=wrong, first=first))
    (folder / "candidates.toml").write_text(toml.format(stem=stem))
    return folder / f"{stem}.py"


def call(command: str, *arguments: Any) -> Any:
    return CliRunner().invoke(app, [command, *map(str, arguments)])


WRONG = {"a tenth off": " * 1.1", "twice": " * 2"}  # wrong everywhere; its own table calls that a control


@pytest.mark.parametrize("name", WRONG)
def test_a_self_declared_control_fails_the_gate(name: str, tmp_path: Path) -> None:
    file = submit(tmp_path, "mine", WRONG[name])
    result = call("gate", file, *SMALL, "--require", "stress,oracle")
    assert result.exit_code == 1, result.output
    assert "mine: stress: FAIL" in result.output and "mine: oracle: FAIL" in result.output


def test_the_ignored_table_is_named_once_with_the_way_out(tmp_path: Path) -> None:
    files = [submit(tmp_path, "mine", " * 2"), tmp_path / "other.py"]
    files[1].write_text(files[0].read_text())
    result = call("gate", *files, *SMALL, "--require", "guards")
    table = tmp_path / "candidates.toml"
    assert result.output.count(f"{table} does not count") == 1, result.output
    assert f"--declarations {table}" in result.output


def test_what_the_caller_vouches_for_counts(tmp_path: Path) -> None:
    file = submit(tmp_path, "mine", " * 2")
    table = tmp_path / "elsewhere" / "believed.toml"  # of any name, anywhere
    table.parent.mkdir()
    (tmp_path / "candidates.toml").rename(table)
    result = call("gate", file, *SMALL, "--require", "stress", "--declarations", table)
    assert result.exit_code == 0 and "as a control does" in result.output, result.output
    assert "does not count" not in result.output


def test_a_table_that_the_candidate_edits_while_it_runs_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KBSUB_CELL", "unconfined")  # in a cell the file could not be edited at all
    honest = '[mine]\ntitle = "t"\nprecision = ["fp32"]\ncontract = "tolerance"\n'
    edit = f"open({str(tmp_path / 'candidates.toml')!r}, 'w').write({CONTROL.format(stem='mine')!r})"
    file = submit(tmp_path, "mine", " * 2", honest, first=edit)
    # No stage but guards may fail a library file on a CPU that is declared, so the words tell: still no control.
    result = call("gate", file, *SMALL, "--require", "stress", "--declarations", tmp_path / "candidates.toml")
    assert 'contract = "control"' in (tmp_path / "candidates.toml").read_text(), "the candidate was to edit it"
    assert result.exit_code != 0 and "as a control does" not in result.output, result.output


@pytest.mark.parametrize(("vouched", "code"), [(False, 1), (True, 0)])
def test_a_self_declared_precision_spares_no_exit_code_of_eval(vouched: bool, code: int, tmp_path: Path) -> None:
    """ "Declared for bf16 only" is an honest NOT_RUN, so it must not be the candidate's own word."""
    file = submit(tmp_path, "mine", " * 2", ELSEWHERE)
    option = ["--declarations", tmp_path / "candidates.toml"] if vouched else []
    result = call("eval", file, *SMALL, "--only", "official", "--out", tmp_path / "r.json", *option)
    assert result.exit_code == code, result.output
    assert ("does not count" in result.output.replace("\n", " ")) is not vouched


def test_a_table_that_the_caller_names_and_cannot_be_read_is_a_wrong_call(tmp_path: Path) -> None:
    file = submit(tmp_path, "mine", "")
    for command in ("gate", "eval", "bench"):
        result = call(command, file, *SMALL, "--declarations", tmp_path / "nowhere.toml")
        assert result.exit_code == 2 and "nowhere.toml: cannot be read" in result.output, result.output


def test_a_folder_of_the_right_name_is_not_this_repositorys(tmp_path: Path) -> None:
    file = submit(tmp_path / "kbsub" / "submissions" / "level1_40", "mine", " * 2")
    assert not is_ours(file) and declaration_of(file) is None
    assert read_declared([file]).of(file) == {}


def test_a_broken_table_of_somebody_elses_is_ignored_like_any(tmp_path: Path) -> None:
    file = submit(tmp_path, "mine", "", "[mine")
    found = read_declared([file])
    assert not found.wrong and found.ignored == (tmp_path / "candidates.toml",)
    with pytest.raises(DeclarationError, match="is not TOML"):
        read_declared([file], tmp_path / "candidates.toml")


@pytest.mark.parametrize("file", OWN, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_file_of_this_repository_is_declared_as_before(file: Path) -> None:
    wanted = read_declarations(file.parent)[file.stem]
    assert read_declared([file]).of(file) == wanted.model_dump(mode="json")


def test_this_repositorys_files_take_no_row_of_somebody_elses_table(tmp_path: Path) -> None:
    """A vouched-for table speaks of the caller's files: it cannot turn a rung of the ladder into a control."""
    rung = SUBMISSIONS / "level1_40" / "reference_order.py"
    (tmp_path / "t.toml").write_text(CONTROL.format(stem="reference_order"))
    assert read_declared([rung], tmp_path / "t.toml").of(rung)["contract"] == "bit-identical"


def test_a_link_is_declared_as_the_file_that_it_leads_to(tmp_path: Path) -> None:
    """Named like a control, leading to a kernel that promises bits; and from a task's name to somebody's own text."""
    link = tmp_path / "split_flat.py"
    link.symlink_to(SUBMISSIONS / "level1_40" / "reference_order.py")
    assert read_declared([link]).of(link)["contract"] == "bit-identical"
    assert is_ours(Path(next(iter(kbsub.submissions.__path__))) / "level1_40" / "split_flat.py")


def test_only_this_repositorys_files_share_a_child(tmp_path: Path) -> None:
    """Vouched for or not: a neighbour in the same process could change what the others' classes return."""
    mine = submit(tmp_path, "mine", "", CONTROL)
    ladder = [SUBMISSIONS / "level1_40" / f"{stem}.py" for stem in ("split_eager", "native_torchscript")]
    files = (mine, *ladder)
    task = load_local_task(TESTS / "support" / "small_layer_norm_task" / "reference.py")
    plan = Plan(
        task,
        "level1_40",
        files,
        ("stress",),
        "fp32",
        "cpu",
        None,
        9.0,
        declared=read_declared(files, tmp_path / "candidates.toml"),
    )
    assert plan.declaration_for(mine)[0]["contract"] == "control"
    assert [each["stem"] for each in _declared_payloads(plan)] == ["split_eager", "native_torchscript"]


def test_bench_believes_no_table_of_somebody_elses(tmp_path: Path) -> None:
    """same_function = false would hold an output to the candidate's own first one instead of the reference."""
    toml = CONTROL.replace("expect", "same_function = false\nexpect")
    file = submit(tmp_path, "mine", " * 2", toml)
    for believed, same in ((None, True), (tmp_path / "candidates.toml", False)):
        assert read_candidate(file, read_declared([file], believed).rows.get(file)).same_function is same
