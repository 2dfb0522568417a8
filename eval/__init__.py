"""What this project adds to the official verdict; it never edits what upstream says.

CONTRIBUTING.md has a map of these rooms, and says where a guard, a task, a verdict or a timing method is added. The
Python interface is `from kbsub.eval import judge, gate` (kbsub.eval.interface), imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kbsub.eval.interface import Gate as Gate
    from kbsub.eval.interface import Verdicts as Verdicts
    from kbsub.eval.interface import gate as gate
    from kbsub.eval.interface import judge as judge

_INTERFACE = ("Gate", "Verdicts", "gate", "judge")


def __getattr__(name: str) -> Any:
    if name in _INTERFACE:
        from kbsub.eval import interface

        return getattr(interface, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_INTERFACE])
