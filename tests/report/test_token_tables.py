"""Bandwidth, a candidate against its rivals, inputs times 100: from result files alone, and the picture of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kbsub.eval.report import papers as report
from kbsub.eval.report import plots, token_tables
from kbsub.eval.results.model import Result, ResultError, read_result, write_json_atomic
from support.cells import column, row
from support.paths import ROOT
from support.stored_result import candidate, content, cuda_event, replay, with_files

SHAPES = ("4096x512", "8192x8192")
# Times of the copy: `mine` loses to `rival` at the first shape, ties it at the second, and always beats eager.
TIMES = {"copy": (1.0, 1.0), "eager": (3.0, 2.0), "mine": (1.25, 1.05), "rival": (1.1, 1.05), "ctl": (9.0, 9.0)}


def cold(value: float, seed: int) -> dict[str, Any]:
    return {"status": "OK", "timing": replay(value, seed=seed, noise=1e-4, method="cold_replay")}


@pytest.fixture
def stored() -> dict[str, Any]:
    data = content()
    data["baselines"], data["candidates"] = {}, {}
    for index, (name, factors) in enumerate(TIMES.items()):
        shapes = {key: cold(0.01 * f, 10 * index + at) for at, (key, f) in enumerate(zip(SHAPES, factors, strict=True))}
        if name in ("copy", "eager"):
            data["baselines"][f"{name}@fp16"] = {"timing": {}, "shapes": shapes}
        else:
            contract = "control" if name == "ctl" else "tolerance"
            data["candidates"][f"{name}@fp16"] = candidate(1.0, contract=contract, precision="fp16", shapes=shapes)
    return data


@pytest.fixture
def result(stored: dict[str, Any]) -> Result:
    return Result.model_validate(stored)


def test_bandwidth_is_bytes_over_time(result: Result) -> None:
    table = token_tables.bandwidth_table(result, ["fp32", "fp16"])
    assert table.headers == ["program", "precision", "4096 x 512", "8192 x 8192"]
    gb_s = 2 * 4096 * 512 * 2 / 1e-5 / 1e9
    assert float(column(table, "copy of the input", "4096 x 512")) == pytest.approx(gb_s, rel=2e-3)
    assert column(table, "`mine`", "4096 x 512") == f"{gb_s / 1.25:.0f} (80%)"
    assert [cells[0] for cells in table.rows][-2:] == ["eager", "`ctl`"], "the fastest first"
    chosen = token_tables.bandwidth_table(result, ["fp16"], ["mine"])
    assert [cells[0] for cells in chosen.rows] == ["copy of the input", "`mine`"]


def test_a_program_that_was_not_timed_says_why(stored: dict[str, Any]) -> None:
    stored["candidates"]["mine@fp16"]["shapes"]["8192x8192"] = {"status": "OUT_OF_MEMORY"}
    table = token_tables.bandwidth_table(Result.model_validate(stored), ["fp16"])
    assert column(table, "`mine`", "8192 x 8192") == "OUT_OF_MEMORY"


def test_without_a_ring_the_copy_decides_the_method(stored: dict[str, Any]) -> None:
    for name, value in (("copy", 0.002), ("mine", 0.0025)):
        rows = stored["baselines" if name == "copy" else "candidates"]
        rows[f"{name}@fp16"]["shapes"]["4096x512"]["timing"] = cuda_event(value)
    table = token_tables.bandwidth_table(Result.model_validate(stored), ["fp16"], ["mine", "rival"])
    assert column(table, "`mine`", "4096 x 512").endswith("(80%)")
    assert column(table, "`rival`", "4096 x 512") == "OK", "a replay is not held against an event"


def test_a_tie_and_a_loss_are_both_listed(result: Result) -> None:
    table = token_tables.rivals_table(result, "mine", ["fp16"], only_exceptions=True)
    assert table.headers == ["shape", "precision", "of copy", "`rival`"], "what it always beats is a note"
    assert row(table, "4096 x 512")[2] == "**80%**" and row(table, "8192 x 8192")[2] == "95%"
    assert row(table, "4096 x 512")[3].startswith("SLOWER 0.880 (")
    assert row(table, "8192 x 8192")[3].startswith("SAME 1.000 (")
    assert "1 of 2 scenes reach 90%" in table.notes[1] and "than: eager, `ctl`." in table.notes[1]


def test_where_it_is_faster_everywhere_nothing_is_listed(result: Result) -> None:
    table = token_tables.rivals_table(result, "rival", ["fp16"])
    assert row(table, "4096 x 512")[3].startswith("FASTER 2.7") and len(table.rows) == 2
    for shape in SHAPES:
        del result.candidates["mine@fp16"].shapes[shape]
    assert token_tables.rivals_table(result, "rival", ["fp16"], only_exceptions=True).rows == []


X100 = {
    "input": "x",
    "rows": {
        "float64": {"first": [-1.17053, 0.5], "max_abs_error": 0.0, "zeros": 0, "nans": 0},
        "half": {"first": [0.0, 0.0], "max_abs_error": 5.1, "zeros": 8, "nans": 0},
        "gone": {"error": "ValueError: no"},
    },
}


def test_x100_puts_the_oracle_beside_the_zeros(tmp_path: Path) -> None:
    path = token_tables.x100_path(tmp_path / "task.json")
    assert path.name == "task_x100.json"
    assert "no such results" in token_tables.read_x100(path).markdown()
    write_json_atomic(path, X100)
    table = token_tables.read_x100(path)
    assert row(table, "float64 (oracle)")[1:3] == ["-1.1705", "0.5000"]
    assert row(table, "`half`")[1:] == ["0.0000", "0.0000", "5.1e+00", "8", "0"]
    assert column(table, "`gone`", "max abs error") == "ValueError: no"
    path.write_text("{}")
    with pytest.raises(ResultError, match=r"task_x100\.json: is not what"):
        token_tables.read_x100(path)


def test_the_picture_has_every_precision_and_no_control(result: Result) -> None:
    data = plots.bandwidth_data(result)
    assert list(data["lines"]) == ["copy of the input", "rival", "mine", "eager"], "the nearest to the copy first"
    (key, _, percent), _ = data["lines"]["mine"]["fp16"]
    assert key == "4096x512" and percent == pytest.approx(80, abs=0.5)
    assert plots.names_in(data) >= {"mine", "eager"}


def test_the_sections_reach_the_papers(tmp_path: Path, stored: dict[str, Any]) -> None:
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    write_json_atomic(folder / "tokens.json", stored)
    write_json_atomic(folder / "tokens_x100.json", X100)
    names = ("bandwidth", "rivals candidates=mine only=exceptions", "x100 precision=fp16", "plot-bandwidth")
    marks = [f"<!-- report:{name.replace(' ', ' task=tokens ', 1)} -->\n<!-- /report -->\n" for name in names[1:3]]
    marks += [f"<!-- report:{name} task=tokens -->\n<!-- /report -->\n" for name in (names[0], names[3])]
    (tmp_path / "README.md").write_text("".join(marks))
    report.remake(tmp_path)
    text = (tmp_path / "README.md").read_text()
    for words in ("SLOWER 0.880", "| `half` | 0.0000 |", "(80%)", "(results/h200/tokens_bandwidth.png)"):
        assert words in text, words
    assert report.out_of_date(tmp_path) == []


# section -> what it says of `mine` once the file of `mine` has changed; all of `mine` is fp16
MARKED = [
    ("bandwidth", "| `mine`† | fp16 |"),
    ("rivals candidates=mine", "How many times faster `mine`† is"),
    ("rivals candidates=rival only=exceptions", "| `mine`† |"),
    ("rivals candidates=ctl only=exceptions", "| `mine`† |"),
    ("plot-bandwidth", "_bandwidth.png)\n\n† `mine` was"),
]


@pytest.mark.parametrize(("section", "words"), MARKED)
def test_a_program_of_another_version_is_marked(
    tmp_path: Path, stored: dict[str, Any], section: str, words: str
) -> None:
    (tmp_path / "results" / "h200").mkdir(parents=True)
    files = tmp_path / "submissions" / "tokens"
    with_files(stored, files)
    write_json_atomic(tmp_path / "results" / "h200" / "tokens.json", stored)
    (tmp_path / "README.md").write_text(f"<!-- report:{section} task=tokens -->\n<!-- /report -->\n")
    assert "†" not in report.remade(tmp_path / "README.md", tmp_path)
    (files / "mine.py").write_text("# mine, mended\n")
    text = report.remade(tmp_path / "README.md", tmp_path)
    assert words in text, text
    assert text.count("† `mine` was measured on an earlier version") == 1
    assert "--precision fp16" in text.partition("† `mine` was")[2]


# ---- what is committed ----

TOKENS = ROOT / "results" / "h200" / "local_layernorm_tokens.json"


def test_half_sums_are_zeros_and_nothing_else_is() -> None:
    rows = json.loads(token_tables.x100_path(TOKENS).read_text())["rows"]
    zeros = {name for name, stored in rows.items() if not any(stored["first"])}
    assert zeros == {"f16_f16", "f16x2_f16", "f16x8_f16", "f16x8_pack_f16"}
    assert all(rows[name]["zeros"] == 4096 * 512 for name in zeros)


def test_the_stored_stress_rows_are_what_the_declarations_say() -> None:
    """candidates.toml may be made stricter after a run: the rows of the run must still agree with it."""
    from kbsub.eval.suite.records import contradictions
    from kbsub.eval.tasks.declarations import read_declarations
    from kbsub.eval.verdicts.stress.registration import Stress

    declared = read_declarations(ROOT / "submissions" / "local_layernorm_tokens")
    left = set()
    judged = 0
    for key, stored in read_result(TOKENS).candidates.items():
        stem, _, precision = key.partition("@")
        if stem in declared and stored.verdict(Stress) is not None:
            said = declared[stem].model_dump(mode="json")
            assert contradictions(stored.verdict(Stress).cases, said, precision or "fp32") == [], key
            judged += 1
        elif stem in declared:
            left.add(key)
    assert not left, "kbsub measure tokens --stages background"
    assert judged == sum(len(each.precision) for each in declared.values())
