"""What changed between two runs of the same samples: verdicts, and times beyond what one kernel's differ by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbsub.eval.report.board.figures import line_of, read_rows
from kbsub.eval.report.board.words import cell

VERDICTS = ("status", "overrides", "own_namespace", "guards", "referee", "stress_failed")
TIMES = ("ms", "referee_ms", "speedup")
# Upstream gives three digits, and its mean of one kernel moved by up to this much between two calls.
SAME_WITHIN = 0.05


def lines_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The board's rows of one folder by "run/sample", without the folder's own name: two are to be compared."""
    found = {}
    for path, _, row in read_rows([folder]):
        line = line_of(path, row["run"], row)
        name = f"level_{line['level']}_problem_{line['problem']}_sample_{line['sample']}"
        found[f"{row['run']}/{name}" if row["run"] else name] = line
    return found


def diff(before: Path, after: Path, same_within: float = SAME_WITHIN) -> dict[str, Any]:
    """{changed: {sample: {key: [before, after]}}, only_before, only_after, same}.

    A time is changed where the two are more than `same_within` apart, as a part of the smaller one. `source`: the file
    itself is another one; `machine`: GPU and torch are, so that times say nothing about the file.
    """
    old, new = lines_of(before), lines_of(after)
    changed = {name: what for name in old if name in new and (what := _between(old[name], new[name], same_within))}
    both = old.keys() & new.keys()
    return {
        "changed": changed,
        "only_before": sorted(old.keys() - new.keys()),
        "only_after": sorted(new.keys() - old.keys()),
        "same": len(both) - len(changed),
    }


def _between(old: Mapping[str, Any], new: Mapping[str, Any], same_within: float) -> dict[str, list[Any]]:
    found = {key: [old[key], new[key]] for key in VERDICTS if old[key] != new[key]}
    for key in TIMES:
        one, two = old[key], new[key]
        if (one is None) != (two is None) or (one and two and max(one, two) / min(one, two) - 1 > same_within):
            found[key] = [one, two]
    if old["sha256"] != new["sha256"]:
        found["source"] = [old["sha256"][:12], new["sha256"][:12]]
    machines = [", torch ".join((str(line["gpu"] or "no GPU"), str(line["torch"]))) for line in (old, new)]
    if found and machines[0] != machines[1]:
        found["machine"] = machines
    return found


def words(found: Mapping[str, Any]) -> list[str]:
    """A line a sample that changed, then what only one of the runs has, then the count of the rest."""
    lines = []
    for name, what in found["changed"].items():
        parts = [f"{key} {cell(key, one)} -> {cell(key, two)}" for key, (one, two) in what.items()]
        lines.append(f"{name}: {'; '.join(parts)}")
    lines += [f"{name}: only in the first" for name in found["only_before"]]
    lines += [f"{name}: only in the second" for name in found["only_after"]]
    return [*lines, f"{len(found['changed'])} changed, {found['same']} the same"]
