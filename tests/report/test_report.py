"""Tables, plots, manifest and markers: made from a result file alone, and the committed papers match theirs."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kbsub.eval.bench.record import keep_pairs
from kbsub.eval.report import papers as report
from kbsub.eval.report import plots, tables
from kbsub.eval.report import verdict_tables as report_tables
from kbsub.eval.results import manifest
from kbsub.eval.results.model import Result, read_result, write_json_atomic
from kbsub.eval.results.timing import Timing
from support.cells import column, row
from support.paths import ROOT
from support.stored_result import OTHER_RUN, bench_run, content, replay, with_files


@pytest.fixture
def result() -> Result:
    return Result.model_validate(content())


# ---- tables ----


def test_headline_picks_the_fastest_of_each_contract(result):
    table = report_tables.headline_table(result)
    assert [cells[0] for cells in table.rows] == ["`exact`", "`near`", "eager", "torch.compile default"]
    assert column(table, "`exact`", "speedup over eager") == "27.0x"
    assert column(table, "`exact`", "bit-equal cases") == "30/30"
    assert column(table, "`near`", "worst error against float64") == "2.0e-06 (+1000)"
    assert column(table, "eager", "worst error against float64") == "1.4e-03 (+1000)"


def test_official_table_copies_upstreams_words(result):
    table = report_tables.official_table(result)
    assert row(table, "`exact`")[2:5] == ["True", "True", "(5 / 5)"]
    assert column(table, "`exact`", "of memory floor") == "46%"
    assert column(table, "`exact`", "flags") == "excessive_speedup"
    assert row(table, "`broken`")[-1].startswith("COMPILE_ERROR")


def test_timing_table_compares_in_words_and_ranks_no_floor(result):
    table = tables.timing_table(result)
    assert column(table, "`exact`", "against eager").endswith("x FASTER")
    assert column(table, "torch.compile reduce-overhead", "against eager").endswith("FASTER (cuda_event)")
    assert column(table, "torch.compile reduce-overhead", "graph replay") == "-", "it replays graphs itself"
    assert row(table, "copy of the input")[-2:] == ["-", "-"]
    assert column(table, "`exact`", "of memory floor") == "48%"


def test_numbers_of_another_run_are_not_compared(result):
    stale = Result.model_validate(content())
    stale.candidates["exact"].timing["graph_replay"].run = OTHER_RUN
    assert column(tables.timing_table(stale), "`exact`", "against eager") == "-"
    assert "Timed in another run than eager, so not compared with it: `exact`." in tables.timing_table(stale).notes
    comparison = tables.paired(
        stale.candidates["exact"].timing["graph_replay"], stale.baselines["eager"].timing["graph_replay"]
    )
    assert (str(comparison.verdict), comparison.reason) == ("UNSURE", "not measured in the same run")


def test_a_candidate_is_held_against_the_baseline_of_its_own_run(result):
    """One candidate timed again, with eager: the others keep the eager that they were timed beside."""
    before = {key: baseline.model_copy(deep=True) for key, baseline in result.baselines.items()}
    for timings in (result.baselines["eager"].timing, result.baselines["eager"].shapes["8x32"].timing):
        timings |= {m: Timing.model_validate(t) for m, t in replay(9.0, run=OTHER_RUN).items()}
    result.candidates["near"].timing = {
        m: Timing.model_validate(t) for m, t in replay(0.18, run=OTHER_RUN, seed=3).items()
    }
    assert column(tables.timing_table(result), "`exact`", "against eager") == "-"
    assert tables.shapes_table(result, ["exact"]).rows[0][4] == "-"
    keep_pairs(result, before)
    assert column(tables.timing_table(result), "`exact`", "against eager") == "28.3x FASTER", "8.07 / (0.30 * 0.95)"
    assert column(tables.timing_table(result), "`near`", "against eager") == "50.0x FASTER", "9.0 / 0.18"
    assert tables.shapes_table(result, ["exact"]).rows[0][2:5] == ["8.999", "0.0500", "2.00x FASTER"]
    for each in result.candidates.values():  # nobody is of the old run any more: nothing is kept for nobody
        each.timing, each.shapes = None, None
    keep_pairs(result, {key: baseline.model_copy(deep=True) for key, baseline in result.baselines.items()})
    assert "earlier" not in result.baselines["eager"].model_dump()


def test_a_tie_is_never_printed_as_a_win():
    data = content()
    data["candidates"]["exact"]["timing"] = replay(8.07, seed=1)
    words = column(tables.timing_table(Result.model_validate(data)), "`exact`", "against eager")
    assert words == "1.00x SAME"


def test_trials_are_compared_by_pass(result):
    timing = result.baselines["eager"].timing["cuda_event"]
    assert len(timing.samples_ms) == 100 and len(timing.by_round()) == 10


def test_floors_table_gives_percent_of_each(result):
    table = tables.floors_table(result, ["exact", "near"])
    assert row(table, "the floor itself")[3:] == ["0.137 ms", "0.200 ms", "0.139 ms", "0.276 ms"]
    assert row(table, "`exact`")[3:] == ["48%", "70%", "49%", "97%"]


def test_floors_are_those_of_the_run_that_timed_the_official_shape():
    """A later run of other shapes, or a later verdict, measures its own copy: the three numbers are of one run."""
    data = content()
    official = {"bytes": 600, "input_bytes": 300, "memory_floor_ms": 0.14}
    other = {"bytes": 60, "input_bytes": 30, "memory_floor_ms": 0.02}
    runs = {
        "1": bench_run({"official@fp32": {**official, "memory_floor_ms": 0.5}}, {"copy_gb_s": 1.0}),
        "2": bench_run({"official@fp32": official}, {"copy_gb_s": 4000.0, "chain_ms": 0.15}),
        "3": bench_run({"8x32@fp32": other}, {"copy_gb_s": 3000.0, "chain_ms": 0.16}),
    }
    result = Result.model_validate({**data, "bench": {"runs": runs}})
    words = "copy 4000 GB/s, every byte once 0.140 ms, input read twice 0.210 ms, chain of the reference order 0.150 ms"
    assert any(note.endswith(f"{words}.") for note in tables.timing_notes(result, "fp32"))
    table = tables.floors_table(result, ["exact"])
    assert row(table, "the floor itself")[3:] == ["0.140 ms", "0.210 ms", "0.150 ms", "0.290 ms"]
    assert plots.time_data(result)["floors"]["chain of the reference order"] == 0.15


def test_shapes_table_has_eager_ours_and_ratio(result):
    table = tables.shapes_table(result, ["exact"])
    assert table.rows[0][:2] == ["8 x 32", "fp32"]
    assert table.rows[0][4:] == ["2.00x FASTER", "9/9"]
    assert table.rows[1] == ["1 x 99", "fp32", "0.200", "-", "-", "-"], "a shape that was not timed stays visible"


def test_oracle_table_shows_both_errors(result):
    table = report_tables.oracle_table(result)
    assert row(table, "+1000")[1] == "1.4e-03" and column(table, "+1000", "`near`") == "2.0e-06"


def test_no_number_at_all_is_the_worst_error():
    data = content()
    data["candidates"]["near"]["oracle"]["+-1e18"] = {"reference_max_abs": "NaN", "candidate_max_abs": "NaN"}
    data["baselines"]["eager"]["oracle"] = {"+-1e18": {"candidate_max_abs": 1.0}}
    result = Result.model_validate(data)
    table = report_tables.headline_table(result)
    assert column(table, "`near`", "worst error against float64") == "nan (+-1e18)"
    assert column(table, "eager", "worst error against float64") == "1.0e+00 (+-1e18)"
    oracle = report_tables.oracle_table(result)
    assert oracle.headers.count("eager") == 1 and row(oracle, "+-1e18")[1] == "1.0e+00"
    assert plots.error_data(result)["left_out"] == ["near: nan"]


def test_verdicts_say_who_is_faster(result):
    table = tables.verdicts_table(result, ["exact"])
    assert column(table, "torch.compile default", "`exact`").startswith("FASTER 1.16x (")
    assert column(table, "`near`", "`exact`").startswith("SLOWER 0.6")


def test_markdown_escapes_and_says_when_it_is_empty():
    table = tables.Table("t", ["a", "b"], [["x|y", "1"]])
    assert table.markdown().splitlines()[-1] == "| x\\|y | 1 |"
    assert "no such results" in tables.Table("t", ["a"]).markdown()


# ---- markers, plots, manifest ----


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    stored = with_files(content(), tmp_path / "submissions" / "level1_40")
    write_json_atomic(folder / "level1_40.json", stored)
    text = "# P\n\n<!-- report:headline -->\nstale words\n<!-- /report -->\n\ntext\n\n<!-- report:plot-time -->\n"
    text += "<!-- /report -->\n"
    (tmp_path / "README.md").write_text(text)
    ladder = "<!-- report:shapes candidates=exact -->\n<!-- /report -->\n<!-- report:plot-error -->\n<!-- /report -->\n"
    (tmp_path / "submissions" / "level1_40" / "README.md").write_text(ladder)
    return tmp_path


def test_remake_fills_papers_draws_plots_and_lists_them(project):
    written = report.remake(project)
    assert sorted(written) == [
        "README.md",
        "results/h200/MANIFEST.sha256",
        "results/h200/level1_40_error.png",
        "results/h200/level1_40_time.png",
        "submissions/level1_40/README.md",
    ]
    text = (project / "README.md").read_text()
    assert "| `exact` | bit-identical | 0.300 |" in text and "stale words" not in text and "\ntext\n" in text
    assert "](results/h200/level1_40_time.png)" in text
    assert "](../../results/h200/level1_40_error.png)" in (project / "submissions/level1_40/README.md").read_text()
    assert report.out_of_date(project) == [] and report.remake(project) == [], "a second run changes nothing"


# what somebody changes -> what must be found stale
CHANGES = {
    "a number in a paper": (lambda p: edit(p / "README.md", "0.300", "0.250"), ["README.md"]),
    "a result": (
        lambda p: edit(p / "results/h200/level1_40.json", '"runtime": 0.3', '"runtime": 0.31'),
        ["README.md", "results/h200/MANIFEST.sha256", "results/h200/level1_40_error.png"],
    ),
    "a picture goes": (
        lambda p: (p / "results/h200/level1_40_time.png").unlink(),
        ["results/h200/MANIFEST.sha256", "results/h200/level1_40_time.png"],
    ),
}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_match_the_results_is_named(project, change):
    report.remake(project)
    act, expected = CHANGES[change]
    act(project)
    assert sorted(report.out_of_date(project)) == expected


def test_pictures_are_pictures_and_know_their_data(project):
    report.remake(project)
    from PIL import Image

    for name in ("time", "error"):
        path = project / f"results/h200/level1_40_{name}.png"
        with Image.open(path) as image:
            assert image.size[0] > 800 and image.getpixel((2, 2))[:3] == (255, 255, 255), "a card of its own, opaque"
        assert plots.stored_digest(path) == plots.data_digest(
            plots.PLOTS[name][0](read_result(project / "results/h200/level1_40.json"), "fp32")
        )


def test_labels_of_neighbouring_points_do_not_write_over_each_other():
    row = [(10.0, 50.0), (12.0, 50.0), (14.0, 52.0), (300.0, 50.0)]  # three points that nearly touch, one far away
    lines = plots.label_lines(row, ["a" * 20, "b" * 20, "c" * 20, "d"])
    assert sorted(lines[:3]) == [0, 1, 2] and lines[3] == 0
    assert plots.label_lines([(0.0, 0.0), (0.0, 100.0)], ["low", "high"]) == [0, 0]


def test_every_kind_differs_by_more_than_its_colour():
    looks = [(hatch, marker) for _, hatch, marker in plots.KINDS.values()]
    markers = [marker for _, marker in looks]
    assert len(set(markers)) == len(markers), "points"
    plain_bars = [kind for kind, (_, hatch, _) in plots.KINDS.items() if not hatch]
    assert plain_bars == ["bit-identical", "baseline"], "blue and light grey differ in brightness alone"


# ---- rows measured on another version of their file ----

FRESH_SECTIONS = [  # section -> how the row or column of `exact` begins when it is fresh, and when its file has changed
    ("headline", "| `exact` |", "| `exact`† |"),
    ("official", "| `exact` |", "| `exact`† |"),
    ("checks", "| `exact` |", "| `exact`† |"),
    ("timing", "| `exact` |", "| `exact`† |"),
    ("floors candidates=exact", "| `exact` |", "| `exact`† |"),
    ("verdicts candidates=exact", "| `exact` |", "| `exact`† |"),
    ("shapes candidates=exact", "| `exact` ms |", "| `exact`† ms |"),
    ("oracle", "| `exact` |", "| `exact`† |"),
]


def paper(project: Path, marker: str) -> str:
    file = project / "README.md"
    file.write_text(f"<!-- report:{marker} -->\n<!-- /report -->\n")
    return report.remade(file, project)


@pytest.mark.parametrize(("marker", "fresh", "marked"), FRESH_SECTIONS)
def test_every_table_marks_a_row_of_another_version_of_its_file(project, marker, fresh, marked):
    text = paper(project, marker)
    assert fresh in text and "†" not in text
    file = project / "submissions/level1_40/exact.py"
    file.write_text("# exact, mended\n")
    text = paper(project, marker)
    assert marked in text and fresh not in text
    before = hashlib.sha256(b"# exact\n").hexdigest()[:8]
    (note,) = [line for line in text.splitlines() if line.startswith("†")]
    assert f"`exact` was measured on an earlier version of the file: sha256 {before}…;" in note
    assert "`kbsub eval exact --out results/h200/level1_40.json`" in note
    assert "`near`†" not in text, "its file is as it was"


def test_a_row_whose_file_is_gone_is_marked(project):
    (project / "submissions/level1_40/near.py").unlink()
    text = paper(project, "headline")
    assert "| `near`† |" in text and "submissions/level1_40 has no such file any more." in text
    assert "| `exact` |" in text


def test_a_peers_file_counts(project):
    there = project / "submissions/level1_40/near.py"
    (there.parent / "peers").mkdir()
    there.rename(there.parent / "peers" / "near.py")
    assert "†" not in paper(project, "timing")
    (there.parent / "peers" / "near.py").write_text("# another\n")
    assert "| `near`† |" in paper(project, "timing")


def test_each_precision_is_held_against_the_version_it_was_measured_on(project):
    """fp16 of an earlier version, fp32 of this one: only tables that show fp16 say so, and name the precision."""
    path = project / "results/h200/level1_40.json"
    stored = json.loads(path.read_text())
    stored["candidates"]["exact@fp16"] = {**stored["candidates"]["exact"], "precision": "fp16", "sha256": "d" * 64}
    write_json_atomic(path, stored)
    assert "†" not in paper(project, "timing")
    assert "† `exact`" in paper(project, "timing precision=fp16")
    text = paper(project, "shapes candidates=exact")
    assert "| `exact`† ms |" in text and "`kbsub eval exact --precision fp16 --out " in text
    assert "†" not in paper(project, "shapes candidates=exact precision=fp32")


def test_a_plot_says_it_below(project):
    assert "†" not in paper(project, "plot-time")
    (project / "submissions/level1_40/exact.py").write_text("# exact, mended\n")
    assert "\n\n† `exact` was measured on an earlier version" in paper(project, "plot-time")


def test_a_changed_file_makes_the_papers_out_of_date(project):
    report.remake(project)
    (project / "submissions/level1_40/near.py").write_text("# near, mended\n")
    assert report.out_of_date(project) == ["README.md", "submissions/level1_40/README.md"]
    report.remake(project)
    (project / "submissions/level1_40/near.py").write_text("# near, mended again\n")
    assert report.out_of_date(project) == [], "as far from the measured version as before"
    (project / "submissions/level1_40/near.py").write_text("# near\n")
    assert "README.md" in report.out_of_date(project), "and a renewed one as well: the mark must go"


BROKEN_MARKERS = [
    ("<!-- report:nonsense -->\n<!-- /report -->\n", "known are headline"),
    ("<!-- report:headline -->\n", "has no <!-- /report -->"),
    ("<!-- report:shapes exact -->\n<!-- /report -->\n", "is not key=value"),
]


@pytest.mark.parametrize(("text", "words"), BROKEN_MARKERS)
def test_a_broken_marker_names_the_paper(project, text, words):
    (project / "README.md").write_text(text)
    with pytest.raises(report.ReportError, match=r"README\.md") as caught:
        report.remake(project)
    assert words in str(caught.value)


def test_without_results_the_papers_say_so(tmp_path):
    (tmp_path / "README.md").write_text(
        "<!-- report:headline -->\n<!-- /report -->\n<!-- report:plot-time -->\n<!-- /report -->\n"
    )
    assert report.remake(tmp_path) == ["README.md"]
    assert (tmp_path / "README.md").read_text().count("committed yet") == 2
    assert report.out_of_date(tmp_path) == []


def test_the_committed_papers_match_the_committed_results():
    assert report.out_of_date(ROOT) == [], "run: make report"


DAMAGE = [
    (lambda f: (f / "a.json").write_text("{ }"), "a.json: has sha256"),
    (lambda f: (f / "a.json").unlink(), "a.json: is listed and not there"),
    (lambda f: (f / "new.txt").write_text(""), "new.txt: is there and not listed"),
]


@pytest.mark.parametrize(("act", "words"), DAMAGE)
def test_verify_names_the_file(tmp_path, act, words):
    (tmp_path / "a.json").write_text("{}")
    manifest.write_manifest(tmp_path)
    assert manifest.check_manifest(tmp_path) == []
    act(tmp_path)
    assert [f"{p.file}: {p.what}".startswith(words) for p in manifest.check_manifest(tmp_path)] == [True]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum: not on this machine")
def test_the_manifest_is_sha256sums_own_format(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a b.json").write_text("{}")
    manifest.write_manifest(tmp_path)
    subprocess.run(["sha256sum", "-c", manifest.NAME], cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_where_there_is_no_paper_nothing_is_called_up_to_date(tmp_path, check):
    from typer.testing import CliRunner

    from kbsub.eval.cli import app

    outcome = CliRunner().invoke(app, ["report", "--root", str(tmp_path), *check])
    assert outcome.exit_code == 2 and "--root" in outcome.output


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "MANIFEST.sha256").mkdir()
    command = [sys.executable, "-m", "kbsub.eval.cli", "verify", "--write", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "choose another place" in done.stderr, done.stderr


def test_verify_command_refuses_a_result_of_another_schema(tmp_path):
    from typer.testing import CliRunner

    from kbsub.eval.cli import app

    (tmp_path / "level1_40.json").write_text(json.dumps({**content(), "schema": 99}))
    outcome = CliRunner().invoke(app, ["verify", "--write", str(tmp_path)])
    assert outcome.exit_code == 1 and "schema 99, this version reads schema 1" in outcome.output
