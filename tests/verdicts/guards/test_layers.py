"""The guards' modules import in one direction, from the judge to the words it uses, and know no operator by name."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import kbsub.eval.verdicts.guards as guards
from kbsub.eval.operators.register import known
from kbsub.eval.verdicts.guards.watch import NORMALISATIONS

ROOM = "kbsub.eval.verdicts.guards"


def test_no_import_cycle() -> None:
    """Imports for types only, and those inside a function, count too."""
    folder = Path(next(iter(guards.__path__)))
    graph: dict[str, set[str]] = {}
    for path in folder.glob("*.py"):
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(ROOM):
                found.add(node.module.removeprefix(ROOM).removeprefix(".") or "__init__")
            elif isinstance(node, ast.Import):
                found |= {name.name.removeprefix(ROOM + ".") for name in node.names if name.name.startswith(ROOM + ".")}
        graph[path.stem] = found
    assert {"run", "rig", "findings"} <= graph.keys()
    TopologicalSorter(graph).prepare()  # raises CycleError, naming the cycle


def test_no_guard_knows_an_operator() -> None:
    """Packages under operators/ are reached through the register; no module names one of torch's own operators."""
    folder = Path(next(iter(guards.__path__)))
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = f"{path.name} names {ast.unparse(node)}"
            if isinstance(node, ast.ImportFrom):
                assert not any(f"operators.{name}" in (node.module or "") for name in known()), named
            elif isinstance(node, ast.Attribute):
                assert node.attr not in NORMALISATIONS + ("LayerNorm",), named
