"""Turns the rows of a run into gate answers: what was required, whether it holds, and what could not be certified here.

Reads rows and declarations, runs nothing, imports no torch. An answer never changes a verdict: it says whether a
verdict is what was required of this candidate. Declared failures count as kept promises; a control that passes what it
is declared to fail breaks its declaration, and that fails the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from kbsub.adapters.isolation import Status
from kbsub.eval.refusal import REFERENCE_REFUSES
from kbsub.eval.stress_records import declared_stress, no_verdict, unexpected

CHECKS = ("official", "identity", "stress", "oracle", "guards")
EXIT_PASS, EXIT_FAIL, EXIT_USAGE, EXIT_UNCERTIFIED = 0, 1, 2, 3
_LISTED = 3  # problems spelled out in an answer; the JSON of `kbsub eval` has them all


class Answer(str, Enum):
    """One check of one candidate."""

    PASS = "pass"
    FAIL = "fail"
    UNCERTIFIED = "cannot be certified here"
    NOT_REQUIRED = "not required"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Check:
    """`words` say what was seen, and for a failure what it breaks."""

    name: str
    answer: Answer
    words: str
    seconds: float = 0.0


Fields = Mapping[str, Any]
Judge = Callable[[Fields, Mapping[str, Any]], tuple[Answer, str]]


def answers(
    fields: Fields,
    declaration: Mapping[str, Any],
    required: Sequence[str],
    *,
    library_on_cpu: bool = False,
    on_gpu: bool = True,
) -> list[Check]:
    """The answer to every check, required or not, for one row of a result file.

    `fields`: the row as `kbsub eval` writes it (`stages`, `official`, `bit_identity`, `stress`, `oracle`, `guards`).
    `declaration`: its candidates.toml row as JSON, or {}. `library_on_cpu`: a file without kernels of its own was run
    on the CPU; it then ran other library kernels than the ones its declaration speaks of. `on_gpu`: what the caller
    itself knows of this run; a row that claims a GPU where there was none was not written by a judge, and fails.
    """
    found = []
    for name in CHECKS:
        if name not in required:
            found.append(Check(name, Answer.NOT_REQUIRED, "not required of this run"))
            continue
        stage = fields.get("stages", {}).get(name)
        if stage is None:
            found.append(Check(name, Answer.UNCERTIFIED, "was not run"))
            continue
        answer, words = _answer(name, fields, declaration, stage)
        if not on_gpu and (claim := _claims_a_gpu(name, fields)):
            answer, words = Answer.FAIL, f"the {name} record {claim}, but this run had no GPU: no judge wrote that"
        numbers = name in ("stress", "oracle") and stage["status"] == Status.OK.value
        if answer is Answer.FAIL and numbers and library_on_cpu and declaration:
            answer = Answer.UNCERTIFIED
            words = f"the declaration speaks of the library's CUDA kernels, the CPU's gave: {words}"
        found.append(Check(name, answer, words, float(stage.get("seconds", 0.0))))
    return found


def exit_code(checks: Sequence[Check]) -> int:
    """0 every required check passed, 1 one failed, 3 none failed but one cannot be certified here."""
    given = {check.answer for check in checks}
    if Answer.FAIL in given:
        return EXIT_FAIL
    return EXIT_UNCERTIFIED if Answer.UNCERTIFIED in given else EXIT_PASS


def _answer(name: str, fields: Fields, declaration: Mapping[str, Any], stage: Mapping[str, Any]) -> tuple[Answer, str]:
    status = Status(stage["status"])
    if name == "official":
        return _official(fields, declaration, stage)
    if status is Status.NOT_RUN:
        return Answer.UNCERTIFIED, stage.get("message") or "not run"
    if status is not Status.OK:
        return Answer.FAIL, f"{status}: {stage.get('message') or 'no message'}"
    return _JUDGES[name](fields, declaration)


def _claims_a_gpu(name: str, fields: Fields) -> str:
    """What in the record of a check only a GPU could have made, in words; "" where there is nothing."""
    if name == "official":
        return "holds a verdict of upstream's evaluator" if (fields.get("official") or {}).get("correctness") else ""
    found = fields.get({"identity": "bit_identity"}.get(name, name)) or {}
    said = " ".join(str(found.get(key, "")) for key in ("device", "reference") if name != "oracle")
    return f"says that it was made on {said.strip()}" if "cuda" in said else ""


def _expect(declaration: Mapping[str, Any]) -> Mapping[str, Any]:
    return declaration.get("expect") or {}


def _official(fields: Fields, declaration: Mapping[str, Any], stage: Mapping[str, Any]) -> tuple[Answer, str]:
    """Upstream's words alone; a local check on a CPU can fail a candidate but never certify one."""
    said, status = fields.get("official"), Status(stage["status"])
    if said is None or said.get("correctness") is None:
        if status in (Status.OK, Status.NOT_RUN):
            reason = fields.get("reason") or stage.get("message") or "upstream's evaluator was not run"
            return Answer.UNCERTIFIED, f"nothing official: {reason}"
        return Answer.FAIL, f"{status}: {stage.get('message') or 'no message'}"
    passed = bool(said.get("compiled") and said.get("correctness") and status is Status.OK)
    words = f"compiled {said.get('compiled')}, correct {said.get('correctness')}, trials {said.get('trials')}"
    if not said.get("correctness") or status is not Status.OK:
        words += f"; {status}: {stage.get('message')}"
    if _expect(declaration).get("official") == "fail":
        if passed:
            return Answer.FAIL, f"declared to fail the official check, and passes it: {words}"
        return Answer.PASS, f"fails as declared: {words}"
    return (Answer.PASS if passed else Answer.FAIL), words


def _identity(fields: Fields, declaration: Mapping[str, Any]) -> tuple[Answer, str]:
    found = fields.get("bit_identity") or {}
    identical, total, reference = found.get("identical", 0), found.get("total", 0), str(found.get("reference", ""))
    words = f"{identical}/{total} cases bit-equal to {reference or 'native'}"
    if total == 0:
        return Answer.UNCERTIFIED, "no case was run"
    expected = _expect(declaration).get("identity", "skip" if declaration else "pass")
    if problems := found.get("contradictions") or []:
        return Answer.FAIL, f"{_list(problems)} ({words})"
    if reference != "native on cuda" or found.get("device") != "cuda":
        # Against the model of native's order a difference is found here, too; that there is none is for a GPU to say.
        modelled = reference.startswith("model of native's order") and expected == "pass"
        if modelled and identical != total:
            return Answer.FAIL, words
        return Answer.UNCERTIFIED, f"bit identity is promised against native on CUDA; here: {words}"
    if expected == "fail":
        if identical == total:
            return Answer.FAIL, f"declared to differ somewhere, but {words}"
        return Answer.PASS, f"differs as declared: {words}"
    if expected == "skip":
        return Answer.PASS, f"nothing is claimed: {words}"
    return (Answer.PASS if identical == total else Answer.FAIL), words


def _stress(fields: Fields, declaration: Mapping[str, Any]) -> tuple[Answer, str]:
    found = fields.get("stress") or {}
    rows = list(found.get("cases") or [])
    ran = [row for row in rows if row["class"] != "skipped"]
    words = ", ".join(f"{found[key]} {key}" for key in ("passed", "failed", "refused", "skipped") if found.get(key))
    words += " (equal_nan=True)"
    if not ran:
        return Answer.UNCERTIFIED, "no case could be run here"
    if why := no_verdict("stress", rows):
        return Answer.UNCERTIFIED, why
    if refused := sum(str(row.get("reason", "")).startswith(REFERENCE_REFUSES) for row in rows):
        words += f"; {refused} cases skipped because {REFERENCE_REFUSES}"
    declared, elsewhere = _runnable(declared_stress(declaration, str(fields.get("precision", "fp32"))), rows, ran)
    if elsewhere:
        words += f"; cases of {', '.join(elsewhere)} cannot be run here"
    if declaration.get("contract") == "control" and not declared:
        disagreeing = [row["name"] for row in ran if row["class"] in ("fail", "nearer_than_reference")]
        if not disagreeing and elsewhere:
            return Answer.UNCERTIFIED, words
        if not disagreeing:
            return Answer.FAIL, f"declared a control, but fails no case: {words}"
        return Answer.PASS, f"fails as a control does ({disagreeing[0]} first): {words}"
    problems = unexpected(ran, declared, accurate=bool(declaration.get("accurate")))
    return (Answer.FAIL, f"{_list(problems)} ({words})") if problems else (Answer.PASS, words)


def _runnable(
    declared: Mapping[str, Sequence[str]], rows: Sequence[Mapping[str, Any]], ran: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, list[str]], list[str]]:
    """The declared patterns, and apart from them those whose every case was skipped on this machine."""
    here: dict[str, list[str]] = {}
    elsewhere = []
    for way, patterns in declared.items():
        for pattern in patterns:
            known = any(fnmatchcase(row["name"], pattern) for row in rows)
            if known and not any(fnmatchcase(row["name"], pattern) for row in ran):
                elsewhere.append(pattern)
            else:
                here.setdefault(way, []).append(pattern)
    return here, elsewhere


def _oracle(fields: Fields, declaration: Mapping[str, Any]) -> tuple[Answer, str]:
    """Accurate candidates within the bound everywhere; others no farther than the tolerance where native is within."""
    cases = {name: case for name, case in (fields.get("oracle") or {}).items() if isinstance(case, Mapping)}
    if not cases:
        return Answer.UNCERTIFIED, "no case has a float64 answer here"
    accurate, control = bool(declaration.get("accurate")), declaration.get("contract") == "control"
    problems = []
    for name, case in cases.items():
        if case.get("rstd_overflows_fp32"):
            continue  # the float64 answer is beyond float32 there; listed apart
        if accurate and (not case["candidate_allclose"] or float(case.get("candidate_bound_ratio", 0)) > 1):
            problems.append(
                f"{name}: max abs error {case['candidate_max_abs']}, {case.get('candidate_bound_ratio')} of the bound"
            )
        elif not accurate and case["reference_allclose"] and not case["candidate_allclose"]:
            problems.append(f"{name}: max abs error {case['candidate_max_abs']}, native's {case['reference_max_abs']}")
    nearer = sum(case.get("nearer") in ("candidate", "equal") for case in cases.values())
    words = f"as near to the float64 answer as native or nearer in {nearer}/{len(cases)}"
    if problems and control:
        return Answer.PASS, f"a control, beyond the tolerance in {len(problems)} cases: {words}"
    return (Answer.FAIL, f"{_list(problems)} ({words})") if problems else (Answer.PASS, words)


def _guards(fields: Fields, declaration: Mapping[str, Any]) -> tuple[Answer, str]:
    found = fields.get("guards") or {}
    if findings := found.get("findings") or []:
        return Answer.FAIL, _list([f"{finding['guard']}: {finding['message']}" for finding in findings])
    checked, unasked = len(found.get("checked") or []), found.get("not_checked") or []
    if not found.get("clean") or not checked:
        return Answer.UNCERTIFIED, "no guard could ask its question"
    words = f"{checked} guards clean"
    if unasked:
        words += "; not asked: " + ", ".join(f"{entry['guard']} ({entry['reason']})" for entry in unasked)
    return Answer.PASS, words


_JUDGES: dict[str, Judge] = {"identity": _identity, "stress": _stress, "oracle": _oracle, "guards": _guards}


def _list(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return "; ".join(problems[:_LISTED]) + more
