"""`kbsub compare`: the leaderboard of stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbsub.eval.commands import common


def command(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Result files; default: the one that kbsub bench wrote on this machine.")
    ] = None,
    more: Annotated[
        list[Path] | None, typer.Option("--from", help="Another stored run, side by side; may be repeated.")
    ] = None,
    task: Annotated[str, typer.Option(help="The task of the default file.")] = "level1_40",
    precision: Annotated[str, typer.Option(help="fp32, fp16 or bf16, for the table of several files.")] = "fp32",
    rank: Annotated[str, typer.Option(help="Whose time ranks the candidates: upstream or referee.")] = "upstream",
    out: Annotated[Path | None, typer.Option(help="Folder for the Markdown table and the pictures.")] = None,
    quiet: common.Quiet = False,
    form: common.Format = "table",
) -> None:
    """Tables and plots of stored runs: which program is faster, by how much, and whether the difference is real.

    One file: ranked, with paired comparisons. Several: side by side, never ranked across GPUs or versions.
    Exit code: 0 done; 2 the call is wrong or a file cannot be read.

    \b
    kbsub compare results/h200/level1_40.json
    kbsub compare here.json --from there.json --out page
    kbsub compare here.json --format json
    """
    from kbsub.eval.process.printable import printable, shown_name
    from kbsub.eval.report import leaderboard as compare
    from kbsub.eval.results.model import ResultError, read_result
    from kbsub.eval.run.machine_facts import gpu_folder, gpu_name

    console = common.console_of("compare", form, quiet)
    if rank not in (compare.UPSTREAM, compare.REFEREE):
        typer.echo(printable(f"kbsub compare: --rank {rank}: upstream or referee"), err=True)
        raise typer.Exit(2)
    paths = [*(files or []), *(more or [])] or [Path("runs") / gpu_folder(gpu_name()) / f"{task}.json"]
    try:
        results = [read_result(path) for path in paths]
        if len(results) > 1:
            tables = [compare.side_by_side(results, [str(path) for path in paths], precision)]
        else:
            tables = compare.tables_of(results[0], paths[0], rank)
    except (ResultError, ValueError) as error:
        typer.echo(printable(f"kbsub compare: {error}"), err=True)
        raise typer.Exit(2) from None
    if not any(table.rows for table in tables):
        words = f"{shown_name(paths[0])} holds no timing yet; run: kbsub bench"
        console.print(words, style="yellow", markup=False, highlight=False, soft_wrap=True)
    for table in tables:
        console.print(table.rich())
    if form == "json":
        common.print_json([table.content() for table in tables])
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    try:
        for path, result in zip(paths, results, strict=True):
            label = path.stem if len(paths) == 1 else f"{path.stem}_{gpu_folder(result.environment.gpu)}"
            written += compare.write_summary(result, out / label)
    except ModuleNotFoundError as error:
        typer.echo(f"kbsub compare: no pictures: {error}; install it with: pip install matplotlib", err=True)
    if len(results) > 1:
        page = out / "side_by_side.md"
        page.write_text(tables[0].markdown() + "\n", encoding="utf-8")
        written.append(page)
    for path in written:
        console.print(f"written: {shown_name(path)}", markup=False, highlight=False, soft_wrap=True)
