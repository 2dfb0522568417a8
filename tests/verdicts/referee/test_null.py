"""The null candidate as it is: a worker in its cell, batches by the protocol, calls of another length in between."""

from __future__ import annotations

import torch

from kbsub.eval.verdicts.referee.null import Null


def test_the_null_candidate_answers_before_and_after_its_calls_are_made_as_long_as_anothers():
    null = Null(torch.device("cpu"), 60.0, None)
    try:
        null.load(6)
        assert null.before_ms < 1e3 and null.once_ms < 1e3
        null.match(0.2)
        before = [null.run(2) for _ in range(3)]
        null.match(5.0)
        worked: list[int] = []
        after = [null.run(6, lambda: worked.append(1)) for _ in range(3)]
        assert all(0 < ms < 1e4 for ms in (*before, *after)) and len(worked) == 3
    finally:
        null.close()
