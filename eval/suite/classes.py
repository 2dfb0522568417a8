"""What became of one case: the class of an output from its distance to native and to the float64 answer.

Knows comparisons and errors; runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kbsub.eval.operators.compare.oracle import ErrorOf, Truth, nearer, spread_of
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
    rounds_operands: bool = False  # native's error is that of TF32: in full fp32 it has next to none


def row_of(case: Case, class_: str, reason: str = "", **more: Any) -> Row:
    row: Row = {"name": case.name, "class": class_}
    if reason:
        row["reason"] = reason
    row |= {"equal_nan": True, "seed": case.input.seed, **more}
    if case.oracle:
        row["in_error_table"] = True
    return row


# What `apart` allows a file that promises nothing. Where native's own error is more than an eighth of what the
# tolerance allows, the distance to native says nothing of a right file: its largest and its root mean square error may
# then be so many times native's, both in units of the tolerance (a single bad element of native's excuses no others; an
# element of 1e6 excuses none of 1). Measured with dots of 27 to 8192 products, at scales of 1 and 100, and layer norms
# of 65536 elements with offsets of 1e3 to 1e5, of which native errs so much:
#   another order of sums: up to 4.5 times the largest, 3.5 the rms; two-pass norms 1.4 and 1.7;
#   a mean summed one by one 125 and 76, a one-pass variance 1363 and 713: wrong.
ROUNDING = 8.0
# Where native rounds its operands to TF32 (a cuDNN convolution, as upstream runs it), that rounding is nearly all of
# its error, and the order of sums makes none: TF32 or fp16 operands 1.0 times both, TF32 by truncation 1.4 and 2.15;
# bf16 operands 6.7 to 12 and 7.6 to 9, fp16 sums 2.3 to 47 and 1.9 to 37, an answer that is 0.1 % off 1.4 and 2.7 at
# the scale of 1: wrong.
OPERANDS = 2.5


def classify(
    question: Question,
    output: torch.Tensor,
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
    if nearer(native, error) == "candidate" and error.allclose:
        return NEARER, f"native is further from the float64 answer; {errors}"
    if undeclared and _of_rounding(question, output, native, error):
        why = "native, which rounds its operands to TF32," if question.rounds_operands else "native itself"
        return APART, f"{why} is as far from the float64 answer as the tolerance is wide; {errors}"
    if nearer(native, error) != "candidate":
        return FAIL, f"{how}; {errors}"
    return FAIL, f"{how}; nearer to the float64 answer than native, but not within tolerance of it; {errors}"


def of_tolerance_size(truth: Truth, native: torch.Tensor) -> bool:
    """Whether native's own error is more than an eighth of what the tolerance allows."""
    return spread_of(truth.y, native)[0] > OFFICIAL_TOLERANCE.get(native.dtype, 1e-4) / 8


def _of_rounding(question: Question, output: torch.Tensor, native: ErrorOf, error: ErrorOf) -> bool:
    """Whether native's own roundings are of the tolerance's size here, and the candidate's are of theirs."""
    assert question.truth is not None
    if error.special_mismatches > native.special_mismatches or not of_tolerance_size(question.truth, question.expected):
        return False
    factor = OPERANDS if question.rounds_operands else ROUNDING
    own, its = spread_of(question.truth.y, question.expected), spread_of(question.truth.y, output)
    return all(mine <= factor * natives for mine, natives in zip(its, own, strict=True))


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
