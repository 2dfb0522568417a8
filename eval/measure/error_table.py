"""The error table of the baselines: eager LayerNorm and torch.compile over every oracle case, beside the candidates.

    kbsub measure error_table results/h200/level1_40.json

adds `.oracle` to `baselines.eager` and `baselines.compile_default` of a result file that `kbsub eval` has made on this
machine (it has the candidates' own). One child process, one reference and one float64 answer a case. No torch here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kbsub.adapters.checkout import CheckoutMissing, find_checkout
from kbsub.adapters.task import resolve_task
from kbsub.eval.process.isolated import Status, describe_event
from kbsub.eval.process.printable import one_line
from kbsub.eval.results.model import Baseline, Result, ResultError, read_result, row_key, update_result
from kbsub.eval.run.machine_facts import gpu_index, gpu_name
from kbsub.eval.run.sizes import sizes_for
from kbsub.eval.suite.batch import Finished, run_batch
from kbsub.eval.verdicts.register import KINDS

BASELINES = ("eager", "compile_default")


def command(
    result: Annotated[Path, typer.Argument(help="A result file of kbsub eval, made on this machine.")],
    precision: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp32",
    baseline: Annotated[list[str] | None, typer.Option(help="eager, compile_default; default: both.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu at a small shape.")] = "cuda",
    timeout: Annotated[float, typer.Option(help="Seconds for the whole table.")] = 600.0,
) -> None:
    """Measure the baselines against the float64 oracle. Exit code: 0 done, 1 a baseline did not run, 2 usage."""
    try:
        there = read_result(result)
        here = gpu_name(gpu_index(device))
        if there.environment.gpu != here:
            raise ResultError(f"{result} was made with {there.environment.gpu or 'no GPU'}, this is {here or 'no GPU'}")
        if there.task.slug is None:
            raise ResultError(f"{result} is of a local task; the table is made of KernelBench problems (level<L>_<id>)")
    except (ResultError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    try:
        checkout: Path | None = find_checkout(None).path
    except CheckoutMissing:
        checkout = None
    names = baseline or list(BASELINES)
    task = resolve_task(there.task.slug, kernelbench=checkout, precision=precision)
    size = sizes_for(task, there.task.slug, str(checkout) if checkout else None, device).of(KINDS["oracle"])
    common = {
        "task": there.task.slug,
        "size": {"name": size.name, "values": dict(size.values)},
        "precision": precision,
        "kernelbench": str(checkout) if checkout else None,
        "device": device,
        "oracle_only": True,
        "secret_seed": None,  # these are this repository's own, and the table the same every time
    }
    found = run_batch(
        [{"baseline": name, "stem": name} for name in names],
        common,
        timeout_s=timeout,
        on_progress=_progress if sys.stderr.isatty() else None,
    )
    update_result(result, change=lambda current: add_baselines(current, found, precision))
    for name, finished in found.items():
        worst = max((float(each["candidate_max_abs"]) for each in finished.oracle.values()), default=float("nan"))
        ended = f"{name}: {finished.status} {finished.message} {len(finished.oracle)} cases, worst max abs {worst:.3g}"
        typer.echo(one_line(ended))
    raise typer.Exit(0 if all(each.status is Status.OK for each in found.values()) else 1)


def _progress(event: dict[str, Any]) -> None:
    typer.echo(f"\r{describe_event(event):70}\r", nl=False, err=True)


def add_baselines(result: Result, found: dict[str, Finished], precision: str) -> None:
    """Put the `.oracle` of every baseline that has one into the result."""
    for name, finished in found.items():
        if finished.oracle:
            key = row_key(name, precision)
            before = result.baselines[key].model_dump() if key in result.baselines else {}
            result.baselines[key] = Baseline.model_validate({**before, "oracle": finished.oracle})
