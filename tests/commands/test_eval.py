"""`kbsub eval` on the CPU path: a bad candidate costs its own row and the exit code, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from kbsub.eval.cli import app
from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.run import machine_facts
from kbsub.eval.run.runner import Row, record_outcome
from kbsub.eval.verdicts.register import KINDS

pytestmark = pytest.mark.usefixtures("warm_children")

REFERENCE = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2


def get_inputs():
    return [torch.rand(4, 5)]


def get_init_inputs():
    return []
"""

FORWARD = """
import ctypes, os, sys, time
import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        {body}
"""

# stem, source, status of the row, words of its reason
CANDIDATES = [
    ("good_first", FORWARD.format(body="return x + x"), "OK", "not an official verdict"),
    ("hangs", FORWARD.format(body="time.sleep(3600)"), "TIMEOUT", "TIMEOUT after 15 s in trial 1 (seed 734796314)"),
    ("exits", FORWARD.format(body="os._exit(0)"), "CRASHED", "exit code 0"),
    ("calls_sys_exit", FORWARD.format(body="sys.exit(0)"), "CRASHED", "sys.exit(0)"),
    ("segfaults", FORWARD.format(body="ctypes.string_at(0)"), "CRASHED", "SIGSEGV"),
    # An allocation that no machine grants; growth up to the limit is in test_isolation.py.
    ("out_of_memory", FORWARD.format(body="return torch.empty(1 << 50)"), "OUT_OF_MEMORY", "trial 1"),
    ("syntax_error", "class ModelNew(:\n", "COMPILE_ERROR", "line 1"),
    ("no_model_new", "class Model2: ...\n", "COMPILE_ERROR", "defines no ModelNew"),
    ("import_error", "import no_such_module\nclass ModelNew: ...\n", "COMPILE_ERROR", "no_such_module"),
    (
        "raises",
        FORWARD.format(body="raise ValueError('x must be contiguous')"),
        "RUNTIME_ERROR",
        "x must be contiguous",
    ),
    ("wrong_shape", FORWARD.format(body="return x[0]"), "INCORRECT_SHAPE", "(4, 5), got (5,)"),
    ("wrong_value", FORWARD.format(body="return x * 2.001"), "INCORRECT_NUMERICAL", "Output mismatch"),
    ("no_tensor", FORWARD.format(body="return None"), "INCORRECT_SHAPE", "NoneType"),
    ("prints_rubbish", FORWARD.format(body="print('\\0' * 100_000); return x * 2"), "OK", "not an official"),
    # Threads that spin while they wait would starve on a busy machine.
    ("waits", FORWARD.format(body="return x * (os.environ['OMP_WAIT_POLICY'] == 'PASSIVE') * 2"), "OK", "not an off"),
    ("wants_cuda", FORWARD.format(body="return x.cuda() * 2"), "NOT_RUN", "NVIDIA GPU"),
    ("cuda_file", "CUDA_SOURCE = ''\n" + FORWARD.format(body="return x"), "NOT_RUN", "CUDA_SOURCE"),
    ("good_last", FORWARD.format(body="return 2 * x"), "OK", "not an official verdict"),
]


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit code and output of `kbsub eval`, on a machine whose driver offers no GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_facts, "gpu_name", lambda index=0: None)
        outcome = CliRunner().invoke(app, ["eval", *arguments])
    return outcome.exit_code, outcome.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every candidate above as a file, beside a tiny reference program; one folder for all xdist workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "candidates"
    with FileLock(f"{folder}.guard"):
        if not folder.exists():
            folder.mkdir()
            (folder / "task.py").write_text(REFERENCE)
            for stem, source, _, _ in CANDIDATES:
                (folder / f"{stem}.py").write_text(source)
    return folder


@pytest.fixture(scope="module")
def whole_run(folder: Path) -> tuple[int, str, dict[str, Any]]:
    """One run over every candidate, by the first worker that needs it: exit code, output, the result file."""
    out, said = folder / "out.json", folder / "said.json"
    files = [str(folder / f"{stem}.py") for stem, *_ in CANDIDATES]
    options = ["--task", str(folder / "task.py"), "--only", "official", "--timeout", "15", "--out", str(out)]
    with FileLock(f"{said}.guard"):
        if not said.exists():
            said.write_text(json.dumps(invoke(*files, *options)))
    code, output = json.loads(said.read_text())
    return code, output, json.loads(out.read_text())


@pytest.mark.parametrize(("stem", "source", "status", "words"), CANDIDATES, ids=[row[0] for row in CANDIDATES])
def test_each_candidate_has_its_own_row(whole_run: Any, stem: str, source: str, status: str, words: str) -> None:
    found = whole_run[2]["candidates"][stem]
    assert found["status"] == status, found
    assert words in found["reason"], found["reason"]
    assert found["official"] is None, "no local case is ever an official verdict"


def test_failed_rows_cost_the_exit_code(whole_run: Any) -> None:
    assert whole_run[0] == 1


def test_output_says_what_to_do_and_that_nothing_was_certified(whole_run: Any) -> None:
    output = whole_run[1]
    assert "Nothing official was certified (no NVIDIA GPU)" in output
    assert (
        "hangs.py, official: TIMEOUT after 15 s in trial 1 (seed 734796314). Rerun it alone with: kbsub eval" in output
    )
    assert "--timeout 900" in output


def test_honest_rows_exit_zero_and_join_the_file(folder: Path, whole_run: Any) -> None:
    """A second run updates its rows and keeps the others."""
    out = folder / "second.json"
    out.write_text(json.dumps(whole_run[2]))
    task = ["--task", str(folder / "task.py"), "--only", "official", "--out", str(out)]
    code, output = invoke(str(folder / "cuda_file.py"), str(folder / "good_last.py"), *task)
    rows = json.loads(out.read_text())["candidates"]
    assert code == 0, output
    assert rows.keys() == whole_run[2]["candidates"].keys()
    assert rows["hangs"] == whole_run[2]["candidates"]["hangs"]


def test_rows_before_an_interrupt_are_in_the_file(folder: Path, tmp_path: Path) -> None:
    """The parent is killed while the second candidate hangs: the first row is there, and the file is whole."""
    out = tmp_path / "out.json"
    files = [str(folder / f"{stem}.py") for stem in ("good_first", "hangs")]
    command = [sys.executable, "-m", "kbsub.eval.cli", "eval", *files, "--task", str(folder / "task.py")]
    parent = subprocess.Popen([*command, "--only", "official", "--out", str(out), "--device", "cpu"])
    try:
        for _ in range(600):
            if out.exists():
                break
            try:
                parent.wait(0.1)
                pytest.fail("the run ended before it was interrupted")
            except subprocess.TimeoutExpired:
                continue
    finally:
        parent.kill()
        parent.wait()
    assert json.loads(out.read_text())["candidates"]["good_first"]["status"] == "OK"
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]


# arguments after the files, exit code, words
CALLS = [
    (["--only", "officail"], 2, "no such stage; there are official, identity"),
    (["--device", "tpu"], 2, "write cuda, cuda:<index> or cpu"),
    (["--device", "cpu:1"], 2, "write cuda, cuda:<index> or cpu"),
    (["--device", "cuda:x"], 2, "write cuda, cuda:<index> or cpu"),
    (["--device", "cuda"], 3, "offers no such GPU"),
    (["--precision", "fp8"], 2, "fp32, fp16, bf16"),
    (["--task", "level1"], 2, "level<L>_<id>"),
    (["--kernelbench", "nowhere"], 2, "nowhere"),
    (["absent_file.py"], 2, "no such candidate file"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), CALLS, ids=[" ".join(row[0]) for row in CALLS])
def test_wrong_call(folder: Path, tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    task = [] if "--task" in arguments else ["--task", str(folder / "task.py")]
    out = tmp_path / "out.json"
    found, output = invoke(str(folder / "good_first.py"), *task, *arguments, "--out", str(out))
    assert (found, out.exists()) == (code, False), output
    assert words in " ".join(output.split())


@pytest.mark.parametrize("command", ["bench", "baseline"])
@pytest.mark.parametrize("device", ["cuda:x", "cuda:", "tpu", "cpu:1"])
def test_every_command_reads_device_alike(command: str, device: str) -> None:
    """`kbsub bench --device cuda:x` ended in a traceback."""
    answer = CliRunner().invoke(app, [command, "--device", device])
    assert answer.exit_code == 2 and f"--device {device}: write cuda, cuda:<index> or cpu" in answer.output, answer


# what a candidate does to the result file while it is loaded
ATTACKS = {
    "deletes": "os.remove(OUT)",
    "damages": "open(OUT, 'w').write('{')",
    "forges": "open(OUT, 'w').write(TEXT.replace('\"OK\"', '\"CRASHED\"'))",
    "empties": "d = json.loads(TEXT); d['candidates'] = {}; json.dump(d, open(OUT, 'w'))",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_candidate_that_touches_the_result_file_costs_no_other_row(
    folder: Path, tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KBSUB_CELL", "unconfined")  # in a cell it cannot touch it
    out, hostile = tmp_path / "out.json", tmp_path / "hostile.py"
    said = f"import json\nOUT = {str(out)!r}\nTEXT = open(OUT).read()\n{ATTACKS[attack]}\n"
    hostile.write_text(FORWARD.format(body="return x * 2") + said)
    files = (str(folder / "good_first.py"), str(hostile))
    code, output = invoke(*files, "--task", str(folder / "task.py"), "--only", "official", "--out", str(out))
    assert code == 0, output
    rows = json.loads(out.read_text())["candidates"]
    assert {name: row["status"] for name, row in rows.items()} == {"good_first": "OK", "hostile": "OK"}


def test_a_candidate_that_makes_rubbish_of_a_new_result_file_costs_no_row(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KBSUB_CELL", "unconfined")
    out, hostile = tmp_path / "out.json", tmp_path / "hostile.py"
    hostile.write_text(FORWARD.format(body="return x * 2") + f"open({str(out)!r}, 'w').write('{{')\n")
    files = (str(hostile), str(folder / "good_first.py"))
    code, output = invoke(*files, "--task", str(folder / "task.py"), "--only", "official", "--out", str(out))
    assert code == 0, output
    assert sorted(json.loads(out.read_text())["candidates"]) == ["good_first", "hostile"]


def test_a_place_that_cannot_be_written_is_said_before_anything_runs(folder: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    out = str(blocked / "out.json")
    code, output = invoke(str(folder / "good_first.py"), "--task", str(folder / "task.py"), "--out", out)
    assert code == 2 and "cannot be written" in output and "good_first" not in output, output


@pytest.mark.parametrize(
    "option", [("--out", "x.json"), ("--task", "level1_40"), ("--declarations", "x.toml")], ids=lambda o: o[0]
)
def test_an_option_that_a_run_folder_has_no_use_for_is_refused(tmp_path: Path, option: tuple[str, ...]) -> None:
    (tmp_path / "level_1_problem_40_sample_0_kernel.py").write_text("")
    code, output = invoke(str(tmp_path), *option)
    assert code == 2 and f"kbsub eval: {option[0]}: " in output, output
    assert len(list(tmp_path.iterdir())) == 1


def test_names_in_tables_are_no_markup() -> None:
    from rich.console import Console

    from kbsub.eval.report.terminal import added_table, official_table

    plan = SimpleNamespace(task=SimpleNamespace(slug="level1_40", provenance="embedded"), precision="fp32")
    fields = {"status": "CRASHED"}
    row = Row(Path("a [red] b.py"), "x", fields, {"identity": Outcome(Status.NOT_RUN, None, "", "", 0.0)})
    for table, word in ((added_table([row]), "NOT_RUN"), (official_table(plan, [row]), "CRASHED")):
        console = Console(width=100)
        with console.capture() as shown:
            console.print(table)
        (line,) = [line for line in shown.get().splitlines() if word in line]
        assert line.split() == ["a", "[red]", "b", word]


def test_files_are_named_with_their_folder_or_alone() -> None:
    from kbsub.eval.report.terminal import explanations

    ended = {"official": Outcome(Status.CRASHED, None, "gone", "", 0.0)}
    lines = [explanations([Row(Path(name), "x", {}, ended)])[0].split(",")[0] for name in ("x.py", "a/b/x.py")]
    assert lines == ["x.py", "b/x.py"]


def test_same_stem_twice_is_a_wrong_call(folder: Path, tmp_path: Path) -> None:
    twin = tmp_path / "good_first.py"
    twin.write_text("")
    code, output = invoke(str(folder / "good_first.py"), str(twin), "--task", str(folder / "task.py"))
    assert code == 2 and "share a row" in output


def test_file_of_another_task_is_refused_before_anything_runs(folder: Path, tmp_path: Path, whole_run: Any) -> None:
    out = tmp_path / "out.json"
    out.write_text(json.dumps({**whole_run[2], "task": {**whole_run[2]["task"], "sha256": "0" * 64}}))
    before = out.read_text()
    code, output = invoke(str(folder / "hangs.py"), "--task", str(folder / "task.py"), "--out", str(out))
    assert code == 2 and "--out" in output
    assert out.read_text() == before


def test_parent_does_not_import_torch() -> None:
    """`kbsub --help` answers at once, and the parent never pays for what its children import again."""
    modules = "kbsub.eval.cli, kbsub.eval.run.runner, kbsub.eval.report.terminal"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_checkout_the_task_is_embedded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, no checkout: the run says so, works on the restated task, and certifies nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.delenv("KERNELBENCH_DIR", raising=False)
    out = tmp_path / "out.json"
    code, output = invoke(str(folder / "cuda_file.py"), "--out", str(out))
    assert code == 0 and "kbsub fetch" in output and "Nothing official was certified" in output
    assert json.loads(out.read_text())["task"]["provenance"] == "embedded"


@pytest.mark.skipif(not shutil.which("g++"), reason="g++: the host executor compiles with it")
def test_host_executor_is_never_called_official(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, output = invoke("split_flat", "--device", "cpu", "--only", "official", "--out", str(out))
    row = json.loads(out.read_text())["candidates"]["split_flat"]
    assert (code, row["status"], row["official"]) == (0, "OK", None), output
    assert row["cpu_check"]["executor"] == "host executor" and "not an official verdict" in row["reason"]


def test_malformed_stage_costs_only_itself() -> None:
    row = Row(Path("x.py"), "x", {"sha256": "0", "contract": None, "precision": "fp32", "status": "OK", "stages": {}})
    record_outcome(row, KINDS["stress"], Outcome(Status.OK, {"passed": "many"}, "", "", 1.0))
    assert row.fields["stages"]["stress"]["status"] == "RUNTIME_ERROR"
    assert "stress" not in row.fields and row.failed


# stage -> words of what it holds against a file whose every answer is wrong, or wrong until it asks for a GPU
HELD = {
    "identity": "official inputs, seed 0: beyond 0.0001 of native on cpu",
    "oracle": "official/initial/eps1e-05: max abs error",
    "referee": "outputs wrong: differs from the reference by up to",
}
THEN_A_GPU = """
import torch


class ModelNew(torch.nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("Found no NVIDIA driver on your system")
        return x * 2.5
"""


@pytest.mark.parametrize("stage", HELD)
def test_wrong_answers_are_no_ok_whatever_the_only_stage_is(folder: Path, tmp_path: Path, stage: str) -> None:
    """`wrong: referee OK`, exit 0: stages of which only a declaration said what a wrong answer costs."""
    wrong, out = tmp_path / "wrong.py", tmp_path / "out.json"
    wrong.write_text(FORWARD.format(body="return x * 2.5"))
    code, output = invoke(str(wrong), "--task", str(folder / "task.py"), "--only", stage, "--out", str(out))
    assert code == 1 and HELD[stage] in output and f"wrong: {stage} OK (" not in output, output


def test_a_file_that_asks_for_a_gpu_after_a_wrong_answer_is_wrong(folder: Path, tmp_path: Path) -> None:
    wrong, out = tmp_path / "wrong.py", tmp_path / "out.json"
    wrong.write_text(THEN_A_GPU)
    code, output = invoke(str(wrong), "--task", str(folder / "task.py"), "--only", "identity", "--out", str(out))
    assert code == 1 and "NOT_RUN" not in output and HELD["identity"] in output, output


@pytest.mark.parametrize(("contract", "held"), [("tolerance", 1), ("control", 0), (None, 1)])
def test_no_declaration_but_a_controls_makes_outputs_right_that_the_referee_found_wrong(
    contract: str | None, held: int
) -> None:
    record = {
        "outputs": 5,
        "wrong": 2,
        "problems": ["differs"],
        "device": "cpu",
        "precision": "fp32",
        "tolerance": 1e-4,
    }
    row = Row(
        Path("x.py"), "x", {"sha256": "0", "contract": contract, "precision": "fp32", "status": "OK", "stages": {}}
    )
    record_outcome(row, KINDS["referee"], Outcome(Status.OK, record, "", "", 1.0))
    assert len(row.problems("referee")) == held and row.failed == bool(held)
