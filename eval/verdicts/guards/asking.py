"""Asks guards, one after the other, and collects what they say. Knows neither what is asked nor where."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kbsub.eval.process.isolated import JudgeFailure, Status, is_out_of_memory
from kbsub.eval.remote.model import CandidateRaised, CandidateRefused, WorkerFailure
from kbsub.eval.verdicts.guards.applicability import NotApplicable
from kbsub.eval.verdicts.guards.findings import Entry, Finding, Findings

Progress = Callable[[dict[str, Any]], None]


def ask(rig: Any, entries: Iterable[Entry], progress: Progress) -> Findings:
    """Ask every guard of `entries`. What ends the candidate's process, or runs out of memory, is raised."""
    found = Findings([], [], [])
    for entry in entries:
        progress({"stage": "guard", "case": entry.name})
        try:
            messages = entry.guard(rig)
        except NotApplicable as reason:
            found.not_checked.append({"guard": entry.name, "reason": str(reason)})
            continue
        except ValueError as refusal:
            words = refusal.text if isinstance(refusal, CandidateRefused) else str(refusal)
            found.not_checked.append({"guard": entry.name, "reason": f"the candidate refuses the probe: {words}"})
            continue
        except WorkerFailure as error:
            raise JudgeFailure(error.status, f"{entry.name}: {error.message}") from error
        except CandidateRaised as error:
            if error.status in (Status.OUT_OF_MEMORY, Status.CRASHED):
                raise JudgeFailure(error.status, f"{entry.name}: {error.message}") from error
            messages = [f"forward raised {_first_line(error.message)}"]
        except JudgeFailure:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            messages = [f"forward raised {type(error).__name__}: {_first_line(str(error))}"]
        found.checked.append(entry.name)
        found.findings += [Finding(entry.name, message, entry.inside) for message in dict.fromkeys(messages)]
    return found


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
