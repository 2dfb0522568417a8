"""The register of verdict kinds: every package here that has a module `registration`, in the order they name.

To add a kind, add its package; nothing else is edited. Importing this module also tells the result file which record
stands under which key of a row. Imports no torch.
"""

from __future__ import annotations

import importlib
import pkgutil

import kbsub.eval.verdicts as verdicts
from kbsub.eval.process.isolated import Status
from kbsub.eval.results.model import VERDICT_RECORDS
from kbsub.eval.verdicts.kind import VerdictKind

REGISTRATION = "registration"
OFFICIAL = "official"  # the one kind that decides a row's status

# After one of these from the official judge the others would only repeat it, at the price of a timeout each.
ENDS_THE_ROW = (Status.COMPILE_ERROR, Status.TIMEOUT, Status.CRASHED)
# The row, or one of its judges, did what was asked of it, or could not be asked here and says why.
HONEST = (Status.OK, Status.NOT_RUN)
NOT_FAILED = (*HONEST, Status.NOT_CHECKED)


def _discovered() -> dict[str, VerdictKind]:
    kinds = []
    for package in pkgutil.iter_modules(verdicts.__path__):
        name = f"{verdicts.__name__}.{package.name}"
        if package.ispkg and any(m.name == REGISTRATION for m in pkgutil.iter_modules(_path_of(name))):
            kinds.append(importlib.import_module(f"{name}.{REGISTRATION}").KIND)
    return {kind.name: kind for kind in sorted(kinds, key=lambda kind: kind.order)}


def _path_of(package: str) -> list[str]:
    return list(importlib.import_module(package).__path__)


KINDS: dict[str, VerdictKind] = _discovered()
DEFAULT_KINDS = tuple(kind.name for kind in KINDS.values() if kind.default)
VERDICT_RECORDS.update({kind.key: kind.record for kind in KINDS.values()})
