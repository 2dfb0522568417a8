"""The register of timing methods: every module of this package that has METHODS, found when it is asked for.

A new method is one new file here; nothing else lists them. Imports no torch.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

import kbsub.eval.bench.methods as package
from kbsub.eval.bench.methods.method import TimingMethod


@functools.lru_cache(maxsize=None)
def methods() -> Mapping[str, TimingMethod]:
    """Name -> method, in the order in which they run. ValueError when two would write to one key of a result file."""
    found = [
        method
        for module in pkgutil.iter_modules(package.__path__)
        for method in getattr(importlib.import_module(f"{package.__name__}.{module.name}"), "METHODS", ())
    ]
    found.sort(key=lambda method: (method.place, method.name))
    return MappingProxyType(named(found))


def named(found: list[TimingMethod]) -> dict[str, TimingMethod]:
    """The methods by name. ValueError when two of them have a name or a rehearsal's key in common."""
    keys = [key for method in found for key in method.keys]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(f"timing methods: two of them write to {twice!r}; give each its own name and rehearsal")
    return {method.name: method for method in found}


def part_of_all() -> list[str]:
    """What `--methods all` means."""
    return [name for name, method in methods().items() if method.in_all]


def upstream_names() -> list[str]:
    """The methods that are functions of KernelBench's checkout."""
    return [name for name, method in methods().items() if method.upstream]


def compared_keys() -> list[str]:
    """The keys of a result file by which two programs are compared, best first."""
    return [key for method in methods().values() if method.compared for key in method.keys]


def cold_words() -> dict[str, str]:
    """Key -> what it is, of the methods that are measured with a cold L2, best first."""
    return {name: method.cold for name, method in methods().items() if method.cold}


def help_words() -> str:
    """The help of --methods: every method with what it is."""
    words = [f"{name} ({method.title})" for name, method in methods().items() if method.in_all]
    rest = [f"{name} ({method.title})" for name, method in methods().items() if not method.in_all]
    asked = f"; not part of all: {', '.join(rest)}" if rest else ""
    return f"all, or by comma: {', '.join(words)}{asked}."
