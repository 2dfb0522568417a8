"""What the candidate's side tells of an exception. Must not know how it is sent."""

from __future__ import annotations

from typing import Any

from kbsub.adapters.candidate import CandidateError
from kbsub.eval.process.frames import printable
from kbsub.eval.process.isolated import is_out_of_memory


def error_words(error: BaseException) -> dict[str, Any]:
    """An exception in words; `kind` is all that the other side decides by."""
    kind = "other"
    if isinstance(error, SystemExit):
        kind = "exit"
    elif is_out_of_memory(error) or (isinstance(error, CandidateError) and error.status == "OUT_OF_MEMORY"):
        kind = "memory"
    elif isinstance(error, CandidateError):
        kind = "load"
    elif isinstance(error, ValueError):
        kind = "value"
    try:
        text = str(error).split("\nCUDA kernel errors might")[0].split("\nException raised from")[0]
    except BaseException:
        text = "an exception that cannot be printed"
    return {"kind": kind, "type": printable(type(error).__name__, 80), "text": printable(text)}
