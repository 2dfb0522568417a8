"""What a guard may answer, and the register that names every guard.

Knows no torch and no candidate: `kbsub gate` and the tests read the names here without loading either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kbsub.eval.verdicts.guards.rig import Rig


@dataclass(frozen=True)
class Finding:
    """One caught fault: `guard` is the register's name, `message` says what was seen and on which probe."""

    guard: str
    message: str


# A guard returns the messages of what it found; an empty list is a clean bill.
Guard = Callable[["Rig"], list[str]]


@dataclass(frozen=True)
class Entry:
    """One register line: `family` is value, behaviour or isolation; `question` is the rule in one sentence."""

    name: str
    family: str
    question: str
    guard: Guard


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
