"""The module-level integers of a reference program, read from its text, and the same text with other values.

A task at another size is this other text: what is derived from an integer follows it, as it would for a person who
edits the file. Nothing is executed. Must not know which value means what.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

WHOLE = "[*]"  # "widths[*]": every entry of a tuple or list whose entries are all alike
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)


class IntegersError(ValueError):
    """A name that the program does not define as an integer; the message says which there are."""


def integers(source: str) -> dict[str, int]:
    """Name -> value of every integer that the program assigns at its top level, in their order.

    Only what the text itself gives: numbers, arithmetic of numbers ("1024 * 2"), and tuples and lists of them, whose
    entries are "name[0]", or "name[*]" where all are alike. Of a name assigned twice the last counts. {} for a text
    that is no Python.
    """
    return {name: value for name, (value, _, _) in _slots(source).items()}


def with_integers(source: str, values: Mapping[str, int]) -> str:
    """The text with other values for some of its `integers`. Raises IntegersError for a name that is none of them."""
    slots = _slots(source)
    if unknown := [name for name in values if name not in slots]:
        there = ", ".join(slots) or "none"
        raise IntegersError(f"{unknown[0]}: the reference program assigns no such integer at its top level ({there})")
    changed: dict[int, tuple[ast.expr, Any]] = {}
    for name, value in values.items():
        _, node, entry = slots[name]
        at, held = changed.get(id(node), (node, _constant(node)))
        if entry is None:
            held = value
        elif entry == WHOLE:
            held = type(held)(value for _ in held)
        else:
            held = type(held)(value if index == entry else kept for index, kept in enumerate(held))
        changed[id(node)] = (at, held)
    lines = source.encode("utf-8").split(b"\n")  # ast counts columns in bytes of UTF-8, lines at \n
    for node, held in sorted(changed.values(), key=lambda each: (each[0].lineno, each[0].col_offset), reverse=True):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first, last = node.lineno - 1, node.end_lineno - 1
        text = lines[first][: node.col_offset] + repr(held).encode() + lines[last][node.end_col_offset :]
        lines[first : last + 1] = [text]
    return b"\n".join(lines).decode("utf-8")


def _slots(source: str) -> dict[str, tuple[int, ast.expr, int | str | None]]:
    """Name -> (value, the expression it stands in, which entry of that)."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found: dict[str, tuple[int, ast.expr, int | str | None]] = {}
    for statement in body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        for name in [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]:
            for known in [known for known in found if known == name or known.startswith(f"{name}[")]:
                del found[known]
        held = _constant(value)
        first = targets[0]  # "height = width = 256" is one integer: both follow
        if type(held) is int and isinstance(first, ast.Name):
            found[first.id] = (held, value, None)
        elif isinstance(held, (tuple, list)) and held and all(type(each) is int for each in held):
            if isinstance(first, ast.Name) and len(held) > 1 and len(set(held)) == 1:
                found[first.id + WHOLE] = (held[0], value, WHOLE)
            elif isinstance(first, ast.Name):
                found |= {f"{first.id}[{index}]": (each, value, index) for index, each in enumerate(held)}
            elif isinstance(first, (ast.Tuple, ast.List)) and len(targets) == 1 and len(first.elts) == len(held):
                for index, (target, each) in enumerate(zip(first.elts, held, strict=True)):
                    if isinstance(target, ast.Name):
                        found[target.id] = (each, value, index)
    return found


def _constant(node: ast.expr) -> Any:
    """What an expression of numbers alone gives; None for any other."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, (ast.Tuple, ast.List)):
        held = [_constant(each) for each in node.elts]
        return tuple(held) if isinstance(node, ast.Tuple) else held
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _constant(node.operand)
        return -value if type(value) is int else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, _ARITHMETIC):
        left, right = _constant(node.left), _constant(node.right)
        if type(left) is int and type(right) is int:
            return _computed(node.op, left, right)
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and type(right) is int and right <= 1 << 10:
            return left * right
    return None


def _computed(operator: ast.operator, left: int, right: int) -> int | None:
    if isinstance(operator, ast.FloorDiv):
        return left // right if right else None
    if isinstance(operator, ast.Mult):
        return left * right if left.bit_length() + right.bit_length() < 64 else None
    return left + right if isinstance(operator, ast.Add) else left - right


def most_bytes(source: str) -> float:
    """More bytes than the numbers written in a program are likely to make: every one of them multiplied, as float64.

    Infinity where the text computes with powers or shifts or cannot be parsed.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return math.inf
    if any(isinstance(node, (ast.Pow, ast.LShift)) for node in nodes):
        return math.inf
    product = 8.0
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            product *= max(float(abs(node.value)), 1.0) if abs(node.value) < 1e30 else math.inf
    return product
