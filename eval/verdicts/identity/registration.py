"""The bit-identity verdict as a record, its words and its gate answer. No torch, no judge."""

from __future__ import annotations

from typing import Any, ClassVar

from kbsub.eval.results.record import Record
from kbsub.eval.tasks.cases import PARAMETERS_NOT_SET
from kbsub.eval.verdicts.kind import Answer, Asked, Column, VerdictKind, contradictions, listed

ON_CUDA = "native on cuda"  # how the record names its reference
OF_ORDER = "model of native's order"
_WELL_POSED = ("official", "uniform", "normal")  # inputs on which no order moves an answer by the official tolerance


class BitIdentity(Record):
    """`identical` of `total` cases are bit-equal to the reference; a refused case counts, a skipped one does not."""

    KEY: ClassVar[str] = "bit_identity"

    identical: int
    total: int
    cases: Any
    secret: Any = None  # cases with a secret seed, which are in no count; absent in older files
    reference: str = ""
    device: str | None = None
    confined: dict[str, Any] | None = None  # what the candidate's process was confined by: {level, lacks}
    precision: str | None = None
    tolerance: float | None = None
    equal_nan: bool | None = None
    nan_rule: str | None = None
    nan_payload_differences: int | None = None
    full_size: dict[str, int] | None = None
    close: int | None = None
    refused: int | None = None
    skipped: int | None = None
    repeated_runs: dict[str, Any] | None = None
    contradictions: list[str] | None = None
    official: bool | None = None
    parameters_set: str | None = None  # by key, by order and shape ...; absent where none are set, and in older files


def answer(found: BitIdentity | None, asked: Asked) -> tuple[Answer, str]:
    if found is None or found.total == 0:
        return Answer.UNCERTIFIED, "no case was run"
    words = f"{found.identical}/{found.total} cases bit-equal to {found.reference or 'native'}{_plus(found)}"
    all_equal = found.identical == found.total and all(case["identical"] for case in _judged(found.secret))
    expected = asked.expect.get("identity", "skip" if asked.declaration else "pass")
    if found.contradictions:
        return Answer.FAIL, f"{listed(found.contradictions)} ({words})"
    if found.reference != ON_CUDA or found.device != "cuda":
        # Against the model of native's order a difference is found here, too; that there is none is for a GPU to say.
        if found.reference.startswith(OF_ORDER) and expected == "pass" and not all_equal:
            return Answer.FAIL, words
        # Order moves last bits; on official inputs no order moves an answer beyond the official tolerance.
        if expected == "pass" and (wrong := _beyond_tolerance(found)):
            return (
                Answer.FAIL,
                f"beyond {found.tolerance:g} of native on the same device: {listed(list(wrong))} ({words})",
            )
        return Answer.UNCERTIFIED, f"bit identity is promised against native on CUDA; here: {words}"
    if expected == "pass" and all_equal and (why := _unset(found)):
        return Answer.UNCERTIFIED, f"{why} ({words})"
    if expected == "fail":
        if all_equal:
            return Answer.FAIL, f"declared to differ somewhere, but {words}"
        return Answer.PASS, f"differs as declared: {words}"
    if expected == "skip":
        return Answer.PASS, f"nothing is claimed: {words}"
    return (Answer.PASS if all_equal else Answer.FAIL), words


def _judged(cases: Any) -> list[dict[str, Any]]:
    return [case for case in cases or [] if "skipped" not in case]


def _plus(found: BitIdentity) -> str:
    """The secret cases, in words; "" for a record that has none."""
    judged = _judged(found.secret)
    return f", plus {sum(case['identical'] for case in judged)}/{len(judged)} secret" if found.secret else ""


def problems(found: BitIdentity) -> list[str]:
    """Wrong answers only: a file that declares nothing promises no bits."""
    return [f"{name}: {why}" for name, why in _beyond_tolerance(found).items()]


def _beyond_tolerance(found: BitIdentity) -> dict[str, str]:
    """Cases on official inputs, or on such as they are, whose answer is wrong, not merely another order's."""
    if found.tolerance is None:
        return {}
    words = f"beyond {found.tolerance:g} of {found.reference or 'native'}"
    far = [case for case in (*found.cases, *(found.secret or ())) if case.get("allclose") is False]
    return {str(case.get("name")): case.get("reason", words) for case in far if case.get("input") in _WELL_POSED}


def equal(found: BitIdentity) -> str:
    return f"{found.identical}/{found.total}"


def _unset(found: BitIdentity) -> str:
    """Why it is not known whether the file uses its parameters; "" where it is, or where there are none."""
    unset = [str(case["skipped"]) for case in found.cases if str(case.get("skipped")).startswith(PARAMETERS_NOT_SET)]
    return f"{len(unset)} of {len(found.cases)} cases were not asked: {unset[0]}" if unset else ""


def not_checked(found: BitIdentity) -> str:
    if why := _unset(found):
        return why
    if found.total >= max(found.skipped or 0, 1):
        return ""
    skipped = [case for case in found.cases if "skipped" in case]
    first = f", the first: {skipped[0].get('name')}: {skipped[0]['skipped']}" if skipped else ""
    return f"{len(skipped)} of {found.total + len(skipped)} cases were not asked{first}"


KIND = VerdictKind(
    name="identity",
    judge="kbsub.eval.verdicts.identity.judge:judge",
    record=BitIdentity,
    brief=lambda found: f"{equal(found)} bit-equal{_plus(found)}{contradictions(found.contradictions)}",
    answer=answer,
    order=1,
    columns=(Column("bit-equal", equal),),
    not_checked=not_checked,
    problems=problems,
    few_calls=True,
    own_shapes=True,
)
