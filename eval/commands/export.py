"""`kbsub export`: candidates as a KernelBench run folder, for upstream's own scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kbsub.eval.commands import common


def command(
    candidates: Annotated[
        list[str] | None, typer.Argument(help="Files or stems; every declared candidate of the task if none is given.")
    ] = None,
    run_name: Annotated[str, typer.Option(help="The run folder's name; upstream wants a fresh one each time.")] = "",
    to: Annotated[
        Path | None,
        typer.Option(help="Where the run folder goes; default: runs/ of the --kernelbench given, else runs/ here."),
    ] = None,
    kernelbench: Annotated[
        Path | None,
        typer.Option(help="The checkout whose runs/ to write into (without --to), and whose checker to ask."),
    ] = None,
    task: common.Task = "",
    precision: Annotated[str, typer.Option(help="fp32, fp16 or bf16: which declared candidates to take.")] = "fp32",
    best: Annotated[str, typer.Option(help="Sample 0, the only one that upstream's analysis reads.")] = "",
    results: Annotated[
        list[Path] | None, typer.Option(help="Result files to choose the best by (default: results/*/TASK.json).")
    ] = None,
    refused_too: Annotated[
        bool, typer.Option("--refused-too", help="Write files that upstream would refuse, saying which.")
    ] = False,
    quiet: common.Quiet = False,
    form: common.Format = "table",
) -> None:
    """Write NAME/level_L_problem_P_sample_K_kernel.py and a mapping file for upstream's own scripts.

    Exit code: 0 written, or there already with the same files; 1 upstream would refuse a file (its syntax, precision or
    static checker; --refused-too writes it all the same); 2 the call is wrong.

    \b
    kbsub export --run-name ladder
    kbsub export mine.py --task level1_36 --to KernelBench/runs --run-name mine
    kbsub export mine.py --task my_task.py --run-name mine --format json
    """
    from kbsub.adapters.checkout import CheckoutError, find_checkout
    from kbsub.adapters.task import TaskError, resolve_task
    from kbsub.eval.process.printable import one_line, printable, shown_name
    from kbsub.eval.run import export as work
    from kbsub.eval.tasks.declarations import DeclarationError
    from kbsub.eval.tasks.folder import folder_of, submissions_roots

    console = common.console_of("export", form, quiet)
    if not run_name:
        common.stop("export", common.EXIT_USAGE, "--run-name: give one, such as --run-name my_run")
    task = common.task_of("export", task, candidates or []).task
    try:
        checkout = find_checkout(kernelbench).path
        problem = resolve_task(task, kernelbench=checkout, precision=precision)
        entries = work.choose_entries(candidates or [], folder_of(task), precision)
        roots = (Path.cwd(), *(root.resolve().parent for root in submissions_roots()))
        stored = read_stored(results, problem.slug, roots)
        refused = work.refusals(entries, precision, checkout)
        if refused and not refused_too:
            for line in refused:
                typer.echo(one_line(f"kbsub export: {line}"), err=True)
            common.stop("export", 1, "nothing written; mend the files, or write them all the same: --refused-too")
        if best:
            chosen = work.Best(Path(best).stem, "named with --best")
        else:
            first = work.Best(entries[0].stem, "the first: none has stored results")
            chosen = work.best_of(entries, stored, precision) or first
        runs = work.runs_folder(to, kernelbench)
        folder, new = work.export(entries, runs, run_name, problem, best=chosen, precision=precision)
    except (CheckoutError, TaskError, DeclarationError, work.ExportError) as error:
        common.stop("export", common.EXIT_USAGE, printable(str(error)))
    samples = json.loads((folder / work.MAPPING_FILE).read_text("utf-8"))["samples"]
    console.print(
        f"{'wrote' if new else 'already there, the same files:'} {len(entries)} samples in {shown_name(folder)}"
    )
    for sample in samples:
        note = f"  {one_line(f'<- best, {chosen.why}')}" if sample["sample_id"] == 0 and new else ""
        console.print(f"  {sample['file']}  {shown_name(sample['candidate'])}{note}")
    for line in refused:
        console.print(one_line(f"upstream would refuse: {line}"))
    if runs.resolve() != (kernelbench or checkout).resolve() / "runs":
        console.print(
            "upstream reads runs/NAME of its own checkout: name it with --kernelbench, or copy the folder there"
        )
    if form == "json":
        refusals = [one_line(line) for line in refused]
        common.print_json({"folder": str(folder), "new": new, "samples": samples, "refused_by_upstream": refusals})


def read_stored(given: list[Path] | None, task: str, roots: tuple[Path, ...]) -> dict[str, Any]:
    """Name -> content of the result files: those given (which must be readable), else results/*/TASK.json of a root."""
    from kbsub.eval.run.export import ExportError

    files = given or next(filter(None, (sorted(root.glob(f"results/*/{task}.json")) for root in roots)), [])
    stored = {}
    for file in files:
        try:
            stored[f"{file.parent.name}/{file.name}"] = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ExportError(f"{file}: not a result file ({error}); name another with --results") from error
    return stored
