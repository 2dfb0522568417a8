"""`kbsub starters`: what `kbsub new` writes, judged: 40 tasks in each style, in runs that go on where one stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kbsub.eval.commands import common

# Spread over the three levels, with a step and without one, at shapes that fit beside others.
TASKS = (
    *(f"level1_{n}" for n in (5, 19, 20, 21, 22, 23, 25, 26, 27, 28, 29, 30, 31, 32, 36, 40, 88, 1, 47, 89)),
    *(f"level2_{n}" for n in (1, 2, 9, 12, 14, 17, 22, 28, 29, 40, 42, 57, 62, 63, 76, 81, 86, 95)),
    *(f"level3_{n}" for n in (8, 44)),
)
STYLES = ("torch", "triton", "cuda-inline", "cupy")


def command(
    style: Annotated[str, typer.Option(help=f"By comma: {', '.join(STYLES)}.")] = ",".join(STYLES),
    first: Annotated[int, typer.Option(help="How many of the 40 tasks.", min=1)] = len(TASKS),
    device: Annotated[str, typer.Option(help="cuda, cuda:<index> or cpu.")] = "",
    size: Annotated[str, typer.Option(help="official, check or small; default: the largest that fits.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds for one file.", min=1.0)] = 300.0,
    budget: Annotated[float, typer.Option(help="Seconds after which no further file is begun.", min=1.0)] = 86400.0,
    again: Annotated[bool, typer.Option("--again", help="Judge the files once more whose row is not OK.")] = False,
    out: Annotated[Path | None, typer.Option(help="The record; default runs/<gpu>/starters.json.")] = None,
    kernelbench: common.Checkout = None,
) -> None:
    """Write a starter for each task and style, and ask the official verdict of it; a line a file and a JSON.

    Exit code: 0 every file is OK; 1 one is not, or the budget left some out; 2 the call is wrong.

    \b
    kbsub starters --style torch --device cpu --size small
    kbsub starters --style triton,cuda-inline,cupy --first 20 --budget 540
    kbsub starters --style triton --first 20 --again
    """
    from kbsub.eval.interface import judge
    from kbsub.eval.process.isolated import run_isolated
    from kbsub.eval.process.printable import one_line
    from kbsub.eval.results.model import write_json_atomic
    from kbsub.eval.run.machine_facts import gpu_folder

    styles = [name.strip() for name in style.split(",") if name.strip()]
    if unknown := [name for name in styles if name not in STYLES]:
        common.stop("starters", common.EXIT_USAGE, f"--style {unknown[0]}: there are {', '.join(STYLES)}")
    gpu = common.gpu_of("starters", device)
    checkout, missing = common.checkout_of("starters", kernelbench)
    if missing:
        common.stop("starters", common.EXIT_USAGE, missing)
    target = out or Path("runs") / gpu_folder(gpu) / "starters.json"
    record: dict[str, Any] = json.loads(target.read_text("utf-8")) if target.exists() else {"gpu": gpu, "rows": {}}
    if record["gpu"] != gpu:
        common.stop("starters", common.EXIT_USAGE, f"{target} was made on {record['gpu']}: give another --out")
    started, left_out = time.monotonic(), 0
    for task in TASKS[:first]:
        for name in styles:
            # Without --again a failure stays as recorded, so that a budget goes to files that were never tried.
            known = record["rows"].get(f"{task}/{name}")
            if known is not None and (known["status"] == "OK" or not again):
                continue
            if time.monotonic() - started > budget:
                left_out += 1
                continue
            file = target.parent / "starters" / f"{task}_{name.replace('-', '_')}.py"
            written = run_isolated(
                "kbsub.eval.starter.facts:write",
                {"task": task, "style": name, "file": str(file), "kernelbench": str(checkout)},
                timeout_s=120,
                env={"CUDA_VISIBLE_DEVICES": ""},
            )
            if written.value is None:
                row: dict[str, Any] = {"status": str(written.status), "reason": written.message}
            else:
                found = judge(
                    file, task, only=("official",), device=device, size=size, timeout_s=timeout, kernelbench=checkout
                )
                (judged,) = found.rows.values()
                row = {"status": str(judged.status), "reason": judged.reason, "sha256": judged.sha256}
                row |= {"certified": found.certified, **written.value}
            record["rows"][f"{task}/{name}"] = row
            target.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(target, record)
            typer.echo(one_line(f"{task} {name}: {row['status']} {row['reason'] or ''}"))
    asked = [f"{task}/{name}" for task in TASKS[:first] for name in styles]
    good = sum(record["rows"].get(key, {}).get("status") == "OK" for key in asked)
    typer.echo(f"{good} of {len(asked)} OK, {left_out} not begun; written to {target}")
    raise typer.Exit(0 if good == len(asked) else 1)
