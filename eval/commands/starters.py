"""`kbsub starters`: what `kbsub new` writes, judged: 40 tasks in each style, in runs that go on where one stopped."""

from __future__ import annotations

import hashlib
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
    quiet: common.Quiet = False,
    form: common.Format = "table",
) -> None:
    """Write a starter for each task and style, and ask the official verdict of it; a line a file and a JSON.

    A row stays while its file's text is the same; a starter that reads otherwise now is judged again. A record is of
    one GPU, device and size.
    Exit code: 0 every file is OK; 1 one is not, or the budget left some out; 2 the call is wrong.

    \b
    kbsub starters --style torch --device cpu --size small
    kbsub starters --style triton,cuda-inline,cupy --first 20 --budget 540
    kbsub starters --style triton --first 20 --again --format json
    """
    from kbsub.eval.interface import judge
    from kbsub.eval.process.isolated import run_isolated
    from kbsub.eval.process.printable import one_line, shown_name
    from kbsub.eval.results.manifest import digest
    from kbsub.eval.results.model import write_json_atomic
    from kbsub.eval.run.machine_facts import gpu_folder, no_such_gpu

    console = common.console_of("starters", form, quiet)
    styles = [name.strip() for name in style.split(",") if name.strip()]
    if unknown := [name for name in styles if name not in STYLES]:
        common.stop("starters", common.EXIT_USAGE, f"--style {unknown[0]}: there are {', '.join(STYLES)}")
    common.check_size("starters", size)
    gpu = common.gpu_of("starters", device)
    if device.startswith("cuda") and gpu is None:
        common.stop("starters", common.EXIT_USAGE, no_such_gpu(device))
    checkout, missing = common.checkout_of("starters", kernelbench)
    if missing:
        common.stop("starters", common.EXIT_USAGE, missing)
    target = out or Path("runs") / gpu_folder(gpu) / "starters.json"
    kind = device.partition(":")[0] or ("cuda" if gpu else "none")  # cpu: kernels through the host executor
    try:
        record = read_record(target, {"gpu": gpu, "device": kind, "size": size or "the largest that fits"})
    except ValueError as error:
        common.stop("starters", common.EXIT_USAGE, f"{shown_name(target)}: {error}; write to another file with --out")
    writer, rows = writer_digest(), record["rows"]
    started, left_out = time.monotonic(), 0
    asked = [(task, name) for task in TASKS[:first] for name in styles]
    for task, name in asked:
        key = f"{task}/{name}"
        known = rows.get(key)
        # Without --again a failure stays as recorded, so that a budget goes to files that were never tried.
        kept = known is not None and (known["status"] == "OK" or not again)
        if kept and known.get("writer") == writer:
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
        elif kept and known.get("sha256") == digest(file):
            rows[key] = {**known, "writer": writer}  # what writes it changed, and not what it wrote
            write_json_atomic(target, record)
            continue
        else:
            found = judge(
                file, task, only=("official",), device=device, size=size, timeout_s=timeout, kernelbench=checkout
            )
            (judged,) = found.rows.values()
            row = {"status": str(judged.status), "reason": judged.reason, "sha256": judged.sha256, "writer": writer}
            row |= {"certified": found.certified, **written.value}
        rows[key] = row
        target.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(target, record)
        console.print(one_line(f"{task} {name}: {row['status']} {row['reason'] or ''}"))
    good = sum(rows.get(f"{task}/{name}", {}).get("status") == "OK" for task, name in asked)
    console.print(one_line(f"{good} of {len(asked)} OK, {left_out} not begun; written to {shown_name(target)}"))
    if form == "json":
        common.print_json({"result": str(target), "left_out": left_out, **record})
    raise typer.Exit(0 if good == len(asked) and not left_out else 1)


def read_record(path: Path, terms: dict[str, Any]) -> dict[str, Any]:
    """The record in `path`, or a new one, of these terms (gpu, device, size). ValueError: another's, or none at all."""
    if not path.exists():
        return {**terms, "rows": {}}
    try:
        record = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"is no JSON ({error})") from error
    rows = record.get("rows") if isinstance(record, dict) else None
    if not isinstance(rows, dict) or not all(isinstance(row, dict) and "status" in row for row in rows.values()):
        raise ValueError("is no record of kbsub starters")
    for name, value in terms.items():
        if record.get(name, "") != value:
            raise ValueError(f"was made with {name} {record.get(name, 'unknown')}, and this call is of {name} {value}")
    return {str(key): value for key, value in record.items()}


def writer_digest() -> str:
    """sha256 of what writes starters: where it is the same, a starter of the pinned task reads as it did."""
    import kbsub.eval.starter as package

    files = sorted(file for folder in package.__path__ for file in Path(folder).glob("*.py"))
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()
