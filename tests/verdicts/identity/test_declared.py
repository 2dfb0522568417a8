"""Where a finished identity verdict contradicts a declaration, and where it does not."""

from __future__ import annotations

import pytest

from kbsub.eval.verdicts.identity.declared import contradictions_of


def verdict(*cases: tuple[str, bool, bool], distinct: int = 1, precision: str = "fp32") -> dict:
    """(input, identical, allclose) a full-size case."""
    rows = [
        {"name": f"case {at}", "group": "full size", "input": kind, "identical": identical, "allclose": close}
        for at, (kind, identical, close) in enumerate(cases)
    ]
    return {"cases": rows, "repeated_runs": {"distinct": distinct}, "tolerance": 1e-4, "precision": precision}


SAME, NEAR, FAR = (True, True), (False, True), (False, False)
OUTCOMES = {  # id: (expect, verdict, words of each contradiction)
    "identical as declared": ({"identity": "pass"}, verdict(("normal", *SAME)), []),
    "not identical": ({"identity": "pass"}, verdict(("normal", *SAME), ("x100", *NEAR)), ["the first: case 1"]),
    "runs differ": ({"identity": "pass"}, verdict(("normal", *SAME), distinct=2), ["2 different results"]),
    "runs of a control differ": (
        {"identity": "fail"},
        verdict(("normal", *NEAR), distinct=2),
        ["2 different results"],
    ),
    "runs differ where nothing is claimed": ({}, verdict(("normal", *NEAR), distinct=3), ["3 different results"]),
    "a control too good": ({"identity": "fail"}, verdict(("normal", *SAME)), ["every case is bit-identical"]),
    "differs as declared": ({"identity": "fail"}, verdict(("normal", *NEAR)), []),
    "nothing claimed": ({"identity": "skip"}, verdict(("normal", *FAR)), []),
    "fails where declared": ({"beyond_tolerance": ["+1000"]}, verdict(("normal", *NEAR), ("+1000", *FAR)), []),
    "does not fail where declared": (
        {"beyond_tolerance": ["+1000"]},
        verdict(("normal", *NEAR), ("+1000", *NEAR)),
        ["case 1: declared beyond 0.0001 of native, is within"],
    ),
    "another tolerance": ({"beyond_tolerance": ["+1000"]}, verdict(("+1000", *NEAR), precision="bf16"), []),
    "fails elsewhere": (
        {"beyond_tolerance": ["+1000"]},
        verdict(("normal", *FAR), ("+1000", *FAR)),
        ["case 0: declared within 0.0001 of native, is beyond"],
    ),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_a_measured_verdict_contradicts_a_declaration(case):
    expect, found, words = OUTCOMES[case]
    said = contradictions_of(expect, found)
    assert len(said) == len(words) and all(w in s for w, s in zip(words, said, strict=True)), said
