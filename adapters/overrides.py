"""Which names of the reference program a candidate file redefines, read from both texts; and the file made to keep to
itself.

Upstream executes a candidate in the dict of the reference, so a `batch_size = 1` in the file changes the official
inputs. Nothing is executed here: a name that is set by other means than a definition at the top level is not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

LONGEST = 60  # characters of a value that are shown


def overrides(reference: str, candidate: str) -> dict[str, dict[str, str]]:
    """Name -> {"task": its value there, "file": its value here}, of each that the file defines otherwise.

    Values are source text, cut; of a function or class "def" or "class". Imports do not count, nor does a definition
    that reads the same. {} for a text that is no Python.
    """
    try:
        known, own = dict(_defined(reference)), dict(_defined(candidate))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {
        name: {"task": _shown(known[name]), "file": _shown(node)}
        for name, node in own.items()
        if name in known and ast.dump(node) != ast.dump(known[name])
    }


def redefines(reference: str, candidate: str) -> list[str]:
    """Every name of the reference that the file defines, otherwise or the same."""
    try:
        known, own = dict(_defined(reference)), dict(_defined(candidate))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [name for name in own if name in known]


def in_its_own_namespace(candidate: str) -> str:
    """A text that executes the file in a dict of its own and hands back ModelNew alone."""
    return (
        "_kbsub_own = {}\n"
        f"exec(compile({candidate!r}, '<string>', 'exec'), _kbsub_own)\n"
        "ModelNew = _kbsub_own['ModelNew']\n"
    )


def _defined(source: str) -> Iterator[tuple[str, ast.AST]]:
    """(name, what it is) of each definition at the top level; of several the last counts."""
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, _without_words(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from _named(target, node.value)


def _named(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)):
        alike = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
        for index, each in enumerate(target.elts):
            yield from _named(each, value.elts[index] if alike and isinstance(value, (ast.Tuple, ast.List)) else value)


def _without_words(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> ast.AST:
    """The definition without its docstring, which changes nothing."""
    if ast.get_docstring(node) is not None and len(node.body) > 1:
        node.body = node.body[1:]
    return node


def _shown(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        return "class"
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return "def"
    text = ast.unparse(node)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
