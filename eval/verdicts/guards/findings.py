"""What a guard may answer, and the register that names every guard.

Knows no torch and no candidate: `kbsub gate` and the tests read the names here without loading either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One caught fault: `guard` is the register's name, `message` says what was seen and on which probe.

    inside: it was seen in the candidate's own process.
    """

    guard: str
    message: str
    inside: bool = False


# A guard gets a rig (RemoteRig, or InsideRig for those of isolation) and returns the messages of what it found; an
# empty list is a clean bill.
Guard = Callable[[Any], list[str]]


@dataclass(frozen=True)
class Entry:
    """One register line: `family` is value, behaviour or isolation; `question` is the rule in one sentence."""

    name: str
    family: str
    question: str
    guard: Guard

    @property
    def inside(self) -> bool:
        """Whether it is asked in the candidate's own process; all others compare values in one of their own."""
        return self.family == "isolation"


@dataclass
class Findings:
    """What became of some guards: what they found, who could ask, and who could not, as [{guard, reason}]."""

    findings: list[Finding]
    checked: list[str]
    not_checked: list[dict[str, str]]


REGISTER: dict[str, Entry] = {}


def guard(family: str, question: str) -> Callable[[Guard], Guard]:
    """Register a function under its own name as a guard of `family`."""

    def enter(function: Guard) -> Guard:
        name = function.__name__
        if name in REGISTER:
            raise ValueError(f"two guards are called {name}")
        REGISTER[name] = Entry(name, family, question, function)
        return function

    return enter
