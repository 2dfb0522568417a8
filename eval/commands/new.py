"""`kbsub new`: a first candidate for a task, ready to be judged and edited."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kbsub.eval.commands import common

FACTS_TIMEOUT_S = 60.0


def command(
    task: Annotated[str, typer.Argument(help="level<L>_<id>, or the path of a reference program.")],
    style: Annotated[str, typer.Option(help="torch, triton, cuda-inline or cupy.")] = "torch",
    out: Annotated[
        Path | None, typer.Option(help="The file to write; default: level_L_problem_P_STYLE.py here.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    kernelbench: common.Checkout = None,
) -> None:
    """Write a candidate that runs: the reference's forward, its last elementwise step as a kernel.

    It is slow and right: `kbsub eval` passes it as written (torch on any machine, the others with a GPU), so the first
    edit is already judged. A task whose forward ends in no elementwise step gets a kernel that copies the result.

    \b
    kbsub new level1_36
    kbsub new level2_12 --style triton --out kernels/mine.py
    kbsub new my_task.py --style cuda-inline
    """
    from kbsub.adapters.task import TaskError, resolve_task
    from kbsub.eval.process.isolated import run_isolated
    from kbsub.eval.process.printable import one_line, shown_name
    from kbsub.eval.starter.facts import TARGET, nothing_known
    from kbsub.eval.starter.reference import rewrite
    from kbsub.eval.starter.styles import STYLES
    from kbsub.eval.starter.text import starter

    if style not in STYLES:
        common.stop("new", common.EXIT_USAGE, f"--style {style}: no such style; there are {', '.join(STYLES)}")
    checkout, _ = common.checkout_of("new", kernelbench)
    try:
        found = resolve_task(task, kernelbench=checkout)
        target = out or Path(_file_name(found, style))
        if target.exists() and not force:
            common.stop("new", common.EXIT_USAGE, f"{shown_name(target)} exists: choose another --out, or add --force")
        payload = {"task": task, "kernelbench": str(checkout) if checkout else None}
        outcome = run_isolated(TARGET, payload, timeout_s=FACTS_TIMEOUT_S, env={"CUDA_VISIBLE_DEVICES": ""})
        facts: dict[str, Any] = outcome.value or nothing_known(outcome.message)
        reference = rewrite(found.source, facts["numbers"])
    except TaskError as error:
        common.stop("new", common.EXIT_USAGE, str(error))
    judge = f"kbsub eval {shown_name(target)} --task {task}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(starter(found, reference, style, facts, judge), "utf-8")
    step = reference.step
    words = f"the step to make your own is {step.text}" if step else "no step was found, a kernel copies the result"
    typer.echo(f"wrote {shown_name(target)}: {one_line(words)}")
    typer.echo(f"judge it with: {judge}")


def _file_name(task: Any, style: str) -> str:
    """As KernelBench's scripts begin a candidate's name; a local task's file begins with its own."""
    stem = f"level_{task.level}_problem_{task.problem_id}" if task.level else task.slug
    return f"{stem}_{style.replace('-', '_')}.py"
