"""`kbsub leaderboard`: judged run folders as tables, one JSON and a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbsub.eval.commands import common


def command(
    folders: Annotated[
        list[Path], typer.Argument(help="Run folders that kbsub eval has judged; or one board's own JSON.")
    ],
    baseline: Annotated[
        Path | None,
        typer.Option(help="Means in KernelBench's format (kbsub baseline); default: eager as timed beside each row."),
    ] = None,
    k: Annotated[str, typer.Option(help="k of pass@k, by comma.")] = "1",
    out: Annotated[
        Path, typer.Option(help="Folder for leaderboard.md, .csv, .json, .html and, if it can be, .parquet.")
    ] = Path("."),
    name: Annotated[str, typer.Option(help="What the files are called.")] = "leaderboard",
    numbers_only: Annotated[
        bool, typer.Option("--numbers-only", help="Without words of the files' own errors, and without links to rows.")
    ] = False,
    quiet: common.Quiet = False,
    form: common.Format = "table",
) -> None:
    """Show run folders: pass@k, fast_p and geometric mean by upstream's definitions, this project's verdicts beside.

    Exit code: 0 written; 2 a folder has no rows, or the call is wrong.

    \b
    kbsub leaderboard runs/model_a runs/model_b --out board
    kbsub leaderboard runs/model_a --k 1,5,10 --baseline runs/h200/baseline.json
    kbsub leaderboard runs/corpus --numbers-only --out results/h200 --name corpus
    kbsub leaderboard results/h200/corpus.json --out board
    """
    from kbsub.eval.process.printable import shown_name
    from kbsub.eval.report.board import figures, page, words
    from kbsub.eval.results.files import write_text_atomic
    from kbsub.eval.results.model import write_json_atomic

    console = common.console_of("leaderboard", form, quiet)
    ks = [int(each) for each in k.split(",") if each.strip().isdecimal() and int(each) > 0]
    if not ks or len(ks) != len(k.split(",")):
        common.stop("leaderboard", common.EXIT_USAGE, f"--k {k}: write numbers by comma, such as 1,5,10")
    if not name or Path(name).name != name:
        common.stop("leaderboard", common.EXIT_USAGE, f"--name {name}: a file's name, without folder and ending")
    made = len(folders) == 1 and folders[0].is_file()
    if made and (baseline or k != "1"):
        common.stop("leaderboard", common.EXIT_USAGE, f"--baseline, --k: {folders[0]} is a board that was made already")
    try:
        if made:
            board = figures.read_board(folders[0])
        else:
            board = figures.board(folders, figures.read_baseline(baseline) if baseline else None, ks)
    except figures.BoardError as error:
        common.stop("leaderboard", common.EXIT_USAGE, str(error))
    for row in board["rows"]:  # no path of this machine goes into what is passed on
        row["evidence"] = None if numbers_only or made else page.link(Path(row["evidence"]), out)
        if numbers_only:
            row["problems"] = [" ".join(each.split()[:2]).rstrip(":") for each in row["problems"]]
    text = page.page(board)
    out.mkdir(parents=True, exist_ok=True)
    write_text_atomic(out / f"{name}.html", text)
    write_text_atomic(out / f"{name}.md", words.markdown(board))
    write_text_atomic(out / f"{name}.csv", words.rows_csv(board))
    write_json_atomic(out / f"{name}.json", board)
    why = words.write_parquet(board, out / f"{name}.parquet")
    console.print(words.markdown(board))
    kinds = "html, md, csv, json" + ("" if why else ", parquet")
    console.print(f"{len(board['rows'])} rows; written to {shown_name(out / name)}.{{{kinds}}}")
    if why:
        console.print(why)
    if form == "json":
        common.print_json(board)
