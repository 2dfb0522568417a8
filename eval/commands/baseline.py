"""`kbsub baseline`: upstream's baseline files for this GPU, in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kbsub.eval.commands import common


def command(
    task: Annotated[list[str] | None, typer.Option(help="level<L>_<id>; may be repeated. Default: level1_40.")] = None,
    modes: Annotated[str, typer.Option(help="all, or by comma: eager, compile_default, ...")] = "all",
    precision: Annotated[str, typer.Option(help="fp32 (upstream's own files are bf16), fp16 or bf16.")] = "fp32",
    trials: Annotated[int, typer.Option(help="Timed trials, as upstream's script.", min=2)] = 100,
    out: Annotated[Path | None, typer.Option(help="Folder; default: runs/<gpu>/timing.")] = None,
    kernelbench: common.Checkout = None,
    device: Annotated[str, typer.Option(help="cuda or cuda:<index>.")] = "cuda:0",
    timeout: Annotated[float, typer.Option(help="Seconds for one baseline of one task.", min=1.0)] = 300.0,
    quiet: common.Quiet = False,
    form: common.Format = "table",
) -> None:
    """Time the reference programs with upstream's measure_ref_program_time, in upstream's file names and format.

    Its benchmark_eval_analysis.py reads the files as they are (baseline_file=...). They are fp32, and each entry says
    so; the files that upstream ships are bf16. Finished entries of an existing file are kept.
    Exit code: 0 all measured; 1 one failed; 2 the call is wrong; 3 no GPU.

    \b
    kbsub baseline --task level1_40
    kbsub baseline --task level1_36 --modes eager,compile_default --out timing
    kbsub baseline --task level1_36 --format json
    """
    from kbsub.adapters.checkout import CheckoutError, find_checkout
    from kbsub.adapters.task import PRECISIONS
    from kbsub.eval.bench.baseline_files import BaselinePlan, measure_all
    from kbsub.eval.bench.baselines import BASELINES, require_known
    from kbsub.eval.run.machine_facts import gpu_folder, no_such_gpu

    console = common.console_of("baseline", form, quiet)
    gpu = common.gpu_of("baseline", device)
    if gpu is None:
        _stop(common.EXIT_NO_GPU, no_such_gpu(device))
    if precision not in PRECISIONS:
        _stop(2, f"--precision {precision}: KernelBench knows {', '.join(PRECISIONS)}")
    try:
        checkout = find_checkout(kernelbench)
        known = [name for name, baseline in BASELINES.items() if baseline.upstream_file]
        names = known if modes == "all" else require_known(modes.split(","))
        if without := [name for name in names if name not in known]:
            _stop(2, f"--modes {without[0]}: upstream has no baseline file for it; known are {', '.join(known)}")
    except (CheckoutError, ValueError) as error:
        _stop(2, str(error))
    plan = BaselinePlan(
        tasks=tuple(task or ["level1_40"]),
        baselines=tuple(names),
        precision=precision,
        trials=trials,
        kernelbench=checkout.path,
        device=device if ":" in device else f"{device}:0",
        timeout_s=timeout,
        folder=out or Path("runs") / gpu_folder(gpu) / "timing",
    )
    failed = measure_all(plan, say=console.print)
    if form == "json":
        files = {name: plan.folder / str(BASELINES[name].upstream_file) for name in names}
        means = {name: json.loads(file.read_text("utf-8")) for name, file in files.items() if file.exists()}
        common.print_json({"folder": str(plan.folder), "failed": failed, "baselines": means})
    raise typer.Exit(1 if failed else 0)


def _stop(code: int, message: str) -> NoReturn:
    common.stop("baseline", code, message)
