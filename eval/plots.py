"""The plots of the papers: bars with quartiles against the floors, error against time, bandwidth over shapes.

A plot is data first (a dict of numbers and words); drawing comes after, and the digest of the data goes into the PNG,
so that a test can tell a stale picture without comparing pixels. Legible on light and dark pages (an opaque card of its
own) and for colour-blind readers (the Okabe-Ito palette, and a marker or hatch for whatever a colour says).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kbsub.eval.files import replace_atomic
from kbsub.eval.report_tables import gb_s, official_ms, worst_error
from kbsub.eval.result import Candidate, Result
from kbsub.eval.tables import (
    PRECISIONS,
    bench_floors,
    best_ms,
    floor_ms,
    is_floor,
    programs,
    replay_of,
    shape_words,
    title_of,
    typical_ms,
)
from kbsub.eval.token_tables import COPY, copies, moved, shape_ms

# Okabe-Ito; a kind of program has a colour and, beside it, a hatch and a marker.
KINDS = {
    "bit-identical": ("#0072B2", "", "o"),
    "tolerance": ("#009E73", "//", "s"),
    "control": ("#D55E00", "xx", "X"),
    "baseline": ("#999999", "", "D"),
    "undeclared": ("#CC79A7", "..", "P"),
}
CARD, INK, GRID = "#FFFFFF", "#1A1A1A", "#D0D0D0"
DIGEST_KEY = "kbsub-data-sha256"
Data = dict[str, Any]


def plain(name: str) -> str:
    return title_of(name).strip("`")


def kind_of(row: Any) -> str:
    if not isinstance(row, Candidate):
        return "baseline"
    return row.contract if row.contract in KINDS else "undeclared"


def time_data(result: Result, precision: str = "fp32") -> Data:
    """Bars: program, kind, ms, quartiles, method; the floors as lines."""
    bars: list[dict[str, Any]] = []
    for name, row in programs(result, precision).items():
        value = best_ms(row.timing)
        if value is None or is_floor(name):
            continue
        replay = replay_of(row.timing)
        low, high = (replay.q25_ms, replay.q75_ms) if replay is not None else (value, value)
        replayed = "graph replay" if result.environment.gpu else "CPU rehearsal"
        method = replayed if replay is not None else "cuda_event"
        bars.append({"name": plain(name), "kind": kind_of(row), "ms": value, "q25": low, "q75": high, "method": method})
    bars.sort(key=lambda bar: -bar["ms"])
    floors = {"every byte once": floor_ms(result, precision)}
    if precision == "fp32":
        measured = bench_floors(result, precision)
        floors["input read twice"] = (measured.model_extra or {}).get("memory_two_reads_ms")
        floors["chain of the reference order"] = measured.chain_ms
    where = f"{result.environment.gpu}, torch {result.environment.torch}, {precision}"
    return {
        "bars": bars,
        "floors": {k: v for k, v in floors.items() if v},
        "title": f"Time at the official shape, {where}",
    }


def error_data(result: Result, precision: str = "fp32") -> Data:
    """Points: program, kind, ms by upstream's clock, worst error against float64."""
    points: list[dict[str, Any]] = []
    left_out: list[str] = []
    eager = None
    for name, row in programs(result, precision).items():
        if not isinstance(row, Candidate):
            continue
        mine, worst = official_ms(row), worst_error(row)
        eager = eager if eager is not None else worst_error(row, "reference_max_abs")
        if mine is not None and worst is not None and not (math.isfinite(worst) and worst > 0):
            left_out.append(f"{plain(name)}: {worst}")
        elif mine is not None and worst is not None:
            points.append({"name": plain(name), "kind": kind_of(row), "ms": mine, "error": worst})
    for name in ("eager", "compile_default"):
        base = programs(result, precision).get(name)
        value = typical_ms(base.timing, "cuda_event") if base is not None else None
        worst = worst_error(base) or (eager if name == "eager" else None)
        if value is not None and worst is not None and math.isfinite(worst) and worst > 0:
            points.append({"name": plain(name), "kind": "baseline", "ms": value, "error": worst})
    where = f"{result.environment.gpu}, torch {result.environment.torch}, {precision}"
    return {"points": points, "left_out": left_out, "title": f"Error against time, {where}"}


def bandwidth_data(result: Result, precision: str = "fp32") -> Data:
    """Lines: GB/s and percent of the copy over the shapes, of every precision at once (`precision` names the file).

    Controls are left out: they are too many to tell apart, and their answers are wrong somewhere.
    """
    lines: dict[str, dict[str, list[list[Any]]]] = {}
    for each in PRECISIONS:
        copied = copies(result, each)
        for name, row in programs(result, each).items():
            if name != COPY and kind_of(row) == "control":
                continue
            for key, (_, copy_ms) in copied.items():
                value = shape_ms(row, key, copied)
                if value is not None:
                    point = [key, gb_s(moved(key, each), value), 100 * copy_ms / value]
                    lines.setdefault(plain(name), {}).setdefault(each, []).append(point)
    mean = {name: fmean(point[2] for points in line.values() for point in points) for name, line in lines.items()}
    lines = {name: lines[name] for name in sorted(lines, key=lambda name: -mean[name])}  # the nearest to the copy first
    where = f"{result.environment.gpu}, torch {result.environment.torch}"
    return {"lines": lines, "title": f"Bandwidth by shape, and percent of a copy of the same bytes, cold L2, {where}"}


def names_in(data: Data) -> set[str]:
    """The plain names of every program that a plot shows."""
    shown = [entry["name"] for key in ("bars", "points") for entry in data.get(key, [])]
    return {*shown, *data.get("lines", {}), *(words.partition(":")[0] for words in data.get("left_out", []))}


def data_digest(data: Data) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def stored_digest(path: Path) -> str | None:
    """The digest of the data a PNG was drawn from; None when there is no such picture."""
    from PIL import Image

    if not path.is_file():
        return None
    with Image.open(path) as image:
        return dict(image.info).get(DIGEST_KEY)


def draw(data: Data, paint: Callable[[Any, Data], None], path: Path, size: tuple[float, float]) -> None:
    """Draw on a card of its own and write the PNG atomically, the data's digest inside it."""
    matplotlib = _matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = {"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
    with matplotlib.rc_context({**style, "axes.edgecolor": INK, "hatch.linewidth": 0.6}):
        figure = Figure(figsize=size, facecolor=CARD, layout="constrained")
        FigureCanvasAgg(figure)
        paint(figure, data)
        # Software is matplotlib's own version by default, which would change the file for no reason.
        facts = {DIGEST_KEY: data_digest(data), "Software": None}
        kind = path.suffix.removeprefix(".")  # the draft's own name does not say
        replace_atomic(path, lambda draft: figure.savefig(draft, format=kind, dpi=150, metadata=facts))


def _matplotlib() -> Any:
    """The package, whatever MPLBACKEND says: pictures are drawn by Agg into files, no backend is ever asked.

    A notebook leaves MPLBACKEND=module://matplotlib_inline... to the processes it starts, where that module may be
    missing; a name that matplotlib does not know ends its import.
    """
    wanted = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if wanted is not None:
            os.environ["MPLBACKEND"] = wanted
    return matplotlib


def _axes(figure: Any, data: Data) -> Any:
    """The one pair of axes of a picture, with its title."""
    axes = figure.subplots()
    _card(axes)
    axes.set_title(data["title"], loc="left", fontsize=11)
    return axes


def _card(axes: Any) -> None:
    axes.set_facecolor(CARD)
    axes.spines[["top", "right"]].set_visible(False)


def paint_time(figure: Any, data: Data) -> None:
    """Horizontal bars on a log scale, fastest at the bottom, quartile whiskers, floors as labelled lines."""
    axes, bars = _axes(figure, data), data["bars"]
    for index, bar in enumerate(bars):
        colour, hatch, _ = KINDS[bar["kind"]]
        whiskers = [[max(bar["ms"] - bar["q25"], 0.0)], [max(bar["q75"] - bar["ms"], 0.0)]]
        y = len(bars) - index
        axes.barh(y, bar["ms"], xerr=whiskers, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.5, capsize=2)
        note = "" if bar["method"] == "graph replay" else f" ({bar['method']})"
        axes.annotate(
            f"{bar['ms']:.3f}{note}", (max(bar["ms"], bar["q75"]), y), (5, 0), **_OFFSET, va="center", fontsize=8
        )
    axes.set_yticks([len(bars) - index for index in range(len(bars))], [bar["name"] for bar in bars])
    axes.set_xscale("log")
    lowest = min([*data["floors"].values(), *(bar["ms"] for bar in bars)])
    highest = max(bar["ms"] for bar in bars)
    axes.set_xlim(lowest / 1.6, highest * 2.6)
    for index, (name, value) in enumerate(sorted(data["floors"].items(), key=lambda item: item[1])):
        axes.axvline(
            value, color=INK, linestyle=("--", ":", "-.")[index % 3], linewidth=1.2, label=f"{name}: {value:.3f}"
        )
    _plain_numbers(axes.xaxis)
    axes.set_xlabel("ms, log scale; bar: median, whiskers: quartiles")
    _legend(axes, {bar["kind"] for bar in bars}, bars=True)


def paint_error(figure: Any, data: Data) -> None:
    """One labelled point a program, both axes logarithmic: down and to the left is better."""
    axes = _axes(figure, data)
    points = sorted(data["points"], key=lambda p: (p["ms"], p["error"]))
    for point in points:
        colour, _, marker = KINDS[point["kind"]]
        axes.plot(point["ms"], point["error"], marker, color=colour, markeredgecolor=INK, markersize=9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(x=0.25, y=0.15)
    axes.grid(color=GRID, linewidth=0.5)
    axes.set_axisbelow(True)
    _plain_numbers(axes.xaxis)
    axes.set_xlabel("ms by upstream's clock, log scale")
    axes.set_ylabel("worst max abs error against float64, log scale")
    if data["left_out"]:  # no place on a logarithmic axis
        axes.annotate("not shown: " + ", ".join(data["left_out"]), (0, -0.16), xycoords="axes fraction", fontsize=8)
    _legend(axes, {point["kind"] for point in points}, bars=False)
    figure.draw_without_rendering()  # only now it is known where on the page a point lies
    to_page = 72 / figure.dpi
    places = [axes.transData.transform((p["ms"], p["error"])) * to_page for p in points]
    for point, line in zip(points, label_lines([tuple(at) for at in places], [p["name"] for p in points]), strict=True):
        leader = {"arrowprops": {"arrowstyle": "-", "color": INK, "linewidth": 0.5, "relpos": (0, 0.5)}} if line else {}
        offset = (8, -11 - LINE_PT * line)
        axes.annotate(point["name"], (point["ms"], point["error"]), offset, **_OFFSET, **leader, fontsize=8, zorder=1.5)


LINE_PT, LETTER_PT = 13, 4.2  # what a line and a letter of a label take, in points


def label_lines(places: Sequence[tuple[float, float]], names: Sequence[str]) -> list[int]:
    """For each label the line below its point (0: the first) on which it writes over no other label.

    places: of the points on the page, in points. Those to the right go first: a leader then runs past the start of the
    labels to its right, through none.
    """
    taken: list[tuple[float, float, float]] = []  # left, right, height of each label
    lines = [0] * len(names)
    for index in sorted(range(len(names)), key=lambda i: -places[i][0]):
        left, height = places[index]
        right = left + LETTER_PT * len(names[index]) + 12
        while any(
            left < r and le < right and abs(height - LINE_PT * lines[index] - h) < LINE_PT - 1e-6 for le, r, h in taken
        ):
            lines[index] += 1
        taken.append((left, right, height - LINE_PT * lines[index]))
    return lines


def paint_bandwidth(figure: Any, data: Data) -> None:
    """GB/s above, percent of the copy below, a column a precision; marker and line style say what a colour does."""
    names = [name for name in data["lines"] if name != plain(COPY)]
    looks = {name: _look(index) for index, name in enumerate(names)} | {plain(COPY): {"color": INK, "linewidth": 2.2}}
    shown = [p for p in PRECISIONS if any(p in line for line in data["lines"].values())]
    grid = figure.subplots(2, len(shown), sharex="col", sharey="row", squeeze=False)
    for column, precision in enumerate(shown):
        lines = {name: line[precision] for name, line in data["lines"].items() if precision in line}
        keys = list(dict.fromkeys(key for line in lines.values() for key, *_ in line))
        for row, axes in enumerate(grid[:, column]):
            _card(axes)
            for name, line in lines.items():
                values = {key: point[row] for key, *point in line}
                axes.plot(range(len(keys)), [values.get(key, math.nan) for key in keys], label=name, **looks[name])
            axes.set_ylim(bottom=0)
            axes.grid(axis="y", color=GRID, linewidth=0.5)
        grid[0, column].set_title(precision, fontsize=10)
        ticks = [shape_words(key) for key in keys]
        grid[1, column].set_xticks(range(len(keys)), ticks, rotation=35, ha="right", fontsize=8)
    grid[0, 0].set_ylabel("GB/s (input once, output once)")
    grid[1, 0].set_ylabel("percent of the copy")
    handles = {
        label: handle for axes in grid[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.suptitle(data["title"], x=0.01, ha="left", fontsize=11)


def _look(index: int) -> dict[str, Any]:
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D00")
    style = {"color": colours[index % 7], "marker": "osD^vPX*"[index % 8], "linestyle": ("-", "--", ":")[index % 3]}
    return {**style, "linewidth": 1.4, "markersize": 5, "markeredgecolor": INK, "markeredgewidth": 0.4}


# Words near a point, on a scrap of the card's colour, so that no line runs through them.
_OFFSET: Mapping[str, Any] = {
    "textcoords": "offset points",
    "bbox": {"boxstyle": "square,pad=0.1", "facecolor": CARD, "edgecolor": "none"},
}


def _plain_numbers(axis: Any) -> None:
    """0.1, 1, 10 rather than powers of ten."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _legend(axes: Any, kinds: set[str], *, bars: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for kind, (colour, hatch, marker) in KINDS.items():
        if kind in kinds and bars:
            handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor=INK, label=kind))
        elif kind in kinds:
            handles.append(Line2D([], [], color=colour, marker=marker, linestyle="", markeredgecolor=INK, label=kind))
    handles += axes.get_legend_handles_labels()[0]
    axes.legend(handles=handles, fontsize=8, frameon=False, loc="best")


# name of a plot -> (its data from a result, how to paint it, what must not be empty, size in inches)
Plot = tuple[Callable[[Result, str], Data], Callable[[Any, Data], None], str, tuple[float, float]]
PLOTS: dict[str, Plot] = {
    "time": (time_data, paint_time, "bars", (9.0, 5.2)),
    "error": (error_data, paint_error, "points", (8.0, 5.2)),
    "bandwidth": (bandwidth_data, paint_bandwidth, "lines", (11.0, 7.4)),
}


def plot_path(folder: Path, task: str, name: str, precision: str) -> Path:
    suffix = "" if precision == "fp32" else f"_{precision}"
    return folder / f"{task}_{name}{suffix}.png"


def make(result: Result, name: str, precision: str, path: Path, *, force: bool = False) -> bool:
    """Draw a plot when its data are new (or `force`); True when the picture was written. Nothing without data."""
    collect, paint, needed, size = PLOTS[name]
    data = collect(result, precision)
    if not data[needed] or (not force and stored_digest(path) == data_digest(data)):
        return False
    draw(data, paint, path, size)
    return True


def stale(result: Result, name: str, precision: str, path: Path) -> bool:
    """Whether the picture at `path` was not drawn from this result."""
    collect, _, needed, _ = PLOTS[name]
    data = collect(result, precision)
    return bool(data[needed]) and stored_digest(path) != data_digest(data)


def names_with_data(result: Result, precision: str, wanted: Sequence[str] = tuple(PLOTS)) -> list[str]:
    return [name for name in wanted if PLOTS[name][0](result, precision)[PLOTS[name][2]]]
