"""`kbsub eval`: candidates through the official verdict, then identity, stress and oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer


def command(
    candidates: Annotated[
        list[str] | None,
        typer.Argument(
            help="Candidate files, or names in submissions/<task>; default: every one of the task. Or one run folder "
            "of level_L_problem_P_sample_S_kernel.py files: a batch that can be interrupted and goes on."
        ),
    ] = None,
    task: Annotated[str, typer.Option(help="level<L>_<id>, or the path of a reference program.")] = "level1_40",
    precision: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp32",
    only: Annotated[str, typer.Option(help="Stages, by comma: official, identity, stress, oracle, guards.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds for one stage of one candidate.", min=1.0)] = 300.0,
    out: Annotated[Path | None, typer.Option(help="Result file; rows of an existing one are kept.")] = None,
    device: Annotated[str, typer.Option(help="cuda, cuda:<index>, or cpu through the host executor.")] = "",
    full: Annotated[bool, typer.Option("--full", help="With --device cpu: the official shape.")] = False,
    kernelbench: Annotated[Path | None, typer.Option(help="The checkout; default: as kbsub fetch left it.")] = None,
    gpus: Annotated[int, typer.Option(help="For a run folder: GPUs of this machine, a row at a time each.", min=1)] = 1,
    scheduler: Annotated[str, typer.Option(help="For a run folder: a dask scheduler that is already running.")] = "",
    declarations: Annotated[
        Path | None,
        typer.Option(help="A candidates.toml that you vouch for; beside a file of one's own none counts by itself."),
    ] = None,
) -> None:
    """Judge candidates: KernelBench's own verdict, then this project's checks; a table and a JSON.

    Exit code: 0 every row is OK or says why it could not be run here; 1 a row failed; 2 the call is wrong; 3 no GPU
    for --device cuda.
    A declaration (contract, precisions, expected failures) counts from this repository's own task folders and from the
    file given with --declarations; it is read before anything runs. Any other candidates.toml is named and ignored.
    """
    from kbsub.adapters.checkout import CheckoutError, CheckoutMissing, find_checkout
    from kbsub.adapters.printable import printable
    from kbsub.adapters.task import TaskError, resolve_task
    from kbsub.eval.console import console_for_stdout
    from kbsub.eval.declarations import DeclarationError, read_declared
    from kbsub.eval.machine_facts import gpu_folder, gpu_index, gpu_name
    from kbsub.eval.result import ResultError
    from kbsub.eval.runner import Plan, failures, run
    from kbsub.eval.stages import DEFAULT_STAGES, STAGES

    console = console_for_stdout()
    stages = tuple(name.strip() for name in only.split(",") if name.strip()) or DEFAULT_STAGES
    if unknown := [name for name in stages if name not in STAGES]:
        _stop(2, f"--only {','.join(unknown)}: no such stage; there are {', '.join(STAGES)}")
    try:
        gpu = gpu_name(gpu_index(device))
    except ValueError as error:
        _stop(2, str(error))
    if device.startswith("cuda") and gpu is None:
        _stop(3, f"--device {device}: the NVIDIA driver offers no such GPU; see kbsub doctor")
    try:
        checkout: Path | None = find_checkout(kernelbench).path
    except CheckoutMissing as error:
        if kernelbench is not None:
            _stop(2, str(error))
        checkout = None
        console.print(printable(str(error)), style="yellow")
    except CheckoutError as error:
        _stop(2, str(error))
    if candidates and len(candidates) == 1 and Path(candidates[0]).is_dir():
        not_for_a_folder = (("--only", only), ("--out", out), ("--full", full))
        if not_meant := [name for name, given in (*not_for_a_folder, ("--declarations", declarations)) if given]:
            _stop(2, f"{', '.join(not_meant)}: a run folder gets the official stage alone, its rows stay in the folder")
        where = (device or "cuda") if gpu or scheduler else "cpu"
        raise typer.Exit(_batch(Path(candidates[0]), where, precision, timeout, checkout, gpus, scheduler, console))
    try:
        files = _files(candidates or [], task)
        declared = read_declared(files, declarations)
        plan = Plan(
            task=resolve_task(task, kernelbench=checkout, precision=precision),
            task_text=task,
            candidates=files,
            stages=tuple(sorted(stages, key=list(STAGES).index)),
            precision=precision,
            device=(device or "cuda") if gpu else "cpu",
            kernelbench=checkout,
            timeout_s=timeout,
            host_executor=device == "cpu",
            full=full,
            gpu=gpu,
            declared=declared,
        )
        for note in declared.notes():
            console.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
        target = out or Path("runs") / gpu_folder(gpu) / f"{plan.task.slug}.json"
        show = _Show(console, plan)
        with show:
            rows, _ = run(plan, target, show.report, show.finished)
    except (TaskError, ResultError, DeclarationError) as error:
        _stop(2, str(error))
    _summary(console, plan, rows, target)
    raise typer.Exit(1 if failures(rows) else 0)


def _batch(
    folder: Path,
    device: str,
    precision: str,
    timeout: float,
    checkout: Path | None,
    gpus: int,
    scheduler: str,
    console: Any,
) -> int:
    """A KernelBench run folder: every sample, the official stage only."""
    from kbsub.eval.batch import BatchError, Settings
    from kbsub.eval.batch_command import run_folder

    settings = Settings(precision, device, timeout, str(checkout) if checkout else None)
    cpu_workers = gpus if device == "cpu" and gpus > 1 else None
    try:
        return run_folder(
            folder, settings, gpus=gpus, scheduler=scheduler or None, workers=cpu_workers, console=console
        )
    except BatchError as error:
        _stop(2, str(error))


def _files(names: list[str], task: str) -> tuple[Path, ...]:
    """The candidate files; a bare name is one of the task's own. Every file of the task without names."""
    from kbsub.adapters.task import TaskError
    from kbsub.eval.declarations import FILE_NAME, NOT_CANDIDATES
    from kbsub.eval.machine_facts import submissions_folder

    local = task.startswith("local:") or task.endswith(".py")
    folder = Path(task.removeprefix("local:")).parent if local else submissions_folder(task)
    if not names and local and not (folder and (folder / FILE_NAME).is_file()):
        raise TaskError(f"--task {task}: its folder declares no candidates ({FILE_NAME}); name the candidate files")
    if not names:
        if folder is None:
            raise TaskError(f"--task {task}: there is no folder submissions/{task}; name the candidate files")
        return _kept_apart([file for file in sorted(folder.glob("*.py")) if file.name not in NOT_CANDIDATES])
    files = []
    for name in names:
        file = Path(name)
        if (
            not file.exists()
            and folder is not None
            and (folder / f"{file.stem}.py").exists()
            and file.parent == Path(".")
        ):
            file = folder / f"{file.stem}.py"
        if not file.is_file():
            raise TaskError(
                f"{name}: no such candidate file" + (f", and none of that name in {folder.name}" if folder else "")
            )
        files.append(file)
    return _kept_apart(files)


def _kept_apart(files: list[Path]) -> tuple[Path, ...]:
    """The files, once it is sure that each has a row of its own."""
    from kbsub.adapters.source import SourceError, check_names
    from kbsub.adapters.task import TaskError

    try:
        check_names(files)
    except SourceError as error:
        raise TaskError(str(error)) from error
    return tuple(files)


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
        from kbsub.adapters.isolation import describe_event
        from kbsub.adapters.printable import one_line, shown_name

        of = f" of {event['of']}" if isinstance(event.get("of"), int) else ""
        words = one_line(f"{shown_name(row.file.stem)}: {stage}: {describe_event(event)}{of}")
        self.progress.update(self.bar, description=words)

    def finished(self, row: Any) -> None:
        from kbsub.adapters.printable import one_line, shown_name

        self.progress.advance(self.bar)
        seconds = sum(outcome.seconds for outcome in row.outcomes.values())
        ended = ", ".join(f"{name} {outcome.status}" for name, outcome in row.outcomes.items())
        words = one_line(f"{shown_name(row.file.stem)}: {ended} ({seconds:.1f} s)")
        self.console.print(words, markup=False, highlight=False, soft_wrap=True)


def _summary(console: Any, plan: Any, rows: Any, target: Path) -> None:
    """Official first and apart, then the rest, then every line a person must act on."""
    from kbsub.adapters.printable import one_line, shown_name
    from kbsub.eval.verdict_table import added_table, explanations, official_table, print_wide

    console.print()
    if "official" in plan.stages:
        print_wide(console, official_table(plan, rows))
    added = added_table(rows)
    if added is not None:
        print_wide(console, added)
    for line in explanations(rows):
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


def _stop(code: int, message: str) -> NoReturn:
    from kbsub.adapters.printable import printable

    typer.echo(printable(f"kbsub eval: {message}"), err=True)
    raise typer.Exit(code)
