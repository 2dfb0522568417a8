"""What a folder of candidates is: KernelBench's sample names, alone or in a tree, or a corpus of JSON lines.

A sample is found without its text being kept: ten thousand of them cost names alone. What is ignored is told, with the
reason. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kbsub.adapters.source import SOURCE_LIMIT, SourceError, read_limited

NAME = re.compile(r"level_(\d+)_problem_(\d+)_sample_(\d+)(_kernel)?\.py")
ROWS_FOLDER = "kbsub_rows"
FIELDS = ("level", "problem", "code", "sample", "run")  # what a corpus may say of a line; the first three it must
LINE_LIMIT = 8 << 20  # bytes of one line of a corpus: a source, escaped, and what was written about it
_NUMBER = re.compile(r"(\d+)\Z")
_RUN = re.compile(r"[^A-Za-z0-9._-]+")
SHOWN = 3  # ignored names that are spelled out


class BatchError(Exception):
    """The batch cannot go on; the message says what is kept and what to do."""


@dataclass(frozen=True)
class Sample:
    """One candidate: a file of the folder, or the line that begins at byte `offset` of a corpus.

    run: the folder it lies in, relative to the one that was named ("" for that one itself), or the corpus's word.
    """

    path: Path
    level: int
    problem_id: int
    sample_id: int
    run: str = ""
    offset: int = -1
    code: str = ""  # the corpus's name of the field that holds the source

    @property
    def task(self) -> str:
        return f"level{self.level}_{self.problem_id}"

    @property
    def name(self) -> str:
        """Upstream's name of the sample, without the run."""
        return f"level_{self.level}_problem_{self.problem_id}_sample_{self.sample_id}"

    @property
    def stem(self) -> str:
        """The name of its row: the run, if there is one, and upstream's name."""
        return f"{self.run}/{self.name}" if self.run else self.name

    def read(self) -> tuple[str, str | None]:
        """(source, None), or ("", why it cannot be judged): a file that is none costs its own row."""
        try:
            if self.offset < 0:
                return read_limited(self.path).decode("utf-8", "replace"), None
            with self.path.open("rb") as file:
                file.seek(self.offset)
                source = json.loads(file.readline(LINE_LIMIT))[self.code]
        except SourceError as error:
            return "", str(error)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return "", f"{self.path.name}: cannot be read: {type(error).__name__}: {error}"
        size = len(str(source).encode("utf-8", "replace"))
        if size > SOURCE_LIMIT:
            return "", f"{self.stem}: {size} bytes of source, the limit is {SOURCE_LIMIT} (256 KiB)"
        return str(source).encode("utf-8", "replace").decode(), None


@dataclass
class Found:
    """The samples, by run, level, problem and sample; ignored: reason -> the names that it was said of."""

    samples: list[Sample] = field(default_factory=list)
    ignored: dict[str, list[str]] = field(default_factory=dict)

    def ignore(self, reason: str, name: str) -> None:
        self.ignored.setdefault(reason, []).append(name)

    def notes(self) -> list[str]:
        """A sentence a reason."""
        lines = []
        for reason, names in self.ignored.items():
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"ignored, {reason}: {', '.join(names[:SHOWN])}{more}")
        return lines


def find_samples(folder: Path) -> Found:
    """Every sample file of the folder and of the folders below it. BatchError when there is none.

    Links to folders are not followed. Of `X.py` and `X_kernel.py` the second, upstream's own name, is meant.
    """
    found, seen = Found(), dict[str, Sample]()
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(each for each in folders if each not in (ROWS_FOLDER, "__pycache__") and each[0] != ".")
        here = Path(where)
        run = "" if here == folder else here.relative_to(folder).as_posix()
        for name in sorted(files, key=lambda each: not each.endswith("_kernel.py")):
            match, path = NAME.fullmatch(name), here / name
            shown = f"{run}/{name}" if run else name
            if match is None:
                if name.endswith(".py"):
                    found.ignore("not named level_L_problem_P_sample_S[_kernel].py", shown)
                continue
            if not path.is_file():
                found.ignore("no regular file", shown)
                continue
            sample = Sample(path, int(match[1]), int(match[2]), int(match[3]), run)
            if sample.stem in seen:
                found.ignore(f"the same sample as {seen[sample.stem].path.name} beside it", shown)
                continue
            seen[sample.stem] = sample
    found.samples = sorted(seen.values(), key=lambda s: (s.run, s.level, s.problem_id, s.sample_id))
    if not found.samples:
        others = "; ".join(found.notes())
        raise BatchError(
            f"{folder}: holds no level_L_problem_P_sample_S_kernel.py; kbsub export writes them, and files of other "
            "names are judged when each is named, with --task" + (f" ({others})" if others else "")
        )
    return found


def read_fields(text: str) -> dict[str, str]:
    """ "level=level_id,problem=task_id,code=custom_code" as {"level": "level_id", ...}; else BatchError."""
    fields: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, sign, key = part.partition("=")
        if not sign or not key or name not in FIELDS or name in fields:
            raise BatchError(f"--fields {text}: {part} is no NAME=FIELD with NAME once of {', '.join(FIELDS)}")
        fields[name] = key
    if missing := [name for name in FIELDS[:3] if name not in fields]:
        raise BatchError(
            f"--fields {text}: a corpus must say {', '.join(missing)} too, such as "
            "level=level_id,problem=task_id,code=custom_code"
        )
    return fields


def find_in_corpus(path: Path, fields: Mapping[str, str]) -> Found:
    """Every line of a corpus that has code. BatchError when there is none.

    Where no field says which sample a line is, they are counted within their run and problem, as they stand.
    """
    found, counts, seen = Found(), dict[tuple[str, int, int], int](), set[str]()
    with path.open("rb") as file:
        number, offset = 0, 0
        while line := file.readline(LINE_LIMIT):
            number, begins = number + 1, offset
            offset += len(line)
            if not line.endswith(b"\n") and len(line) == LINE_LIMIT:
                found.ignore(f"longer than {LINE_LIMIT} bytes", f"line {number}")
                while line and not line.endswith(b"\n"):
                    line = file.readline(LINE_LIMIT)
                    offset += len(line)
                continue
            if not line.strip():
                continue
            said = _said(line, fields)
            if isinstance(said, str):
                found.ignore(said, f"line {number}")
                continue
            level, problem, sample, run = said
            if sample is None:
                sample = counts.get((run, level, problem), 0)
            counts[run, level, problem] = max(counts.get((run, level, problem), 0), sample + 1)
            one = Sample(path, level, problem, sample, run, begins, fields["code"])
            if one.stem in seen:
                found.ignore("the same sample as a line before", f"line {number}")
                continue
            seen.add(one.stem)
            found.samples.append(one)
    found.samples.sort(key=lambda s: (s.run, s.level, s.problem_id, s.sample_id))
    if not found.samples:
        raise BatchError(f"{path}: no line has what --fields names; {'; '.join(found.notes()) or 'it is empty'}")
    return found


def _said(line: bytes, fields: Mapping[str, str]) -> tuple[int, int, int | None, str] | str:
    """(level, problem, sample or None, run) of one line, or why it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return "no JSON"
    if not isinstance(row, dict):
        return "no JSON object"
    code = row.get(fields["code"])
    if not isinstance(code, str) or not code.strip():
        return f"without code in {fields['code']}"
    numbers = [_number(row.get(fields[name])) for name in ("level", "problem")]
    if numbers[0] is None or numbers[1] is None:
        return f"without a number in {fields['level']} and {fields['problem']}"
    sample = _number(row.get(fields["sample"])) if "sample" in fields else None
    if "sample" in fields and sample is None:
        return f"without a number in {fields['sample']}"
    run = _RUN.sub("_", str(row.get(fields["run"], ""))).strip("._") if "run" in fields else ""
    return numbers[0], numbers[1], sample, run


def _number(value: Any) -> int | None:
    """7 of 7, "7", "level_7"; None of anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    match = _NUMBER.search(str(value))
    return int(match[1]) if match and (isinstance(value, str) or value >= 0) else None
