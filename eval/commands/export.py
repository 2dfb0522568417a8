"""`kbsub export`: candidates as a KernelBench run folder, for upstream's own scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    candidates: Annotated[
        list[str] | None, typer.Argument(help="Files or stems; every declared candidate of the task if none is given.")
    ] = None,
    run_name: Annotated[str, typer.Option(help="The folder under runs/; upstream wants a fresh one each time.")] = "",
    kernelbench: Annotated[
        Path | None, typer.Option(help="The checkout to write into (else KERNELBENCH_DIR, the user cache).")
    ] = None,
    task: Annotated[str, typer.Option(help="level{L}_{id} of the problem.")] = "level1_40",
    precision: Annotated[str, typer.Option(help="fp32, fp16 or bf16: which declared candidates to take.")] = "fp32",
    best: Annotated[str, typer.Option(help="Sample 0, the only one that upstream's analysis reads.")] = "",
    results: Annotated[
        list[Path] | None, typer.Option(help="Result files to choose the best by (default: results/*/TASK.json).")
    ] = None,
) -> None:
    """Write runs/NAME/level_L_problem_P_sample_K_kernel.py and a mapping file for upstream's own scripts."""
    import kbsub.submissions
    from kbsub.adapters.checkout import CheckoutError, find_checkout
    from kbsub.adapters.printable import one_line, printable, shown_name
    from kbsub.adapters.task import TaskError, parse_task
    from kbsub.eval.declarations import DeclarationError
    from kbsub.eval.export import MAPPING_FILE, Best, ExportError, best_of, choose_entries, export

    if not run_name:
        raise typer.BadParameter("give one, such as --run-name my_run", param_hint="--run-name")
    submissions = Path(kbsub.submissions.__file__ or ".").resolve().parent
    try:
        problem = parse_task(task)
        entries = choose_entries(candidates or [], submissions / task, precision)
        stored = read_stored(results, task, (Path.cwd(), submissions.parent))
        if best:
            chosen = Best(Path(best).stem, "named with --best")
        else:
            chosen = best_of(entries, stored, precision) or Best(entries[0].stem, "the first: none has stored results")
        folder, new = export(
            entries, find_checkout(kernelbench).path, run_name, problem, best=chosen, precision=precision
        )
    except (CheckoutError, TaskError, DeclarationError, ExportError) as error:
        typer.echo(printable(f"kbsub export: {error}"), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{'wrote' if new else 'already there, the same files:'} {len(entries)} samples in {shown_name(folder)}")
    for sample in json.loads((folder / MAPPING_FILE).read_text("utf-8"))["samples"]:
        note = f"  <- best, {chosen.why}" if sample["sample_id"] == 0 and new else ""
        typer.echo(f"  {sample['file']}  {shown_name(sample['candidate'])}{one_line(note)}")


def read_stored(given: list[Path] | None, task: str, roots: tuple[Path, ...]) -> dict[str, Any]:
    """Name -> content of the result files: those given (which must be readable), else results/*/TASK.json of a root."""
    from kbsub.eval.export import ExportError

    files = given or next(filter(None, (sorted(root.glob(f"results/*/{task}.json")) for root in roots)), [])
    stored = {}
    for file in files:
        try:
            stored[f"{file.parent.name}/{file.name}"] = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ExportError(f"{file}: not a result file ({error}); name another with --results") from error
    return stored
