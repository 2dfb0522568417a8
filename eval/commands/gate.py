"""`kbsub gate`: one exit code for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kbsub.eval.commands import common
from kbsub.eval.verdicts.register import KINDS, OFFICIAL


def command(
    candidates: Annotated[list[str], typer.Argument(help="Candidate files, or names in submissions/<task>.")],
    require: Annotated[
        str,
        typer.Option(
            help=f"Verdicts, by comma: {', '.join(KINDS)}. Or correct-here: all that can be checked here (exit 0 or 1)."
        ),
    ] = "official,referee",
    task: common.Task = "",
    precision: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cuda, cuda:<index>, or cpu through the host executor.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds for one stage of one candidate.", min=1.0)] = 300.0,
    size: common.Size = "",
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here; - is stdout.")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Write the answers as JSON here; - is stdout.")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep the result file of the run here.")] = None,
    summary: Annotated[
        Path | None,
        typer.Option(envvar="GITHUB_STEP_SUMMARY", help="Append a summary in Markdown here."),
    ] = None,
    annotate: Annotated[
        bool,
        typer.Option(
            "--annotate",
            envvar="GITHUB_ACTIONS",
            help="Print GitHub annotations: ::error file=...,line=...::what failed.",
        ),
    ] = False,
    kernelbench: common.Checkout = None,
    declarations: common.Declarations = None,
    cell: common.Cell = "auto",
    quiet: common.Quiet = False,
    form: common.Format = "table",
) -> None:
    """Check that candidates are what is required of them, and what they declare.

    A declaration (contract, precisions, expected failures) counts from this repository's own task folders and from the
    file given with --declarations; it is read before anything runs. Any other candidates.toml is named and ignored.

    --require correct-here asks for all that this machine can check: the file's text, a local check on official inputs,
    stress, oracle, guards, and a declared promise of identity. Nothing of it is official without a GPU. A file of which
    nothing could be executed here fails: its answers are unknown.

    Exit code: 0 every required check passed; 1 one failed; 2 the call is wrong; 3 one cannot be certified here.

    \b
    kbsub gate mine.py --task level1_36 --require correct-here
    kbsub gate kernels/*.py --task level1_36 --require official,stress,guards --junit gate.xml
    """
    import tempfile

    from kbsub.eval.report import annotations, gate_report
    from kbsub.eval.run import gate
    from kbsub.eval.run.here import NAME as HERE

    required = tuple(dict.fromkeys(name.strip() for name in require.split(",") if name.strip()))
    if HERE in required and len(required) > 1:
        _stop(
            gate.EXIT_USAGE, f"--require {require}: {HERE} stands alone, it is everything that this machine can check"
        )
    if unknown := [name for name in required if name not in (*KINDS, HERE)]:
        known = ", ".join((*KINDS, HERE))
        _stop(gate.EXIT_USAGE, f"--require {require}: no such check as {unknown[0]}; there are {known}")
    if not required:
        _stop(gate.EXIT_USAGE, f"--require is empty; write some of {', '.join(KINDS)}")
    common.console_of("gate", form, quiet)  # a wrong --format is said before anything runs
    common.check_size("gate", size)
    common.confine("gate", cell)
    meant = common.task_of("gate", task, candidates)
    kinds, here = (tuple(KINDS), True) if required == (HERE,) else (required, False)
    plan = _plan(candidates, kinds, meant.task, precision, device, timeout, size, kernelbench, declarations, here)
    for note in plan.declared.notes():
        typer.echo(f"kbsub gate: {note}", err=True)
    with tempfile.TemporaryDirectory() as nowhere:
        judged, confined = _run(plan, out or Path(nowhere) / "result.json", here=here, quiet=quiet)
    found = {key: each.checks for key, each in judged.items()}
    facts = {
        "task": plan.task.slug,
        "precision": plan.precision,
        "provenance": plan.task.provenance,
        "device": plan.gpu or "cpu",
        "confined": "; ".join(sorted(confined)) or "no candidate ran",
        **({"declarations": str(declarations)} if declarations else {}),
        **({"note": meant.note} if meant.note else {}),
    }
    if form == "json":
        common.print_json(gate_report.as_json(found, required, facts))
    elif not quiet:  # first: an answer that cannot be written is read all the same
        _print(found, required, err=Path("-") in (junit, json_))
    _write(found, required, facts, junit, json_)
    if annotate:
        for line in annotations.github(list(judged.values())):
            typer.echo(line)
    if summary is not None:
        annotations.append_summary(summary, annotations.summary(list(judged.values()), required, facts))
    code = gate.exit_code([check for checks in found.values() for check in checks])
    if code and meant.note:  # once more, below what failed: a wrong task is the first thing to look at
        typer.echo(f"kbsub gate: {meant.note}", err=True)
    raise typer.Exit(code)


def _plan(
    names: list[str],
    required: tuple[str, ...],
    task: str,
    precision: str,
    device: str,
    timeout: float,
    size: str,
    kernelbench: Path | None,
    declarations: Path | None,
    here: bool,
) -> Any:
    """The run's plan, as `kbsub eval` would make it; a wrong call ends with exit code 2."""
    from kbsub.adapters.task import TaskError, resolve_task
    from kbsub.eval.run.gate import EXIT_USAGE
    from kbsub.eval.run.runner import Plan
    from kbsub.eval.tasks.declarations import DeclarationError, read_declared
    from kbsub.eval.tasks.files import candidate_files
    from kbsub.eval.tasks.folder import folder_of

    gpu = common.gpu_of("gate", device)
    checkout, _ = common.checkout_of("gate", kernelbench)
    try:
        files = candidate_files(names, folder_of(task))
        return Plan(
            task=resolve_task(task, kernelbench=checkout, precision=precision),
            task_text=task,
            candidates=files,
            stages=tuple(name for name in KINDS if name in required),
            precision=precision,
            device=(device or "cuda") if gpu or device.startswith("cuda") else "cpu",
            kernelbench=checkout,
            timeout_s=timeout,
            # Where there is no GPU and all that can be checked is asked for, kernels run through the host executor.
            host_executor=device == "cpu" or (here and gpu is None and not device),
            size=size,
            gpu=gpu,
            declared=read_declared(files, declarations),
        )
    except (TaskError, DeclarationError) as error:
        _stop(EXIT_USAGE, str(error))


def _run(plan: Any, out: Path, *, here: bool, quiet: bool) -> tuple[dict[str, Any], set[str]]:
    """(row key -> Judged, what its candidates were confined by), after running what is required.

    `here`: the answers to --require correct-here. Without the GPU that was asked for nothing is run.
    """
    from kbsub.adapters.task import TaskError
    from kbsub.eval.process.printable import one_line
    from kbsub.eval.results.model import ResultError, row_key
    from kbsub.eval.run.gate import EXIT_USAGE, Check, Judged, confinements
    from kbsub.eval.run.here import LOCAL, judged_rows
    from kbsub.eval.run.machine_facts import no_such_gpu
    from kbsub.eval.run.runner import run
    from kbsub.eval.run.source_text import read_source
    from kbsub.eval.verdicts.kind import Answer

    if plan.device != "cpu" and plan.gpu is None:
        missing = no_such_gpu(plan.device)
        nothing = [Check(name, Answer.UNCERTIFIED, missing) for name in plan.stages]
        rows_of = {row_key(file.stem, plan.precision): file for file in plan.candidates}
        return {key: Judged(file, read_source(file)[0], {}, nothing) for key, file in rows_of.items()}, set()

    def finished(row: Any) -> None:
        if quiet:
            return
        local = here and plan.device == "cpu"  # then nothing official was asked
        shown = {name: LOCAL if local and name == OFFICIAL else name for name in row.outcomes}
        ended = ", ".join(f"{shown[name]} {end.status}" for name, end in row.outcomes.items())
        typer.echo(one_line(f"{row.key}: {ended}"), err=True)

    try:
        rows, _ = run(plan, out, lambda row, stage, event: None, finished)
    except (ResultError, TaskError) as error:
        _stop(EXIT_USAGE, str(error))
    confined = {words for row in rows for words in confinements(row.fields)}
    return judged_rows(plan, rows, here=here), confined


def _write(
    found: dict[str, Any], required: tuple[str, ...], facts: dict[str, str], junit: Path | None, json_: Path | None
) -> None:
    from kbsub.eval.report import gate_report

    if junit is not None:
        gate_report.write_junit(junit, found, facts)
    if json_ is not None:
        gate_report.write_json(json_, gate_report.as_json(found, required, facts))


def _print(found: dict[str, Any], required: tuple[str, ...], *, err: bool) -> None:
    from kbsub.eval.process.printable import one_line
    from kbsub.eval.run.here import NAME as HERE
    from kbsub.eval.verdicts.kind import Answer

    marks = {
        Answer.PASS: "pass",
        Answer.FAIL: "FAIL",
        Answer.UNCERTIFIED: "CANNOT CERTIFY",
        Answer.NOT_HERE: "not checked here",
    }
    for key, checks in found.items():
        for check in checks:
            if check.answer is not Answer.NOT_REQUIRED:
                typer.echo(one_line(f"{key}: {check.name}: {marks[check.answer]}: {check.words}"), err=err)
    if HERE in required:
        typer.echo(
            "correct-here: what this machine can check; nothing here is an official verdict without a GPU", err=err
        )
    elif rest := [name for name in KINDS if name not in required]:
        typer.echo(f"not required, so not certified: {', '.join(rest)}", err=err)


def _stop(code: int, message: str) -> NoReturn:
    common.stop("gate", code, message)
