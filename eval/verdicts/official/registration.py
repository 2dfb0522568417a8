"""The official verdict's words and its gate answer. Its record stands in results/model.py. No torch, no judge."""

from __future__ import annotations

from kbsub.eval.process.isolated import Status
from kbsub.eval.results.model import Official
from kbsub.eval.verdicts.kind import Answer, Asked, VerdictKind


def answer(said: Official | None, asked: Asked) -> tuple[Answer, str]:
    """Upstream's words alone; a local check on a CPU can fail a candidate but never certify one."""
    status, message = Status(asked.stage["status"]), asked.stage.get("message")
    if said is None or said.correctness is None:
        if status in (Status.OK, Status.NOT_RUN):
            reason = asked.fields.get("reason") or message or "upstream's evaluator was not run"
            return Answer.UNCERTIFIED, f"nothing official: {reason}"
        return Answer.FAIL, f"{status}: {message or 'no message'}"
    passed = said.passed and status is Status.OK
    words = f"compiled {said.compiled}, correct {said.correctness}, trials {said.trials}"
    if not said.correctness or status is not Status.OK:
        words += f"; {status}: {message}"
    if asked.expect.get("official") == "fail":
        if passed:
            return Answer.FAIL, f"declared to fail the official check, and passes it: {words}"
        return Answer.PASS, f"fails as declared: {words}"
    return (Answer.PASS if passed else Answer.FAIL), words


KIND = VerdictKind(
    name="official",
    judge="kbsub.eval.verdicts.official.judge:judge",
    record=Official,
    brief=lambda said: str(said.trials),
    answer=answer,
    order=0,
    own_ending=True,
    runs_candidate=True,
    few_calls=True,
    as_written=True,
)
