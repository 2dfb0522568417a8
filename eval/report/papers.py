"""Remakes every table and plot of the papers from the committed result files (and docs/result.schema.json).

A paper (a Markdown file) marks where a table goes:

    <!-- report:shapes task=level1_40 gpu=h200 candidates=reference_order_pipelined -->
    ... replaced by `make report` ...
    <!-- /report -->

Options: task (level1_40), gpu (a folder of results/, default: h200, else the first that has the task), precision
(fp32), candidates (names by comma), only=exceptions (rivals). A test says that the papers match the results. A row that
was measured on another version of its candidate's file than the checkout has is marked, with a footnote. Knows files
and tables; measures nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kbsub.eval.report import blindspot_tables, freshness, plots, schema, tables, token_tables
from kbsub.eval.report import verdict_tables as report_tables
from kbsub.eval.report.evidence import evidence_table, tasks_table
from kbsub.eval.report.tables import Table
from kbsub.eval.results import manifest
from kbsub.eval.results.blindspots import FOLDER as BLINDSPOTS
from kbsub.eval.results.blindspots import records_in
from kbsub.eval.results.files import write_text_atomic
from kbsub.eval.results.model import Result, read_result

MARKER = re.compile(
    r"(<!-- report:(?P<name>[\w-]+)(?P<options>[^>]*?) -->\n)(?P<body>.*?)(<!-- /report -->)", re.DOTALL
)
DEFAULT_TASK, DEFAULT_GPU = "level1_40", "h200"


class ReportError(ValueError):
    """A marker that cannot be honoured; the message names the paper, the marker and what is known."""


@dataclass
class Request:
    """One marker: the paper it stands in, and its options."""

    paper: Path
    root: Path
    name: str
    options: dict[str, str] = field(default_factory=dict)

    @property
    def task(self) -> str:
        return self.options.get("task", DEFAULT_TASK)

    @property
    def precisions(self) -> list[str]:
        return self.options.get("precision", "fp32").split(",")

    @property
    def candidates(self) -> list[str]:
        return [name for name in self.options.get("candidates", "").split(",") if name]

    def result_path(self) -> Path | None:
        """The result file of the marker's task and GPU; None where none is committed."""
        results = self.root / "results"
        gpu = self.options.get("gpu")
        folders = [results / gpu] if gpu else [results / DEFAULT_GPU, *sorted(results.glob("*"))]
        return next((path for folder in folders if (path := folder / f"{self.task}.json").is_file()), None)


# Sections that show every precision unless the marker says which.
ALL_PRECISIONS = {"shapes", "bandwidth", "rivals", "plot-bandwidth"}


def _precisions(request: Request) -> list[str]:
    if request.name in ALL_PRECISIONS:
        return request.options.get("precision", ",".join(tables.PRECISIONS)).split(",")
    return request.precisions[:1]


def _chosen(result: Result, request: Request, *more: str) -> list[str]:
    """The marker's candidates, else the best bit-identical and the best accurate one (and `more`)."""
    best = (report_tables.best(result, "bit-identical"), report_tables.best(result, accurate=True), *more)
    return request.candidates or [name for name in dict.fromkeys(best) if name]


def _timing(result: Result, request: Request) -> Table:
    return tables.timing_table(result, request.precisions[0])


def _shapes(result: Result, request: Request) -> Table:
    names = request.candidates or [n for n in (report_tables.best(result, "bit-identical"),) if n]
    return tables.shapes_table(result, names, _precisions(request))


def _floors(result: Result, request: Request) -> Table:
    return tables.floors_table(result, _chosen(result, request, "compile_default"), request.precisions[0])


def _verdicts(result: Result, request: Request) -> Table:
    return tables.verdicts_table(result, _chosen(result, request), request.precisions[0])


def _headline(result: Result, request: Request) -> Table:
    return report_tables.headline_table(result)


def _official(result: Result, request: Request) -> Table:
    return report_tables.official_table(result, request.precisions[0])


def _checks(result: Result, request: Request) -> Table:
    return report_tables.checks_table(result, request.precisions[0])


def _oracle(result: Result, request: Request) -> Table:
    return report_tables.oracle_table(result, request.candidates, request.precisions[0])


def _bandwidth(result: Result, request: Request) -> Table:
    return token_tables.bandwidth_table(result, _precisions(request), request.candidates)


def _rivals(result: Result, request: Request) -> Table:
    only = request.options.get("only")
    if len(request.candidates) != 1 or only not in (None, "exceptions"):
        raise ReportError(f"{request.paper.name}: <!-- report:rivals -->: takes one candidate, and only=exceptions")
    precisions = _precisions(request)
    return token_tables.rivals_table(result, request.candidates[0], precisions, only_exceptions=only is not None)


def _x100(result: Result, request: Request) -> Table:
    path = request.result_path()
    assert path is not None, "section() returns before this where there is none"
    return token_tables.read_x100(token_tables.x100_path(path))


def _evidence(result: Result, request: Request) -> Table:
    path = request.result_path()
    assert path is not None, "section() has read the result there"
    return evidence_table(path.parent, request.root)


def _plot(result: Result, request: Request) -> str:
    """The link, and a footnote for every program in the picture whose file is another one now."""
    name, precision, path = request.name.removeprefix("plot-"), request.precisions[0], request.result_path()
    if path is None or name not in plots.names_with_data(result, precision):
        return f"_plot {name}: no such results are committed yet._"
    picture = plots.plot_path(path.parent, request.task, name, precision)
    data = plots.PLOTS[name][0](result, precision)
    link = f"![{data['title']}]({Path(os.path.relpath(picture, request.paper.parent)).as_posix()})"
    stale = [each for each in _outdated(result, request) if each.stem in plots.names_in(data)]
    return "\n\n".join([link, *freshness.footnotes(stale, *_renewal(result, request))])


def blindspots_section(request: Request) -> str:
    """The table of all records of one GPU: `blindspots`, or `blindspots-counts`; they belong to no result file."""
    folder = request.root / "results" / request.options.get("gpu", DEFAULT_GPU) / BLINDSPOTS
    precision = request.options.get("precision", "fp32")
    records = [record for record in records_in(folder) if record.precision == precision]
    if not records:
        return f"_No blind spots on {folder.parent.name} are committed yet: `kbsub blindspots` makes them._"
    counts = request.name.endswith("-counts")
    return (blindspot_tables.counts_table if counts else blindspot_tables.blindspots_table)(records).markdown()


def tasks_section(request: Request) -> str:
    """The table of `kbsub measure tasks` on one GPU, as far as it was measured."""
    path = request.root / "results" / request.options.get("gpu", DEFAULT_GPU) / "tasks.json"
    if not path.is_file():
        return f"_Nothing of this is committed yet: `kbsub measure tasks --out results/{path.parent.name}/tasks.json`._"
    try:
        return tasks_table(json.loads(path.read_text("utf-8"))).markdown()
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise ReportError(f"{path}: no file of kbsub measure tasks ({type(problem).__name__}: {problem})") from problem


OF_FOLDERS = {
    "blindspots": blindspots_section,
    "blindspots-counts": blindspots_section,
    "tasks": tasks_section,
}
SECTIONS: Mapping[str, Callable[[Result, Request], Table | str]] = {
    "headline": _headline,
    "official": _official,
    "checks": _checks,
    "timing": _timing,
    "verdicts": _verdicts,
    "floors": _floors,
    "shapes": _shapes,
    "oracle": _oracle,
    "bandwidth": _bandwidth,
    "evidence": _evidence,
    "rivals": _rivals,
    "x100": _x100,
    **{f"plot-{name}": _plot for name in plots.PLOTS},
}


def _outdated(result: Result, request: Request) -> list[freshness.Outdated]:
    return freshness.outdated(result, request.root / "submissions" / request.task, _precisions(request))


def _renewal(result: Result, request: Request) -> tuple[str, str]:
    """(the folder of the candidates, the options of `kbsub eval`) as a footnote words them."""
    folder, path = f"submissions/{request.task}", request.result_path()
    task = f"--task local:{folder}/reference.py " if result.task.level == 0 else ""
    task = task or ("" if request.task == DEFAULT_TASK else f"--task {request.task} ")
    return folder, f"{task}--out {path.relative_to(request.root).as_posix()}" if path is not None else task.strip()


def papers(root: Path) -> list[Path]:
    """Every Markdown file of the project that may hold markers."""
    found = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "submissions").rglob("*.md")]
    return sorted(path for path in found if "<!-- report:" in path.read_text("utf-8"))


def section(request: Request) -> str:
    """The text of one marker's section. Raises ReportError for an unknown name, ResultError for a broken result."""
    if request.name in OF_FOLDERS:
        return OF_FOLDERS[request.name](request)
    make = SECTIONS.get(request.name)
    if make is None:
        known = ", ".join([*SECTIONS, *OF_FOLDERS])
        raise ReportError(f"{request.paper.name}: <!-- report:{request.name} -->: known are {known}")
    path = request.result_path()
    if path is None:
        gpu = request.options.get("gpu", "any GPU")
        return f"_No results of {request.task} on {gpu} are committed yet; `make report` fills this in._"
    result = read_result(path)
    made = make(result, request)
    if isinstance(made, str):
        return made
    return freshness.mark(made, _outdated(result, request), *_renewal(result, request)).markdown()


def remade(paper: Path, root: Path) -> str:
    """The paper's text with every marked section made anew."""
    text = paper.read_text("utf-8")
    if text.count("<!-- report:") != len(MARKER.findall(text)):
        raise ReportError(f"{paper.name}: a <!-- report:... --> has no <!-- /report --> after it")

    def replace(match: re.Match[str]) -> str:
        words = match["options"].split()
        if bad := [word for word in words if "=" not in word]:
            raise ReportError(f"{paper.name}: <!-- report:{match['name']} -->: {bad[0]!r} is not key=value")
        options = dict(word.split("=", 1) for word in words)
        return f"{match[1]}{section(Request(paper, root, match['name'], options))}\n{match[5]}"

    return MARKER.sub(replace, text)


def wanted_plots(root: Path) -> list[tuple[Path, Result, str, str]]:
    """Every picture the papers show: (path, result, plot name, precision)."""
    found: dict[Path, tuple[Path, Result, str, str]] = {}
    for paper in papers(root):
        for match in MARKER.finditer(paper.read_text("utf-8")):
            name = match["name"].removeprefix("plot-")
            if name == match["name"] or name not in plots.PLOTS:
                continue
            request = Request(paper, root, match["name"], dict(w.split("=", 1) for w in match["options"].split()))
            path = request.result_path()
            if path is None:
                continue
            result, precision = read_result(path), request.precisions[0]
            picture = plots.plot_path(path.parent, request.task, name, precision)
            if name in plots.names_with_data(result, precision):
                found[picture] = (picture, result, name, precision)
    return list(found.values())


def out_of_date(root: Path) -> list[str]:
    """What `make report` would change: papers, pictures, manifests; [] when everything matches the results."""
    stale = [f"{path.relative_to(root)}" for path in papers(root) if remade(path, root) != path.read_text("utf-8")]
    stale += [
        f"{p.relative_to(root)}" for p, r, name, precision in wanted_plots(root) if plots.stale(r, name, precision, p)
    ]
    if (root / "docs").is_dir() and not schema.is_current(root / schema.FILE):
        stale.append(schema.FILE.as_posix())
    for folder in result_folders(root):
        if not (folder / manifest.NAME).is_file() or manifest.check_manifest(folder):
            stale.append(f"{(folder / manifest.NAME).relative_to(root)}")
    return stale


def remake(root: Path, *, force: bool = False) -> list[str]:
    """Write every paper, picture and manifest that does not match the results; returns what was written."""
    written = []
    for path, result, name, precision in wanted_plots(root):
        if plots.make(result, name, precision, path, force=force):
            written.append(str(path.relative_to(root)))
    for path in papers(root):
        text = remade(path, root)
        if text != path.read_text("utf-8"):
            write_text_atomic(path, text)
            written.append(str(path.relative_to(root)))
    if (root / "docs").is_dir() and not schema.is_current(root / schema.FILE):
        write_text_atomic(root / schema.FILE, schema.text())
        written.append(schema.FILE.as_posix())
    for folder in result_folders(root):
        if not (folder / manifest.NAME).is_file() or manifest.check_manifest(folder):
            written.append(str(manifest.write_manifest(folder).relative_to(root)))
    return written


def result_folders(root: Path) -> list[Path]:
    """The folders of results/ that hold files."""
    return [folder for folder in sorted((root / "results").glob("*")) if folder.is_dir() and manifest.files_of(folder)]
