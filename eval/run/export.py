"""Writes candidates as a KernelBench run folder: `NAME/level_L_problem_P_sample_K_kernel.py` and a mapping file.

Files are copied byte for byte. Sample 0 is the best candidate, because upstream's analysis reads no other sample.
Must not know how anything is measured: it reads stored result files, and only rows of the very same source text.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbsub.adapters import static_checker
from kbsub.adapters.candidate import source_problem
from kbsub.adapters.evaluator import TIMING_METHOD
from kbsub.adapters.pin import PIN
from kbsub.adapters.source import SourceError, read_limited
from kbsub.adapters.task import Task

MAPPING_FILE = "kbsub_export.json"
REFERENCE_FILE = "reference.py"  # beside the samples of a local task: upstream's scripts are told where it is
SCHEMA = 1


class ExportError(RuntimeError):
    """The export cannot be made. The text says why and what to do."""


@dataclass(frozen=True)
class Entry:
    """One file to export: `contract`, `title` and `precisions` are its declaration's, None and () without one."""

    path: Path
    source: bytes
    contract: str | None = None
    title: str | None = None
    precisions: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        return self.path.stem

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source).hexdigest()


@dataclass(frozen=True)
class Best:
    """Which candidate is sample 0, and the sentence that says why."""

    stem: str
    why: str


def sample_name(level: int, problem_id: int, sample_id: int) -> str:
    """The name that upstream's `fetch_kernel_from_disk` looks for."""
    return f"level_{level}_problem_{problem_id}_sample_{sample_id}_kernel.py"


def choose_entries(names: Sequence[str], folder: Path | None, precision: str = "fp32") -> list[Entry]:
    """The candidates called `names` (eval/tasks/files.py), or every one that `folder` declares for `precision`.

    Raises TaskError for a name that is no file and for two files of one stem, ExportError when nothing is left.
    """
    from kbsub.eval.tasks.declarations import FILE_NAME, declaration_of, read_declarations
    from kbsub.eval.tasks.files import candidate_files

    entries = []
    for path in candidate_files(names, folder):
        beside = folder is not None and path.resolve().parent == folder.resolve() and (folder / FILE_NAME).is_file()
        declared = read_declarations(folder) if folder is not None and beside else {}  # shown, never judged by
        row = declared.get(path.stem) if beside else declaration_of(path)
        if names or (row is not None and precision in row.precision):
            facts = (row.contract, row.title, tuple(row.precision)) if row else (None, None, ())
            try:
                entries.append(Entry(path, read_limited(path), *facts))
            except SourceError as error:
                raise ExportError(str(error)) from error
    if not entries:
        raise ExportError(f"{folder.name if folder else 'the task'} declares no candidate for precision {precision}")
    return entries


def best_of(entries: Sequence[Entry], results: Mapping[str, Mapping[str, Any]], precision: str = "fp32") -> Best | None:
    """The fastest candidate by upstream's cuda_event mean among those officially correct, or None if none was measured.

    `results`: name of a result file -> its content. A row counts only when it was measured on the same source text.
    A `control` is never the best: it is declared to be wrong somewhere.
    """
    suffix = "" if precision == "fp32" else f"@{precision}"
    measured: list[tuple[float, str, str]] = []
    for name, content in results.items():
        rows = content.get("candidates", {})
        for entry in entries:
            row = rows.get(entry.stem + suffix) or {}
            mean = ((row.get("timing") or {}).get(TIMING_METHOD) or {}).get("mean_ms")
            correct = (row.get("official") or {}).get("correctness") is True
            if entry.contract != "control" and correct and mean and row.get("sha256") == entry.sha256:
                measured.append((mean, entry.stem, f"{mean:g} ms ({TIMING_METHOD}) in {name}"))
    if not measured:
        return None
    _, stem, why = min(measured)
    return Best(stem, why)


def refusals(entries: Sequence[Entry], precision: str, kernelbench: Path) -> list[str]:
    """Why upstream's scripts, or the file's own declaration, would refuse these files in `precision`: a line a reason.

    Its syntax, no ModelNew, a precision that it is not declared for, and the errors of the static checker at
    `kernelbench`, which `run_and_check.py` asserts.
    """
    found = []
    for entry in entries:
        try:
            text = entry.source.decode("utf-8")
        except UnicodeDecodeError as error:
            found.append(f"{entry.path.name}: cannot be read as UTF-8 text: {error}")
            continue
        if problem := source_problem(text):
            found.append(f"{entry.path.name}: {problem}")
            continue
        if entry.precisions and precision not in entry.precisions:
            found.append(f"{entry.path.name}: candidates.toml declares it for {', '.join(entry.precisions)} only")
        said = static_checker.check(kernelbench, text, precision)
        found += [f"{entry.path.name}: upstream's static checker: {error}" for error in said["errors"]]
    return found


def runs_folder(to: Path | None, kernelbench: Path | None) -> Path:
    """Where run folders go: `to`; else runs/ of a checkout that was named; else runs/ here, never a hidden cache."""
    if to is not None:
        return to
    return kernelbench / "runs" if kernelbench is not None else Path("runs")


def export(
    entries: Sequence[Entry],
    runs: Path,
    run_name: str,
    task: Task,
    *,
    best: Best,
    precision: str = "fp32",
) -> tuple[Path, bool]:
    """Write the folder `runs`/`run_name` for `task`. Returns the folder and whether it is new.

    A local task counts as problem 0 of level 0, and its program goes beside the samples. The folder appears whole or
    not at all. One of that name with other content is never touched: upstream resumes by problem id, so samples added
    to a finished run would be skipped silently. Raises ExportError.
    """
    from kbsub.eval.results.model import write_json_atomic

    level, problem_id = task.level, task.problem_id
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_name):
        raise ExportError(f"run name {run_name!r}: use letters, digits, '.', '_' and '-' alone, it names a folder")
    ordered = sorted(entries, key=lambda entry: entry.stem != best.stem)  # stable: the rest keep their order
    if ordered[0].stem != best.stem:
        raise ExportError(f"--best {best.stem}: not among the exported candidates")
    files = {sample_name(level, problem_id, k): entry.source for k, entry in enumerate(ordered)}
    if not task.level:
        files[REFERENCE_FILE] = task.source.encode("utf-8")
    target = runs / run_name
    if target.exists() and not target.is_dir():
        raise ExportError(f"{target} is a file: choose another --run-name, or another folder with --to")
    if target.exists():
        kernels = {file.name: file.read_bytes() for file in target.glob("*.py")}
        if kernels == files:
            return target, False
        raise ExportError(f"{target} exists and holds other files: choose a fresh --run-name, upstream would skip them")
    samples = [
        {
            "sample_id": k,
            "file": sample_name(level, problem_id, k),
            "candidate": entry.stem,
            "sha256": entry.sha256,
            "contract": entry.contract,
            "title": entry.title,
        }
        for k, entry in enumerate(ordered)
    ]
    mapping = {
        "schema": SCHEMA,
        "run_name": run_name,
        "level": level,
        "problem_id": problem_id,
        "precision": precision,
        "kernelbench_commit": PIN,
        "task": {"name": task.name, "sha256": task.sha256, "provenance": task.provenance},
        "best": {"candidate": best.stem, "why": best.why},
        "samples": samples,
    }
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{run_name}.", dir=target.parent))
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error}; choose another folder with --to") from error
    try:
        for name, source in files.items():
            (draft / name).write_bytes(source)
        write_json_atomic(draft / MAPPING_FILE, mapping)
        draft.chmod(0o755)
        draft.rename(target)
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target, True
