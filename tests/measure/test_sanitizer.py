"""What the sanitizer program decides without a GPU: which shapes reach which kernels, what a tool's output means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kbsub.eval.host_executor import H200_LIMITS, SMALL_LIMITS, HostExecutor, adopt
from kbsub.eval.measure import sanitizer as ms
from kbsub.eval.measure.children import sanitizer_cases as sc

torch.set_num_threads(1)
FILES = sc.candidates()
PARTS = [(name, precision) for name, file in FILES.items() for precision in file.precisions]
MOST = 150_000  # elements of a case that is computed here; the larger ones are only launched


class Unexecuted(HostExecutor):
    """Checks and counts launches, and computes nothing: the geometry of the real device at any size."""

    def execute(self, *order: Any) -> None:
        pass


def exercised(name: str, precision: str, limits: Any, executor: HostExecutor, most: int) -> dict[str, Any]:
    """The cases of at most `most` elements; of the others those that a kernel still needs."""
    space: dict[str, Any] = {"__name__": "candidate"}
    exec(compile(FILES[name].source, name, "exec"), space)
    adopt(space, limits, executor)
    base, reserve = sc.cases(name.split("/")[0], limits.multiprocessors)
    small = [case for case in base if case.rows * case.width <= most]
    table = (small, [case for case in (*base, *reserve) if case not in small])
    return sc.exercise(FILES[name], precision, space, "cpu", table)


@pytest.mark.parametrize(("name", "precision"), PARTS)
def test_the_shapes_reach_every_kernel_and_the_results_are_right(name: str, precision: str) -> None:
    row = exercised(name, precision, SMALL_LIMITS, HostExecutor(workers=1), MOST)
    assert row["failed"] is None, row
    if precision == FILES[name].precisions[0]:  # a kernel may be there in one dtype only
        assert row["kernels"] == sorted(FILES[name].kernels)
    assert any("+1" in words for words in (*row["cases"], *row["refused"])), "no storage that is not aligned"


@pytest.mark.parametrize(("name", "precision"), PARTS)
def test_they_reach_every_kernel_on_the_device_itself(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sc.TOLERANCE, precision, float("inf"))  # nothing is computed
    monkeypatch.setitem(sc.TOLERANCE, "half sums", float("inf"))
    row = exercised(name, precision, H200_LIMITS, Unexecuted(), 10**9)
    assert row["failed"] is None, row


def test_every_file_and_precision_is_in_one_group() -> None:
    assert {name.split("/")[0] for name in FILES} == set(sc.FOLDERS)
    for folder in sc.FOLDERS:
        sources = {f"{folder}/{path.stem}" for path in (sc.SUBMISSIONS / folder).glob("*.py")
                   if "CUDA_SOURCE =" in path.read_text("utf-8")}  # fmt: skip
        assert sources == {name for name in FILES if name.startswith(f"{folder}/")}
    assert sorted(part for group in sc.groups(FILES) for part in group) == sorted(PARTS)


def test_a_kernel_that_is_not_reached_and_a_wrong_result_fail() -> None:
    name = "level1_40/split_flat"
    file = FILES[name]._replace(kernels=(*FILES[name].kernels, "another"))
    space: dict[str, Any] = {"__name__": "candidate"}
    exec(compile(file.source, name, "exec"), space)
    adopt(space, SMALL_LIMITS, HostExecutor(workers=1))
    assert "another" in sc.exercise(file, "fp32", space, "cpu", ([sc.LaunchCase(2, 8)], []))["failed"]
    adopt(space, SMALL_LIMITS, Unexecuted())
    assert "off by inf" in sc.exercise(FILES[name], "fp32", space, "cpu", ([sc.LaunchCase(2, 8)], []))["failed"]


MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at write_outside+0x70
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f0000000200 is out of bounds
=========
========= Invalid __global__ write of size 4 bytes
=========     at write_outside+0x70
=========     by thread (1,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at void at::native::reduce_kernel<float>(T1)+0x90
=========     and Read access at void at::native::reduce_kernel<float>(T1)+0xd0 [96 hazards]
=========
========= Warning: Race reported between Write access at normalise_tiles+0x90 and Read access at normalise_tiles+0xd0
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_summaries_are_read() -> None:
    assert ms.read_summary("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == (0, 0, [])
    nothing = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert ms.read_summary("noise\n" + nothing) == (0, 0, [])
    assert ms.read_summary("========= ERROR SUMMARY: 1 error\n").errors == 1
    many = (
        "========= ERROR SUMMARY: 150 errors\n========= ERROR SUMMARY: 50 errors were not printed. Use --print-limit\n"
    )
    assert ms.read_summary(many).errors == 150
    said = ms.read_summary(MEMCHECK)
    assert (said.errors, said.warnings, len(said.messages)) == (2, 0, 2)
    assert said.messages[0].startswith("Invalid __global__ write of size 4 bytes; at write_outside+0x70; by thread")
    said = ms.read_summary(RACECHECK)
    assert (said.errors, said.warnings, len(said.messages)) == (1, 1, 2)
    refused = ms.read_summary(
        "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to ...\n"
    )
    assert refused.errors is None and refused.messages == ["Error: Device not supported. Please refer to ..."]


def test_reports_about_torchs_own_kernels_are_told_apart() -> None:
    said, row = ms.read_summary(RACECHECK), {"failed": None}
    assert ms.elsewhere(said.messages, {"normalise_tiles"}) == 1
    assert ms.state_of(row, said, {"normalise_tiles"}) == ("errors", 1)
    torchs = ms.Said(1, 0, said.messages[:1])
    assert ms.state_of(row, torchs, {"normalise_tiles"}) == ("clean", 1)
    assert ms.state_of(row, ms.Said(ms.PRINTED, 0, said.messages[:1] * ms.PRINTED), {"normalise_tiles"})[0] == "errors"
    assert ms.state_of(row, ms.Said(1, 0, ["Internal error"]), {"normalise_tiles"})[0] == "errors"
    assert ms.state_of(row, ms.Said(None, 0, ["Error: Device not supported"]), {"a"})[0].startswith("not certified")
    assert ms.state_of(None, ms.Said(0, 0, []), {"a"})[0].startswith("not certified")
    assert ms.state_of({"failed": "2x8: off"}, ms.Said(0, 0, []), {"a"})[0] == "failed: 2x8: off"


def test_no_folder_of_a_machine_is_recorded() -> None:
    path = "/".join(("", "opt", "torch", "lib.so"))
    assert ms.without_paths({"a": [f"in {path}: 1/2", 3]}) == {"a": ["in lib.so: 1/2", 3]}


def pretended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Any, *options: str
) -> tuple[int, dict[str, Any]]:
    """main() where each process says `answer(tool, parts)`: (Said, the parts that fail); parts: None for a plant."""

    def start(machine: Any, tool: str, *arguments: str) -> Any:
        out = tmp_path / f"{tool}-{abs(hash(arguments))}.json"
        parts = arguments[1].split(",") if arguments[0] == "--parts" else None
        said, failing = answer(tool, parts)
        good = {"kernels": [], "cases": [], "failed": None, "seconds": 0.1}
        if parts:
            out.write_text(
                json.dumps({part: good | {"failed": "wrong" if part in failing else None} for part in parts})
            )
        return said, "", out, 0.2

    monkeypatch.setattr(ms.Inspection, "start", start)
    monkeypatch.setattr(ms, "sanitizer_path", lambda given: "compute-sanitizer")
    monkeypatch.setattr(ms, "sanitizer_version", lambda program: "2025.3")
    monkeypatch.setattr(ms, "measured_on", lambda device: {"gpu": "NVIDIA H200"})
    return ms.main(["--out", str(tmp_path / "result.json"), *options]), json.loads(
        (tmp_path / "result.json").read_text()
    )


def planted(tool: str, parts: list[str] | None) -> Any:
    if parts is None:
        return ms.Said(1, 0, [f"Error at {ms.PLANTED[tool][0]}+0x10"]), ()
    return (None if tool == ms.PLAIN else ms.Said(0, 0, [])), ()


def test_a_clean_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, result = pretended(monkeypatch, tmp_path, planted)
    assert (code, result["verdict"]) == (0, "clean")
    assert set(result["runs"]) == {ms.PLAIN, *ms.REQUIRED, *ms.MORE}
    for rows in result["runs"].values():
        assert sorted((name.removesuffix(".py"), p) for name, row in rows.items() for p in row) == sorted(PARTS)


def test_a_run_that_is_stopped_certifies_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = []

    def answer(tool: str, parts: list[str] | None) -> Any:
        if (tmp_path / "result.json").exists():  # what a kill at this moment would leave
            found.append(json.loads((tmp_path / "result.json").read_text())["verdict"])
        return planted(tool, parts)

    code, result = pretended(monkeypatch, tmp_path, answer, "--workers", "1")
    assert (code, result["verdict"]) == (0, "clean")
    assert "clean" not in found and "not certified: stopped before the end; clean so far" in found


def test_without_a_sanitizer_earlier_evidence_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    monkeypatch.setattr(ms, "sanitizer_path", lambda given: None)
    assert ms.main(["--out", str(out)]) == 3 and "was not found" in json.loads(out.read_text())["verdict"]
    out.write_text("evidence")
    assert ms.main(["--out", str(out)]) == 3 and out.read_text() == "evidence"


def test_what_finds_nothing_planted_certifies_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused = lambda tool, parts: (ms.Said(None, 0, ["Error: Device not supported"]) if parts is None else None, ())
    code, result = pretended(monkeypatch, tmp_path, refused)
    assert code == 3 and "Device not supported" in result["verdict"] and set(result["runs"]) == {ms.PLAIN}
    optional = lambda tool, parts: (
        (ms.Said(0, 0, []), ()) if (tool, parts) == ("synccheck", None) else planted(tool, parts)
    )
    code, result = pretended(monkeypatch, tmp_path, optional)
    assert code == 0 and not result["planted"]["synccheck"]["found"] and "synccheck" not in result["runs"]


def test_an_error_is_pinned_to_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(tool: str, parts: list[str] | None) -> Any:
        if tool == "racecheck" and parts and "level1_40/split_flat:fp32" in parts:
            return ms.Said(1, 0, ["Error: Race reported between Write access at normalise_flat+0x10"]), ()
        return planted(tool, parts)

    code, result = pretended(monkeypatch, tmp_path, answer)
    assert (code, result["verdict"]) == (1, "errors found: racecheck level1_40/split_flat.py fp32")
    assert result["runs"]["racecheck"]["level1_40/reference_order.py"]["fp32"]["state"] == "clean"
