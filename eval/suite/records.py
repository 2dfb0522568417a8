"""What becomes of the rows of a stress run: counts, the entries of a result file, and what a declaration expects.

Plain dicts in, plain dicts out; no torch, so that a parent process, the gate and the reports can use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from kbsub.adapters.refusal import REFERENCE_REFUSES
from kbsub.adapters.task import PRECISIONS
from kbsub.eval.process.isolated import Status
from kbsub.eval.tasks.cases import (
    APART,
    CLASSES,
    EPS_NOT_SET,
    FAIL,
    NEARER,
    OFFICIAL_CASE,
    PARAMETERS_NOT_SET,
    PASS,
    REFUSED,
    SECRET,
    SKIPPED,
    Row,
)


def stress_record(
    rows: Sequence[Row], facts: Mapping[str, Any], declaration: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The `.stress` entry of a result file. equal_nan is always true here, and always said.

    contradictions: where a full run on a GPU differs from the declaration; see `contradictions`.
    """
    rows, secret = _apart(rows)
    apart = [row["name"] for row in rows if row.get("rstd_overflows_fp32")]
    record = {**counts(rows), "equal_nan": True, **facts, "rstd_overflows_fp32": apart}
    if declaration and facts.get("device") == "cuda" and facts.get("complete"):
        record["contradictions"] = contradictions(rows, declaration, str(facts.get("precision", "fp32")))
        record["contradictions"] += secret_problems(rows, secret)
    return {**record, "cases": list(rows), **({"secret": secret} if secret else {})}


def _apart(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The cases that everybody knows, and those of a secret seed: these are in no count."""
    return [row for row in rows if not _secret(row)], [row for row in rows if _secret(row)]


def _secret(row: Mapping[str, Any]) -> bool:
    return str(row["name"]).startswith(SECRET)


def secret_problems(rows: Sequence[Mapping[str, Any]], secret: Sequence[Mapping[str, Any]]) -> list[str]:
    """Secret cases that failed where the same case of the seed that everybody knows did not."""
    known = {row["name"]: row["class"] for row in rows}
    return [
        f"{row['name']} (seed {row.get('seed')}): {row['class']}: {row.get('reason', 'no reason given')}"
        for row in secret
        if row["class"] in (FAIL, NEARER) and known.get(row["name"].removeprefix(SECRET)) not in (FAIL, NEARER)
    ]


def secret_words(secret: Sequence[Mapping[str, Any]]) -> str:
    """How many secret cases there were beside the others, in words; "" for a record that has none."""
    asked = [row for row in secret if row["class"] != SKIPPED]
    failed = sum(row["class"] == FAIL for row in asked)
    if not secret:
        return ""
    return f", plus {len(asked)} secret cases" + (f", {failed} of them failed" if failed else "")


def contradictions(rows: Sequence[Row], declaration: Mapping[str, Any], precision: str = "fp32") -> list[str]:
    """What the rows show that candidates.toml did not say, or the other way round.

    Bit-identical and accurate candidates claim to fail nowhere. Others claim something where `expect.stress` does.
    """
    declared, accurate = declared_stress(declaration, precision), bool(declaration.get("accurate"))
    if not declared and not accurate and declaration.get("contract") != "bit-identical":
        return []
    return unexpected(rows, declared, accurate=accurate)


def declared_stress(declaration: Mapping[str, Any], precision: str) -> Mapping[str, Any]:
    """`expect.stress` of a declaration: of this precision where it is written by precision, else what is there."""
    declared: Mapping[str, Any] = (declaration.get("expect") or {}).get("stress") or {}
    if not any(name in declared for name in PRECISIONS):
        return declared
    by_precision: Mapping[str, Any] = declared.get(precision) or {}
    return by_precision


def oracle_record(rows: Sequence[Row]) -> dict[str, Any]:
    """The `.oracle` entry: the cases of the error table that have an answer, keyed by name; "secret": likewise."""
    known, secret = ({row["name"]: row["oracle"] for row in part if _in_table(row)} for part in _apart(rows))
    return {**known, **({"secret": secret} if secret else {})}


def _in_table(row: Mapping[str, Any]) -> bool:
    return bool(row.get("in_error_table")) and "oracle" in row


NO_TIME = "no time was left"  # the reason of a case that was not begun
NEEDS_GPU = "needs an NVIDIA GPU"  # the reason of a case that a candidate could not be asked on a CPU begins so


def ended_without(why: str) -> Status:
    """The status of a run that is no verdict, by the words of `no_verdict`."""
    return Status.NOT_RUN if NEEDS_GPU in why else Status.NOT_CHECKED


def no_verdict(section: str, rows: Sequence[Row]) -> str:
    """Why these rows are no verdict of `section` ("stress" or "oracle"), in words; "" where they are one.

    A stage that judged nothing or less than half of its cases is not OK, nor is one whose reference refuses the task as
    it is, nor one of a candidate whose parameters cannot be set: whether it uses them is not known. What an eps decides
    is not counted for a candidate whose eps cannot be set. A failed case is a verdict.
    """
    for row in rows:
        reason = str(row.get("reason", ""))
        if row["name"] == OFFICIAL_CASE and row["class"] == SKIPPED and reason.startswith(REFERENCE_REFUSES):
            return f"{row['name']}: {reason}"
    judged = [row for row in rows if row["class"] != SKIPPED]
    if any(row["class"] == FAIL for row in judged):
        return ""
    if not judged:
        first = f", the first: {rows[0]['name']}: {rows[0].get('reason', 'no reason given')}" if rows else ""
        return f"no case was judged: {len(rows)} skipped{first}"
    skipped = [row for row in rows if row["class"] == SKIPPED]
    skipped = [row for row in skipped if not str(row.get("reason", "")).startswith(EPS_NOT_SET)]
    late = sum(row.get("reason") == NO_TIME for row in skipped)
    if late and section == "oracle":  # its record has no row of them; in that of stress the gate's answer sees them
        return f"{late} cases were not asked, {NO_TIME}: a larger --timeout asks them"
    # A file says itself that it needs a GPU for a case: one that says so of the hard ones alone has not passed them.
    unasked = [row for row in skipped if str(row.get("reason", "")).startswith(NEEDS_GPU)]
    unasked = unasked or [row for row in skipped if str(row.get("reason", "")).startswith(PARAMETERS_NOT_SET)]
    if unasked or len(skipped) > len(judged):
        reasons = Counter(str(row.get("reason", "no reason given")) for row in unasked or skipped)
        (reason, count), *_ = reasons.most_common(1)
        return f"{len(skipped)} of {len(judged) + len(skipped)} cases were not asked, {count} of them: {reason}"
    if section == "oracle" and not oracle_record(rows):
        why = judged[0].get("no_oracle") or judged[0].get("reason", "no reason given")
        return f"no case could be compared with a float64 answer, the first: {judged[0]['name']}: {why}"
    return ""


def counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many rows of each class, under the names of a result file."""
    found = {name: sum(row["class"] == name for row in rows) for name in CLASSES}
    return {
        "passed": found[PASS],
        "failed": found[FAIL],
        "refused": found[REFUSED],
        "skipped": found[SKIPPED],
        "nearer_than_reference": found[NEARER],
        "apart": found[APART],
    }


def unexpected(rows: Sequence[Mapping[str, Any]], declared: Mapping[str, Any], *, accurate: bool = False) -> list[str]:
    """Where the rows differ from a declaration `stress = {fail = [patterns], nearer_than_reference = [patterns]}`.

    A row may fail (or be nearer than the reference) exactly where a pattern of that class says so, `accurate`
    candidates may be nearer anywhere; and each pattern must be met by at least one row, none of which passes:
    a control that passes what it is declared to fail is a failure of the declaration. "disagrees" matches both classes.
    """
    problems = []
    ways = {FAIL: {FAIL}, NEARER: {NEARER}, "disagrees": {FAIL, NEARER}}
    unknown = set(declared) - set(ways)
    if unknown:
        return [f"unknown class {sorted(unknown)[0]!r} in the declaration; known are {', '.join(ways)}"]
    expected: dict[str, set[str]] = {}
    for way, patterns in declared.items():
        for pattern in patterns:
            met = [row for row in rows if fnmatchcase(row["name"], pattern) and row["class"] != SKIPPED]
            if not met:
                problems.append(f"{pattern}: declared to be {way}, but no case of that name ran")
            for row in met:
                expected.setdefault(row["name"], set()).update(ways[way])
    for row in rows:
        found, allowed = row["class"], expected.get(row["name"])
        if allowed is not None and found not in allowed and found != SKIPPED:
            problems.append(f"{row['name']}: declared {' or '.join(sorted(allowed))}, but it is {found}")
        elif allowed is None and (found == FAIL or (found == NEARER and not accurate)):
            problems.append(f"{row['name']}: {found}: {row.get('reason', 'no reason given')}")
    return problems
