"""`kbsub bench`: candidates and baselines timed together in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kbsub.eval.bench.methods.register import help_words
from kbsub.eval.commands import common

if TYPE_CHECKING:
    from kbsub.eval.bench.parent import BenchRecord


def command(
    candidates: Annotated[
        list[str] | None,
        typer.Argument(help="Candidate files, or names in submissions/<task>; default: every one of the task."),
    ] = None,
    task: common.Task = "",
    shapes: Annotated[
        str, typer.Option(help="official, all (of the task's bench.toml), or keys by comma.")
    ] = "official",
    precision: Annotated[str, typer.Option(help="fp32, fp16, bf16, by comma.")] = "fp32",
    methods: Annotated[str, typer.Option(help=help_words())] = "all",
    baselines: Annotated[str, typer.Option(help="all, none, or names by comma (eager, compile_default, ...).")] = "all",
    rounds: Annotated[int, typer.Option(help="Graph-replay rounds; 0: as published (35, extra shapes 25).", min=0)] = 0,
    trials: Annotated[int, typer.Option(help="Trials of each upstream method.", min=10)] = 100,
    budget: Annotated[float, typer.Option(help="Seconds for everything; what does not fit says so.", min=10.0)] = 240.0,
    out: Annotated[Path | None, typer.Option(help="Result file; rows of an existing one are kept.")] = None,
    kernelbench: common.Checkout = None,
    device: Annotated[
        str, typer.Option(help="cuda, cuda:<index>, or cpu for a rehearsal (its times mean nothing).")
    ] = "cuda",
    allow_unverified: Annotated[
        bool, typer.Option("--allow-unverified", help="Also time candidates without an official pass; rows say so.")
    ] = False,
    declarations: common.Declarations = None,
    cell: common.Cell = "auto",
    quiet: common.Quiet = False,
    form: common.Format = "table",
) -> None:
    """Time candidates and baselines in one interleaved run; a table and the JSON.

    A candidate is timed when the result file holds an official pass of this very file (kbsub eval --only official).
    Exit code: 0 every program was timed or says why not; 1 one failed while timed; 2 the call is wrong; 3 no GPU.

    \b
    kbsub bench mine.py --task level1_36
    kbsub bench reference_order oracle_accurate --shapes all
    kbsub bench mine.py --device cpu --format json
    """
    from kbsub.adapters.task import PRECISIONS, TaskError, resolve_task
    from kbsub.eval.bench.baselines import DEFAULT_BASELINES, require_known
    from kbsub.eval.bench.parent import run_bench
    from kbsub.eval.bench.plan import (
        BenchPlan,
        choose_methods,
        choose_shapes,
        plan_scenes,
        read_candidate,
    )
    from kbsub.eval.bench.record import store
    from kbsub.eval.bench.timing import TimingProtocol
    from kbsub.eval.process.isolated import Status
    from kbsub.eval.process.printable import shown_name
    from kbsub.eval.results.model import ResultError, read_result
    from kbsub.eval.run.machine_facts import gpu_folder, no_such_gpu
    from kbsub.eval.tasks.bench_file import read_bench_file
    from kbsub.eval.tasks.declarations import DeclarationError, read_declared
    from kbsub.eval.tasks.files import candidate_files
    from kbsub.eval.tasks.folder import folder_of

    console = common.console_of("bench", form, quiet)
    common.confine("bench", cell)
    gpu = common.gpu_of("bench", device)
    if device != "cpu" and gpu is None:
        _stop(common.EXIT_NO_GPU, no_such_gpu(device, "rehearse the run with: --device cpu"))
    precisions = [name.strip() for name in precision.split(",")]
    if unknown := [name for name in precisions if name not in PRECISIONS]:
        _stop(2, f"--precision {unknown[0]}: KernelBench knows {', '.join(PRECISIONS)}")
    checkout, missing = common.checkout_of("bench", kernelbench)
    if missing:
        console.print(f"{missing} Without it upstream's own methods are not timed.", style="yellow", highlight=False)
    task = common.task_of("bench", task, candidates or []).task
    try:
        resolved = resolve_task(task, kernelbench=checkout, precision=precisions[0])
        target = out or Path("runs") / gpu_folder(gpu) / f"{resolved.slug}.json"
        stored = read_result(target) if target.exists() else None
        folder = folder_of(task)
        paths = candidate_files(candidates or [], folder)
        declared = read_declared(paths, declarations)
        if declared.wrong:
            raise DeclarationError(next(iter(declared.wrong.values())))
        for note in declared.notes():
            console.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
        files = [read_candidate(path, declared.rows.get(path)) for path in paths]
        bench_file = read_bench_file(folder)
        names = {"all": list(DEFAULT_BASELINES), "none": []}.get(baselines) or baselines.split(",")
        chosen = [] if baselines == "none" else require_known(names)
        plan = BenchPlan(
            task=task,
            kernelbench=str(checkout) if checkout else None,
            device=device,
            candidates={file.stem: file for file in files},
            scenes=plan_scenes(
                choose_shapes(shapes, bench_file), precisions, files, chosen, stored, allow_unverified=allow_unverified
            ),
            methods=choose_methods(methods),
            protocol=TimingProtocol(trials=trials, **({"rounds": rounds} if rounds else {})),
            budget_s=budget,
            chain=bench_file.chain,
        )
        if rounds:
            for scene in plan.scenes:
                scene.rounds = rounds
    except (TaskError, ResultError, ValueError) as error:
        _stop(2, str(error))

    def keep(found: BenchRecord) -> None:
        store(target, found, resolved)

    show = _BenchProgress(console)
    try:
        with show:
            record = run_bench(plan, on_event=show.event, on_record=keep)
    except (ResultError, OSError) as error:
        _stop(1, f"{target}: {error}")
    except KeyboardInterrupt:
        words = f"interrupted; every finished method is in {shown_name(target)}"
        console.print(words, style="yellow", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    _summary(console, plan, record, target, show.said)
    if form == "json":
        common.print_json(json.loads(target.read_text("utf-8")) if target.exists() else None)
    failed = [
        name
        for scene in plan.scenes
        for name, row in record.rows(scene).items()
        if row["status"] not in (Status.OK.value, Status.NOT_RUN.value)
    ]
    raise typer.Exit(1 if failed or record.failure else 0)


class _BenchProgress:
    """One line that says what is being timed, on a terminal; a line a scene elsewhere."""

    def __init__(self, console: Any) -> None:
        self.console = console
        self.status = console.status("starting") if console.is_terminal else None
        self.said: set[tuple[str, str]] = set()  # programs whose end was printed when it happened

    def __enter__(self) -> None:
        if self.status is not None:
            self.status.__enter__()

    def __exit__(self, *what: Any) -> None:
        if self.status is not None:
            self.status.__exit__(*what)

    def event(self, event: dict[str, Any]) -> None:
        from rich.markup import escape

        from kbsub.eval.process.isolated import describe_event
        from kbsub.eval.process.printable import one_line

        if self.status is not None:
            self.status.update(escape(describe_event(event)))
        bench = event.get("bench", {})
        if bench.get("kind") == "dropped":
            self.said.add((bench["scene"], bench["name"]))
            words = f"{bench['scene']}: {bench['name']}: {bench['status']}: {bench['reason']}"
            self.console.print(one_line(words), markup=False, highlight=False, soft_wrap=True)
        elif bench.get("kind") == "scene" and bench["finished"]:
            timed = sum(bool(row.get("timing")) for row in bench["rows"].values())
            words = one_line(f"{bench['scene']}: {timed} programs timed")
            self.console.print(words, markup=False, highlight=False, soft_wrap=True)


def _summary(console: Any, plan: Any, record: Any, target: Path, said: set[tuple[str, str]]) -> None:
    from kbsub.eval.process.printable import one_line, printable, shown_name
    from kbsub.eval.report import leaderboard as compare
    from kbsub.eval.report.tables import floors_table, shapes_table, timing_table, verdicts_table
    from kbsub.eval.results.model import read_result
    from kbsub.eval.results.timing import OFFICIAL

    for note in record.notes:
        console.print(printable(note), markup=False, highlight=False, soft_wrap=True)
    for scene in plan.scenes:
        for name, row in record.rows(scene).items():
            if row["status"] != "OK" and (scene.id, name) not in said:
                words = f"{scene.id}: {name}: {row['status']}: {row.get('reason', '')}"
                console.print(one_line(words), markup=False, highlight=False, soft_wrap=True)
    if not target.exists():
        console.print("nothing was measured, nothing is written", style="bold yellow")
        return
    result = read_result(target)
    for precision in dict.fromkeys(scene.precision for scene in plan.scenes if scene.key == OFFICIAL):
        console.print(timing_table(result, precision).rich())
        chosen = compare.chosen_candidates(result, precision)
        console.print(verdicts_table(result, chosen, precision).rich())
        if (floors := floors_table(result, chosen, precision)).rows:
            console.print(floors.rich())
    if any(scene.key != OFFICIAL for scene in plan.scenes):
        console.print(shapes_table(result, list(plan.candidates)).rich())
    if plan.device == "cpu":
        console.print("A rehearsal on the CPU: these times say nothing about a GPU.", style="bold yellow")
    console.print(f"written to {shown_name(target)}", markup=False, highlight=False, soft_wrap=True)
    try:
        for path in compare.write_summary(result, target.with_suffix("")):
            console.print(f"written to {shown_name(path)}", markup=False, highlight=False, soft_wrap=True)
    except ModuleNotFoundError as error:
        console.print(f"no pictures: {error}; install it with: pip install matplotlib", highlight=False)


def _stop(code: int, message: str) -> NoReturn:
    common.stop("bench", code, message)
