"""The Python interface: `judge` is what `kbsub eval` does, `gate` what `kbsub gate` does, from a notebook or a script.

    from kbsub.eval import judge
    verdict = judge("my_kernel.py", "level1_36")
    print(verdict)              # a line a candidate and verdict
    verdict.ok                  # no row failed
    verdict.frame()             # a pandas DataFrame, a row a candidate

Names, arguments and results here are stable: a change is in the changelog. Candidates run in processes of their own, as
from the command line, and this module imports no torch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kbsub.adapters.checkout import CheckoutError, CheckoutMissing, find_checkout
from kbsub.adapters.task import TaskError, resolve_task
from kbsub.eval.process.isolated import Status
from kbsub.eval.process.printable import one_line
from kbsub.eval.results.model import Candidate, Result
from kbsub.eval.run import gate as gate_answers
from kbsub.eval.run.gate import Check, Judged
from kbsub.eval.run.here import NAME as HERE
from kbsub.eval.run.here import judged_rows
from kbsub.eval.run.machine_facts import gpu_index, gpu_name
from kbsub.eval.run.runner import Plan, Row, failures, run
from kbsub.eval.tasks.declarations import read_declared
from kbsub.eval.tasks.files import candidate_files
from kbsub.eval.tasks.folder import folder_of
from kbsub.eval.tasks.meant import meant_task
from kbsub.eval.verdicts.register import DEFAULT_KINDS, KINDS

if TYPE_CHECKING:
    import pandas

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Verdicts:
    """What `judge` found. `result`: as it stands in a result file; `rows`: key -> row, in the order they were named.

    A row (`kbsub.eval.results.model.Candidate`) has `status`, `reason`, `stages` ({verdict: how its judge ended}),
    `official` (upstream's words; None where its evaluator did not run) and a record a verdict.
    """

    result: Result
    rows: Mapping[str, Candidate]
    ok: bool  # no row failed, and what ran asked something; what could not be run here is no failure: `certified`
    note: str = ""  # that no task was named and level1_40 was taken

    @property
    def certified(self) -> bool:
        """Whether upstream's own evaluator gave every row a verdict, and said it is correct."""
        return all(row.official is not None and row.official.passed for row in self.rows.values())

    def __str__(self) -> str:
        lines = [self.note] if self.note else []
        for key, row in self.rows.items():
            ends = ", ".join(f"{name} {end.status}" for name, end in (row.stages or {}).items())
            lines.append(one_line(f"{key}: {row.status}" + (f" ({row.reason})" if row.reason else "") + f": {ends}"))
        return "\n".join(lines)

    def frame(self) -> pandas.DataFrame:
        """A row a candidate: status, reason, upstream's `correct`, `ms` and `speedup`, and how each verdict ended.

        None (NaN in a column of numbers) where there is no value. Needs pandas: pip install 'kb-submissions[pandas]'.
        """
        import pandas

        records = []
        for key, row in self.rows.items():
            said = row.official
            records.append(
                {
                    "candidate": key,
                    "precision": row.precision,
                    "contract": row.contract,
                    "status": str(row.status),
                    "reason": row.reason,
                    "correct": said.correctness if said else None,
                    "ms": said.ms if said else None,
                    "speedup": said.speedup if said else None,
                    **{name: str(end.status) for name, end in (row.stages or {}).items()},
                    "sha256": row.sha256,
                }
            )
        return pandas.DataFrame.from_records(records).set_index("candidate")


@dataclass(frozen=True)
class Gate:
    """What `gate` found. exit_code: as of the command, 0 passed, 1 failed, 3 cannot be certified on this machine."""

    judged: Mapping[str, Judged]
    exit_code: int

    @property
    def checks(self) -> dict[str, Sequence[Check]]:
        """Row key -> its answers."""
        return {key: each.checks for key, each in self.judged.items()}

    def __str__(self) -> str:
        return "\n".join(
            one_line(f"{key}: {check.name}: {check.answer}: {check.words}")
            for key, checks in self.checks.items()
            for check in checks
        )


def judge(
    candidates: Paths,
    task: str | os.PathLike[str] = "",
    *,
    only: Sequence[str] = DEFAULT_KINDS,
    precision: str = "fp32",
    device: str = "",
    timeout_s: float = 300.0,
    size: str = "",
    kernelbench: Path | None = None,
    declarations: Path | None = None,
    out: Path | None = None,
    finished: Callable[[Row], None] = lambda row: None,
) -> Verdicts:
    """Judge candidates as `kbsub eval` does.

    candidates: the path of a file, or several, or names in submissions/<task>. task: "level1_36", or the path of a
    reference program; "": what the files say (kbsub.eval.tasks.meant), else level1_40, and `note` says so. only: the
    verdicts, of kbsub.eval.verdicts.register.KINDS. device: "" (a GPU where there is one), "cuda:1", or "cpu", where
    CUDA_SOURCE kernels run through the host executor. timeout_s: of one verdict of one candidate. size: official, check
    or small; "": for each verdict the largest that fits here. out: a result file to keep; rows that are there already
    are kept. finished: called with each row.

    Raises TaskError (no such task or file), DeclarationError, ResultError (`out` is of another task or GPU),
    CheckoutError (one that was named and is not the pin), ValueError (no such verdict or device). What a candidate does
    raises nothing: it is the row's status.
    """
    if unknown := [name for name in only if name not in KINDS]:
        raise ValueError(f"only={unknown}: no such verdict; there are {', '.join(KINDS)}")
    names = _names(candidates)
    meant = meant_task(os.fspath(task), names)
    plan = _plan(
        names, meant.task, only, precision, device, timeout_s, size, kernelbench, declarations, device == "cpu"
    )
    rows, result = _run(plan, out, finished)
    return Verdicts(
        result,
        {row.key: result.candidates[row.key] for row in rows},
        not failures(rows) and not any(row.unchecked for row in rows),
        meant.note,
    )


def gate(
    candidates: Paths,
    task: str | os.PathLike[str] = "",
    *,
    require: Sequence[str] = (HERE,),
    precision: str = "fp32",
    device: str = "",
    timeout_s: float = 300.0,
    size: str = "",
    kernelbench: Path | None = None,
    declarations: Path | None = None,
    out: Path | None = None,
) -> Gate:
    """Ask of candidates what `kbsub gate --require` asks; by default all that this machine can check.

    Arguments and errors as of `judge`; require: verdicts, or ("correct-here",).
    """
    here = tuple(require) == (HERE,)
    if unknown := [name for name in require if name not in KINDS and not here]:
        raise ValueError(f"require={unknown}: no such check; there are {', '.join(KINDS)}, or {HERE} alone")
    hosted = device == "cpu" or (here and not device and gpu_name(0) is None)
    kinds = tuple(KINDS) if here else require
    names = _names(candidates)
    text = meant_task(os.fspath(task), names).task
    plan = _plan(names, text, kinds, precision, device, timeout_s, size, kernelbench, declarations, hosted)
    rows, _ = _run(plan, out, lambda row: None)
    judged = judged_rows(plan, rows, here=here)
    return Gate(judged, gate_answers.exit_code([check for each in judged.values() for check in each.checks]))


def _names(candidates: Paths) -> list[str]:
    return [os.fspath(each) for each in ((candidates,) if isinstance(candidates, str | os.PathLike) else candidates)]


def _plan(
    names: Sequence[str],
    text: str,
    kinds: Sequence[str],
    precision: str,
    device: str,
    timeout_s: float,
    size: str,
    kernelbench: Path | None,
    declarations: Path | None,
    hosted: bool,
) -> Plan:
    gpu = gpu_name(gpu_index(device))
    if device.startswith("cuda") and gpu is None:
        raise ValueError(f"device={device!r}: the NVIDIA driver offers no such GPU")
    files = candidate_files(names, folder_of(text))
    checkout = _checkout(kernelbench)
    return Plan(
        task=resolve_task(text, kernelbench=checkout, precision=precision),
        task_text=text,
        candidates=files,
        stages=tuple(name for name in KINDS if name in kinds),
        precision=precision,
        device=(device or "cuda") if gpu else "cpu",
        kernelbench=checkout,
        timeout_s=timeout_s,
        host_executor=hosted,
        size=size,
        gpu=gpu,
        declared=read_declared(files, declarations),
    )


def _checkout(explicit: Path | None) -> Path | None:
    """The verified checkout, or None where nobody named one and there is none."""
    try:
        return find_checkout(explicit).path
    except CheckoutMissing:
        if explicit is not None:
            raise
        return None


def _run(plan: Plan, out: Path | None, finished: Callable[[Row], None]) -> tuple[list[Row], Result]:
    with tempfile.TemporaryDirectory() as nowhere:
        return run(plan, out or Path(nowhere) / "result.json", lambda row, stage, event: None, finished)


__all__ = ["Candidate", "CheckoutError", "Gate", "Status", "TaskError", "Verdicts", "gate", "judge"]
