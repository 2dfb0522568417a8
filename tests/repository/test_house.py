"""Measures of the house: no import cycle, no long module, no crowded folder, one class a name. Runs nothing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from support.paths import ROOT

MOST_LINES = 400
MOST_MODULES = 15  # in one folder; commands/ has a file a verb
SHARED = {
    "Entry": "run/export: a sample of a run folder; guards/findings: a line of the register",
    "Finding": "run/doctor: of the machine; guards/findings: of a candidate",
    "FrameError": "process: of the transport's frames, and of a stage's result frames",
    "NotApplicable": "raised by a check of the suite, and by a guard",
    "Question": "operators/identity: one of its cases; suite/classes: what a case asks",
}


def sources(root: Path) -> dict[str, ast.Module]:
    """Module name, as it is imported -> its tree."""
    found = {}
    for top in ("adapters", "eval"):
        for file in sorted((root / top).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            name = ".".join(("kbsub", *(parts[:-1] if parts[-1] == "__init__" else parts)))
            found[name] = ast.parse(file.read_text("utf-8"), str(file))
    return found


def imports(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> modules of this repository that it imports, lazily or for types as well."""
    edges: dict[str, set[str]] = {}
    for name, tree in modules.items():
        wanted: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                wanted |= {
                    full if (full := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names
                }
        edges[name] = (wanted & modules.keys()) - {name}
    return edges


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other: strongly connected components of more than one module (Kosaraju)."""
    order: list[str] = []
    seen: set[str] = set()

    def walk(name: str, graph: dict[str, set[str]], into: list[str]) -> None:
        seen.add(name)
        for below in sorted(graph[name]):
            if below not in seen:
                walk(below, graph, into)
        into.append(name)

    for name in edges:
        if name not in seen:
            walk(name, edges, order)
    backwards: dict[str, set[str]] = {name: set() for name in edges}
    for name, below in edges.items():
        for each in below:
            backwards[each].add(name)
    seen.clear()
    groups = []
    for name in reversed(order):
        if name not in seen:
            group: list[str] = []
            walk(name, backwards, group)
            groups.append(sorted(group))
    return [group for group in groups if len(group) > 1]


def classes(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Name of a class at the top of a module -> the modules that define one."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return found


MODULES = sources(ROOT)


def test_no_module_reaches_itself():
    assert len(MODULES) > 100
    found = {tuple(group) for group in cycles(imports(MODULES))}
    assert not found, f"import cycles: {sorted(found)}"


@pytest.mark.parametrize(
    ("edges", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [["a", "b", "c"]]),
        ({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c"}}, [["c", "d"], ["a", "b"]]),
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, []),
    ],
)
def test_a_cycle_is_seen(edges, found):
    assert sorted(cycles(edges)) == sorted(found)


def test_a_lazy_import_counts():
    lazy = {
        "kbsub.eval.a": ast.parse("def f():\n    from kbsub.eval import b"),
        "kbsub.eval.b": ast.parse("from kbsub.eval.a import f"),
    }
    assert cycles(imports(lazy)) == [["kbsub.eval.a", "kbsub.eval.b"]]


def test_no_module_is_long():
    files = {f.relative_to(ROOT).as_posix(): f for top in ("adapters", "eval") for f in (ROOT / top).rglob("*.py")}
    long = {name: n for name, f in files.items() if (n := len(f.read_text("utf-8").splitlines())) > MOST_LINES}
    assert not long, f"over {MOST_LINES} lines, split them: {long}"


def test_no_folder_is_crowded():
    counts: dict[str, int] = defaultdict(int)
    for top in ("adapters", "eval"):
        for file in (ROOT / top).rglob("*.py"):
            counts[file.parent.relative_to(ROOT).as_posix()] += file.name != "__init__.py"
    crowded = {name: n for name, n in counts.items() if n > MOST_MODULES and name != "eval/commands"}
    assert counts and not crowded, f"over {MOST_MODULES} modules: {crowded}"


def test_a_name_means_one_thing():
    twice = {name: where for name, where in classes(MODULES).items() if len(where) > 1}
    assert twice.keys() <= SHARED.keys(), f"two classes of one name: { {n: twice[n] for n in twice.keys() - SHARED} }"
    assert SHARED.keys() <= twice.keys(), f"no longer shared, take them off the list: {SHARED.keys() - twice.keys()}"
