"""Writes candidates as a KernelBench run folder: `runs/NAME/level_L_problem_P_sample_K_kernel.py` and a mapping file.

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

from kbsub.adapters.pin import PIN
from kbsub.adapters.source import SourceError, check_names, read_limited

MAPPING_FILE = "kbsub_export.json"
SCHEMA = 1


class ExportError(RuntimeError):
    """The export cannot be made. The text says why and what to do."""


@dataclass(frozen=True)
class Entry:
    """One file to export: `contract` and `title` are its declaration's, None where nothing declares it."""

    path: Path
    source: bytes
    contract: str | None = None
    title: str | None = None

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


def choose_entries(names: Sequence[str], folder: Path, precision: str = "fp32") -> list[Entry]:
    """The candidates called `names` (paths, or stems of `folder`), or every one that `folder` declares for `precision`.

    Raises ExportError for a name that is no file, for two files of one stem, and when nothing is left.
    """
    from kbsub.eval.declarations import FILE_NAME, declaration_of, read_declarations

    if names:
        paths = [_resolve(name, folder) for name in names]
    elif folder.is_dir():
        declared = read_declarations(folder)
        paths = [folder / f"{stem}.py" for stem, row in declared.items() if precision in row.precision]
    else:
        raise ExportError(f"{folder.name} has no candidates of its own: name the files to export")
    try:
        check_names(paths)  # the mapping tells them apart by name
    except SourceError as error:
        raise ExportError(str(error)) from error
    entries = []
    for path in paths:
        beside = folder.is_dir() and path.resolve().parent == folder.resolve() and (folder / FILE_NAME).is_file()
        row = read_declarations(folder).get(path.stem) if beside else declaration_of(path)  # shown, never judged by
        facts = (row.contract, row.title) if row else (None, None)
        try:
            entries.append(Entry(path, read_limited(path), *facts))
        except SourceError as error:
            raise ExportError(str(error)) from error
    if not entries:
        raise ExportError(f"{folder.name} declares no candidate for precision {precision}")
    return entries


def _resolve(name: str, folder: Path) -> Path:
    for path in (Path(name), folder / name, folder / f"{name}.py"):
        if path.suffix == ".py" and path.is_file():
            return path.resolve()
    known = ", ".join(sorted(file.stem for file in folder.glob("*.py"))) or "none"
    raise ExportError(f"{name}: neither a .py file nor a candidate of {folder.name} (there: {known})")


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
            mean = ((row.get("timing") or {}).get("cuda_event") or {}).get("mean_ms")
            correct = (row.get("official") or {}).get("correctness") is True
            if entry.contract != "control" and correct and mean and row.get("sha256") == entry.sha256:
                measured.append((mean, entry.stem, f"{mean:g} ms (cuda_event) in {name}"))
    if not measured:
        return None
    _, stem, why = min(measured)
    return Best(stem, why)


def export(
    entries: Sequence[Entry],
    kernelbench: Path,
    run_name: str,
    task: tuple[int, int],
    *,
    best: Best,
    precision: str = "fp32",
) -> tuple[Path, bool]:
    """Write `kernelbench`/runs/`run_name` for problem `task` = (level, id). Returns the folder and whether it is new.

    The folder appears whole or not at all. One of that name with other content is never touched: upstream resumes
    by problem id, so samples added to a finished run would be skipped silently. Raises ExportError.
    """
    from kbsub.eval.result import write_json_atomic

    level, problem_id = task
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_name):
        raise ExportError(f"run name {run_name!r}: use letters, digits, '.', '_' and '-' alone, it names a folder")
    if not list((kernelbench / "KernelBench" / f"level{level}").glob(f"{problem_id}_*.py")):
        raise ExportError(f"{kernelbench} has no problem {problem_id} in KernelBench/level{level}")
    ordered = sorted(entries, key=lambda entry: entry.stem != best.stem)  # stable: the rest keep their order
    if ordered[0].stem != best.stem:
        raise ExportError(f"--best {best.stem}: not among the exported candidates")
    files = {sample_name(level, problem_id, k): entry.source for k, entry in enumerate(ordered)}
    target = kernelbench / "runs" / run_name
    if target.exists():
        kernels = {file.name: file.read_bytes() for file in target.glob("*_kernel.py")}
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
        "best": {"candidate": best.stem, "why": best.why},
        "samples": samples,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{run_name}.", dir=target.parent))
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
