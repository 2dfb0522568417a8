"""What a judge does where the task's own program cannot answer: the question is dropped, and a person reads why.

A reference that raises says nothing about a candidate, so it costs the one case or guard that asked. Knows no case, no
guard and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kbsub.adapters.isolation import JudgeFailure, Status
from kbsub.adapters.task import Modules, Task, TaskError

REFERENCE_REFUSES = "the reference refuses it"


@contextmanager
def reference_asked(not_asked: type[Exception]) -> Iterator[None]:
    """Turn whatever the reference raises in here into a `not_asked` that begins with REFERENCE_REFUSES.

    `not_asked`: the judge's own exception for a question that has no meaning; raised in here itself, it passes through.
    Only the reference's code belongs in here: what a candidate raises is the candidate's fault.
    """
    try:
        yield
    except not_asked:
        raise
    except Exception as error:
        raise not_asked(f"{REFERENCE_REFUSES}: {short_error(error)}") from error


def modules_of(task: Task) -> Modules:
    """What the reference program defines. JudgeFailure NOT_RUN when it does not run: then nothing can be judged."""
    try:
        return task.modules()
    except TaskError as error:
        raise JudgeFailure(Status.NOT_RUN, str(error)) from error


def short_error(error: BaseException) -> str:
    """The kind of an exception, its first line and the first errors of a compiler's log, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    shown = lines[:1] + [line for line in lines[1:] if "error:" in line][:2]
    return f"{type(error).__name__}: {' | '.join(shown) or 'no message'}"[:400]
