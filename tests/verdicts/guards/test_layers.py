"""The guards' modules import in one direction: from the judge down to the words it uses, never back."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import kbsub.eval.verdicts.guards as guards

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
