"""`kbsub eval`: candidates through the official verdict, then identity, stress and oracle."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kbsub.eval.commands import common
from kbsub.eval.commands.eval_folder import RECORD, Where, run_folder
from kbsub.eval.verdicts.register import DEFAULT_KINDS, KINDS

EXIT_UNCHECKED = 3
# Of a folder without --only: what tells a good file from a bad one, whoever wrote it.
FOLDER_KINDS = tuple(name for name in KINDS if name in ("official", "stress", "guards", "referee", "source"))


def command(
    candidates: Annotated[
        list[str] | None,
        typer.Argument(
            help="Candidate files, or names in submissions/<task>; default: every one of the task. Or one folder "
            "of level_L_problem_P_sample_S_kernel.py files, or a tree of them, or a corpus with --fields: a batch that "
            "can be interrupted and goes on."
        ),
    ] = None,
    task: common.Task = "",
    precision: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp32",
    only: Annotated[str, typer.Option(help=f"Verdicts, by comma: {', '.join(KINDS)}.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds for one stage of one candidate.", min=1.0)] = 300.0,
    out: Annotated[
        Path | None, typer.Option(help="Result file; rows of an existing one are kept. Of a corpus: a folder.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, cuda:<index>, or cpu through the host executor.")] = "",
    size: common.Size = "",
    kernelbench: common.Checkout = None,
    gpus: Annotated[int, typer.Option(help="For a run folder: GPUs of this machine, a row at a time each.", min=1)] = 1,
    scheduler: Annotated[str, typer.Option(help="For a run folder: a dask scheduler that is already running.")] = "",
    retry: Annotated[
        str, typer.Option(help="For a run folder: statuses, by comma, of which rows and verdicts are judged again.")
    ] = "",
    fields: Annotated[
        str,
        typer.Option(
            help="Of a corpus of JSON lines: which field is what, such as "
            "level=level_id,problem=task_id,code=custom_code; and, where there are, sample= and run=."
        ),
    ] = "",
    build_ahead: Annotated[
        int | None,
        typer.Option(help="For a run folder on a GPU: builds at once while it judges; default: cores less one.", min=0),
    ] = None,
    declarations: common.Declarations = None,
    cell: common.Cell = "auto",
    secret_seed: Annotated[
        int | None,
        typer.Option(help="Make the secret cases of a stored record again, by the seed in it.", min=0, max=2**48 - 1),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Judge again at every save, the quick verdicts first; Ctrl-C ends it.")
    ] = False,
    timings: Annotated[
        bool, typer.Option("--timings", help="Say where the seconds went: before, in and after the judges, by phase.")
    ] = False,
    quiet: common.Quiet = False,
    form: common.Format = "table",
) -> None:
    """Judge candidates: KernelBench's own verdict, then this project's checks; a table and a JSON.

    Exit code: 0 every row is OK or says why it could not be run here; 1 a row failed, or a file that nothing is
    declared of has a failed case or finding; 2 the call is wrong, or the task's own reference does not run; 3 nothing
    failed, but a stage could ask next to nothing (NOT_CHECKED), or there is no GPU for --device cuda.
    A declaration (contract, precisions, expected failures) counts from this repository's own task folders and from the
    file given with --declarations; it is read before anything runs. Any other candidates.toml is named and ignored.

    \b
    kbsub eval mine.py --task level1_36
    kbsub eval mine.py --task level1_36 --watch
    kbsub eval runs/my_run --only official,source
    kbsub eval *.py --task my_task.py --only official,guards --format json
    """
    ahead = common.Ahead(device, kernelbench, cell)
    from kbsub.adapters.task import TaskError, resolve_task
    from kbsub.eval.process.printable import printable
    from kbsub.eval.results.model import ResultError
    from kbsub.eval.run.machine_facts import gpu_folder, no_such_gpu
    from kbsub.eval.run.runner import Plan, failures, run
    from kbsub.eval.tasks.declarations import DeclarationError, read_declared
    from kbsub.eval.tasks.files import candidate_files
    from kbsub.eval.tasks.folder import folder_of

    console = common.console_of("eval", form, quiet)
    several = bool(fields) or bool(candidates and len(candidates) == 1 and Path(candidates[0]).is_dir())
    default = FOLDER_KINDS if several else DEFAULT_KINDS
    stages = tuple(name.strip() for name in only.split(",") if name.strip()) or default
    if unknown := [name for name in stages if name not in KINDS]:
        _stop(2, f"--only {','.join(unknown)}: no such stage; there are {', '.join(KINDS)}")
    plan_stages = tuple(sorted(set(stages), key=list(KINDS).index))
    common.check_size("eval", size)
    common.confine("eval", cell, here=not scheduler)
    gpu = common.gpu_of("eval", device)
    if device.startswith("cuda") and gpu is None:
        _stop(common.EXIT_NO_GPU, no_such_gpu(device))
    checkout, missing = common.checkout_of("eval", kernelbench, ahead)
    if missing:
        console.print(printable(missing), style="yellow")
    if several:
        if not candidates or len(candidates) != 1:
            _stop(2, "--fields speaks of one corpus: name its file of JSON lines, and nothing else")
        from kbsub.eval.run.batch.build_ahead import cores
        from kbsub.eval.run.batch.job import Settings
        from kbsub.eval.run.batch.samples import BatchError

        source = Path(candidates[0])
        given = (("--task", task), ("--declarations", declarations), ("--watch", watch), ("--secret-seed", secret_seed))
        if not_meant := [name for name, value in given if value]:
            _stop(2, f"{', '.join(not_meant)}: of a folder or corpus the names say the tasks, and nothing is declared")
        if out is not None and source.is_dir():
            _stop(2, "--out: the rows of a run folder stay in it (kbsub_rows)")
        settings = Settings(
            precision=precision,
            device=(device or "cuda") if gpu or scheduler else "cpu",
            timeout_s=timeout,
            kernelbench=str(checkout) if checkout else None,
            cell=None if cell == "auto" else cell,
            stages=plan_stages,
            size=size,
            host_executor=device == "cpu",
        )
        where = Where(
            gpus=gpus,
            scheduler=scheduler or None,
            workers=gpus if settings.device == "cpu" and gpus > 1 else None,
            builders=cores() if build_ahead is None else build_ahead,
        )
        try:
            code = run_folder(source, settings, where=where, fields=fields, out=out, retry=retry, console=console)
        except BatchError as error:
            _stop(2, str(error))
        if form == "json" and code in (0, 1):
            folder = source if source.is_dir() else out or Path("runs") / source.stem
            common.print_json(json.loads((folder / RECORD).read_text("utf-8")))
        raise typer.Exit(code)
    if retry:
        _stop(2, "--retry: speaks of a run folder or corpus; the candidates that are named are judged anyway")
    meant = common.task_of("eval", task, candidates or [])
    task = meant.task
    try:
        files = candidate_files(candidates or [], folder_of(task))
        declared = read_declared(files, declarations)
        plan = Plan(
            task=resolve_task(task, kernelbench=checkout, precision=precision),
            task_text=task,
            candidates=files,
            stages=plan_stages,
            precision=precision,
            device=(device or "cuda") if gpu else "cpu",
            kernelbench=checkout,
            timeout_s=timeout,
            host_executor=device == "cpu",
            size=size,
            gpu=gpu,
            secret_seed=secret_seed,
            declared=declared,
        )
        for note in declared.notes():
            console.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
        target = out or Path("runs") / gpu_folder(gpu) / f"{plan.task.slug}.json"
        if watch:
            raise typer.Exit(_watch(console, plan, target))
        show = _Show(console, plan)
        with show:
            rows, _ = run(plan, target, show.report, show.finished)
    except (TaskError, ResultError, DeclarationError) as error:
        _stop(2, str(error))
    _summary(console, plan, rows, target, meant.note if failures(rows) else "")
    if timings:
        _say_where_time_went(console, rows)
    if form == "json":
        said = {"note": meant.note} if meant.note else {}
        common.print_json(
            {"task": plan.task.slug, "result": str(target), "rows": {r.key: r.fields for r in rows}, **said}
        )
    raise typer.Exit(1 if failures(rows) else EXIT_UNCHECKED if any(row.unchecked for row in rows) else 0)


def _watch(console: Any, plan: Any, target: Path) -> int:
    """Judge the plan's files at every save, one verdict after the other, each said as soon as it is known.

    A file that fails its first verdict is asked no more, and a save in between begins again. Ends with Ctrl-C: 0.
    """
    from dataclasses import replace

    from kbsub.eval.commands.saves import SaveWatch
    from kbsub.eval.process.printable import one_line, shown_name
    from kbsub.eval.run.runner import run

    def say(words: str) -> None:
        console.print(one_line(words))

    watch = SaveWatch(plan.candidates)
    try:
        for count in watch.saves():
            say(f"{time.strftime('%H:%M:%S')} {'judging' if count == 1 else 'saved, judging again'}")
            files = plan.candidates
            for stage in plan.stages:  # in the register's order: official, the first, is the quickest without a GPU
                if not files or watch.changed():
                    break
                part = replace(plan, candidates=files, stages=(stage,))
                rows, _ = run(part, target, lambda row, stage, event: None, lambda row: None)
                for row in rows:
                    (end,) = row.outcomes.values()
                    words = f": {end.message}" if end.message else ""
                    say(f"  {shown_name(row.file.stem)}: {stage} {end.status} ({end.seconds:.1f} s){words}")
                files = tuple(row.file for row in rows if not row.failed)
            say("  waiting for a save; Ctrl-C ends")
    except KeyboardInterrupt:
        return 0
    return 0


class _Show:
    """The progress bar on a terminal; a line a row everywhere."""

    def __init__(self, console: Any, plan: Any) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console, self.plan = console, plan
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.bar = self.progress.add_task("", total=len(plan.candidates))

    def __enter__(self) -> None:
        self.progress.__enter__()

    def __exit__(self, *what: Any) -> None:
        self.progress.__exit__(*what)

    def report(self, row: Any, stage: str, event: Any) -> None:
        from kbsub.eval.process.isolated import describe_event
        from kbsub.eval.process.printable import one_line, shown_name

        of = f" of {event['of']}" if isinstance(event.get("of"), int) else ""
        words = one_line(f"{shown_name(row.file.stem)}: {stage}: {describe_event(event)}{of}")
        self.progress.update(self.bar, description=words)

    def finished(self, row: Any) -> None:
        from kbsub.eval.process.printable import one_line, shown_name

        self.progress.advance(self.bar)
        seconds = sum(outcome.seconds for outcome in row.outcomes.values())
        ended = ", ".join(f"{name} {_end(row, name)}" for name in row.outcomes)
        words = one_line(f"{shown_name(row.file.stem)}: {ended} ({seconds:.1f} s)")
        self.console.print(words, markup=False, highlight=False, soft_wrap=True)


def _end(row: Any, stage: str) -> str:
    """How a stage ended; never a bare OK where its record holds something against the file."""
    found, status = row.problems(stage), str(row.outcomes[stage].status)
    return f"{status}, {len(found)} problem{'s' * (len(found) > 1)}" if found else status


def _summary(console: Any, plan: Any, rows: Any, target: Path, note: str) -> None:
    """Official first and apart, then the rest, then every line a person must act on, `note` the last of them."""
    from kbsub.eval.process.printable import one_line, shown_name
    from kbsub.eval.report.terminal import added_table, explanations, official_table, print_wide

    console.print()
    if "official" in plan.stages:
        print_wide(console, official_table(plan, rows))
        for words in dict.fromkeys(row.fields["blind_spots"] for row in rows if "blind_spots" in row.fields):
            line = one_line(f"What correct means at {plan.task.slug}: {words} (docs/blind-spots.md)")
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    added = added_table(rows)
    if added is not None:
        print_wide(console, added)
    for line in [*explanations(rows, plan), *filter(None, [note])]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    certified = sum(bool(row.fields.get("official")) for row in rows)
    if "official" in plan.stages and not certified:
        checked = sum("cpu_check" in row.fields for row in rows)
        where = "no NVIDIA GPU" if plan.gpu is None else "no verdict from upstream's evaluator"
        console.print(
            f"Nothing official was certified ({where}): {checked} of {len(rows)} candidates were checked locally on "
            f"the CPU, with the official predicate and seeds ({one_line(plan.task.provenance)}).",
            style="bold yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"written to {shown_name(target)}", markup=False, highlight=False, soft_wrap=True)


def _say_where_time_went(console: Any, rows: Any) -> None:
    from collections import Counter

    from kbsub.eval.run.phases import age_s, in_words

    phases = Counter[str]()
    for row in rows:
        for seconds in row.phases.values():
            phases.update(seconds)
    judges = sum(outcome.seconds for row in rows for outcome in row.outcomes.values())
    console.print(in_words(age_s(), phases, judges))


def _stop(code: int, message: str) -> NoReturn:
    common.stop("eval", code, message)
