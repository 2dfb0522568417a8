"""What became of one case: the class of an output from its distance to native and to the float64 answer.

Knows comparisons and errors; runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kbsub.eval.operators.compare.oracle import ErrorOf, Truth, error_of, nearer
from kbsub.eval.operators.compare.predicate import OFFICIAL_TOLERANCE, Comparison, short_float
from kbsub.eval.tasks.cases import APART, FAIL, NEARER, PASS, Case, Row


@dataclass
class Question:
    """What all entrants of a case share."""

    case: Case
    reference: torch.nn.Module
    inputs: list[Any]  # what the reference was given; contiguous
    expected: torch.Tensor
    truth: Truth | None
    no_truth: str
    reference_error: ErrorOf | None
    clean: tuple[list[Any], torch.Tensor] | None = None  # "special" inputs without their special value


def row_of(case: Case, class_: str, reason: str = "", **more: Any) -> Row:
    row: Row = {"name": case.name, "class": class_}
    if reason:
        row["reason"] = reason
    row |= {"equal_nan": True, "seed": case.input.seed, **more}
    if case.oracle:
        row["in_error_table"] = True
    return row


# Errors of two right orders of summation differ by a small factor; of a lower precision or a lost term, by orders of
# magnitude. Where native's own error is more than an eighth of what the tolerance allows, that factor decides.
ROUNDING = 8.0


def classify(
    question: Question,
    comparison: Comparison,
    error: ErrorOf | None,
    *,
    strict: bool,
    accurate: bool,
    undeclared: bool = False,
) -> tuple[str, str]:
    """(class, reason) of an output, from its distance to native and to the float64 answer.

    strict: only the reference's bits pass. accurate: the float64 bounds must hold wherever the answer is finite.
    undeclared: a file that promises nothing is not failed for roundings of the size of native's own.
    """
    if strict and not comparison.identical:
        return FAIL, f"not bit-identical: {comparison.describe()}"
    truth, native = question.truth, question.reference_error
    if accurate and truth is not None and error is not None and truth.normalised:
        if truth.rstd_overflows:
            return (PASS, "") if comparison.allclose else (APART, "float64 rstd is above the largest fp32 number")
        if error.bound_ratio > 1.0 or (truth.finite and not error.allclose):
            return FAIL, (
                f"not as accurate as declared: error uses {error.bound_ratio:.3g} of the bound, "
                f"max abs {error.max_abs:.3g}, allclose to the float64 answer: {error.allclose}"
            )
    if comparison.allclose:
        return PASS, ""
    how = comparison.describe()
    if error is None or native is None:
        return FAIL, how
    errors = f"max abs error against float64: candidate {error.max_abs:.3g}, native {native.max_abs:.3g}"
    if undeclared and nearer(native, error) != "candidate" and _of_rounding(question, native, error):
        return APART, f"native itself is as far from the float64 answer as the tolerance is wide; {errors}"
    if nearer(native, error) != "candidate":
        return FAIL, f"{how}; {errors}"
    if error.allclose:
        return NEARER, f"native is further from the float64 answer; {errors}"
    return FAIL, f"{how}; nearer to the float64 answer than native, but not within tolerance of it; {errors}"


def _of_rounding(question: Question, native: ErrorOf, error: ErrorOf) -> bool:
    """Whether native's own roundings are of the tolerance's size here, and the candidate's are no larger ones."""
    if error.special_mismatches > native.special_mismatches or not error.max_abs <= ROUNDING * native.max_abs:
        return False
    assert question.truth is not None
    narrow = OFFICIAL_TOLERANCE.get(question.expected.dtype, 1e-4) / ROUNDING
    return not error_of(question.truth, question.expected, tolerance=narrow).allclose


def oracle_facts(question: Question, error: ErrorOf | None) -> Row:
    """The oracle part of a row: both errors, and which is nearer."""
    native = question.reference_error
    if error is None or native is None or question.truth is None:
        return {"no_oracle": question.no_truth}
    record: Row = {
        "reference_max_abs": short_float(native.max_abs),
        "candidate_max_abs": short_float(error.max_abs),
        "nearer": nearer(native, error),
        "reference_max_ulp": short_float(native.max_ulp),
        "candidate_max_ulp": short_float(error.max_ulp),
        "reference_allclose": native.allclose,
        "candidate_allclose": error.allclose,
    }
    for side, each in (("reference", native), ("candidate", error)):
        if each.special_mismatches:
            record[f"{side}_special_mismatches"] = each.special_mismatches
        if each.bound_ratio == each.bound_ratio:
            record[f"{side}_bound_ratio"] = short_float(each.bound_ratio)
    if "worst" in (detail := error.to_json()):
        record["candidate_worst"] = detail["worst"]
    facts: Row = {"oracle": record}
    if question.truth.rstd_overflows:
        facts["rstd_overflows_fp32"] = record["rstd_overflows_fp32"] = True
    return facts
