"""Finds the operator that a task declares: a package here with a module `operator` that defines OPERATOR."""

from __future__ import annotations

import functools
import importlib
import pkgutil

import kbsub.eval.operators as operators
from kbsub.adapters.task import Task
from kbsub.eval.operators.operator import Operator
from kbsub.eval.tasks.task_file import read_task_file, task_file
from kbsub.eval.tasks.toml_file import TaskFolderError

MODULE = "operator"


def known() -> list[str]:
    """The names of the operators there are, the default left out."""
    found = []
    for package in pkgutil.iter_modules(operators.__path__):
        if package.ispkg:
            inside = importlib.import_module(f"{operators.__name__}.{package.name}").__path__
            found += [package.name for module in pkgutil.iter_modules(inside) if module.name == MODULE]
    return found


@functools.lru_cache(maxsize=None)
def operator(name: str | None) -> Operator:
    """The operator of this name; the default for None. TaskFolderError for a name that no package here has."""
    if name is None:
        return Operator()
    if name not in known():
        raise TaskFolderError(f"operator = {name!r}: there is none of that name; known are {', '.join(known())}")
    found: Operator = importlib.import_module(f"{operators.__name__}.{name}.{MODULE}").OPERATOR
    return found


def operator_of(task: Task) -> Operator:
    """The operator of the task's own task.toml: beside a local reference program, else under submissions/."""
    declared = read_task_file(task.folder) if task.folder is not None else task_file(task.slug)
    return operator(declared.operator)
