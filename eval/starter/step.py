"""Finds the last elementwise step of a forward, read from its text, and says what a kernel of it computes.

Reads Python's ast alone: nothing is executed. What it does not know for certain is no step: then the whole expression
is an operand, and the caller writes a kernel that copies.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kbsub.eval.starter.formulas import (
    BINARY,
    FUNCTIONS_OF_TWO,
    MODULES,
    NEGATION,
    POWERS,
    UNARY,
    Operation,
)

_LIBRARIES = ("torch", "F", "nn")  # torch.relu, F.relu, nn.functional.relu, torch.nn.functional.relu
_NAMES = "abcdefghpqrsuvwxyz"  # of operands; i, n, t and o are the kernel's own


@dataclass(frozen=True)
class Operand:
    """What the kernel is given: `name` in the kernel, `text` in forward. A number is an argument by value."""

    name: str
    text: str
    number: bool


@dataclass(frozen=True)
class LastStep:
    """An elementwise expression: t0, t1, ... are `lines`, (operation, its arguments); the last is the result."""

    text: str
    operands: tuple[Operand, ...]
    lines: tuple[tuple[Operation, tuple[str | float, ...]], ...]

    @property
    def tensors(self) -> tuple[Operand, ...]:
        return tuple(operand for operand in self.operands if not operand.number)

    @property
    def numbers(self) -> tuple[Operand, ...]:
        return tuple(operand for operand in self.operands if operand.number)


def find(expression: ast.expr, modules: Mapping[str, str], numbers: Collection[str]) -> LastStep | None:
    """The step that `expression` is, or None where its outermost operation is not one of formulas.py.

    `modules`: attribute of the model -> operation, as modules_of gives them. `numbers`: attributes of the model that
    are Python numbers; any other operand counts as a tensor.
    """
    reader = _Reader(modules, numbers)
    reader.read(expression)
    operands = tuple(reader.operands.values())
    if not reader.lines or all(operand.number for operand in operands):
        return None
    return LastStep(ast.unparse(expression), operands, tuple(reader.lines))


def modules_of(model: ast.ClassDef) -> dict[str, str]:
    """Attribute of the model -> operation, for each `self.x = nn.ReLU()` and the like in its class."""
    found: dict[str, str] = {}
    for node in ast.walk(model):
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.value, ast.Call)):
            continue
        target, call = node.targets[0], node.value
        if not (_is_self(target) and isinstance(call.func, ast.Attribute) and call.func.attr in MODULES):
            continue
        assert isinstance(target, ast.Attribute)
        operation: str | None = MODULES[call.func.attr]
        if operation == "gelu":
            operation = _gelu([keyword.value for keyword in call.keywords if keyword.arg == "approximate"] + call.args)
        if operation:
            found[target.attr] = operation
    return found


def _gelu(approximate: list[ast.expr]) -> str | None:
    if not approximate:
        return "gelu"
    value = approximate[0]
    words = value.value if isinstance(value, ast.Constant) else None
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(words))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


class _Reader:
    """Walks one expression; what is no known operation becomes an operand."""

    def __init__(self, modules: Mapping[str, str], numbers: Collection[str]) -> None:
        self.modules, self.number_attributes = modules, numbers
        self.operands: dict[str, Operand] = {}  # by text: one that is used twice is one operand
        self.lines: list[tuple[Operation, tuple[str | float, ...]]] = []

    def read(self, node: ast.expr) -> str | float:
        """The name or literal that stands for `node` in the kernel, after the lines that compute it."""
        literal = _literal(node)
        if literal is not None:
            return literal
        if self._is_number(node):
            return self._operand(node, number=True)
        found = self._operation(node)
        if found is None:
            return self._operand(node, number=False)
        operation, arguments = found
        values = tuple(self.read(each) if isinstance(each, ast.expr) else each for each in arguments)
        self.lines.append((operation, values))
        return f"t{len(self.lines) - 1}"

    def _operand(self, node: ast.expr, *, number: bool) -> str:
        text = ast.unparse(node)
        if text not in self.operands:
            self.operands[text] = Operand(_NAMES[len(self.operands)], text, number)
        return self.operands[text].name

    def _is_number(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Attribute) and _is_self(node):
            return node.attr in self.number_attributes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and _is_self(node.value):
            operation = UNARY.get(self.modules.get(node.value.attr, ""))
            return operation is not None and node.attr in [name for name, _ in operation.parameters]
        if isinstance(node, ast.BinOp):
            return self._is_number(node.left) and self._is_number(node.right)
        if isinstance(node, ast.UnaryOp):
            return self._is_number(node.operand)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("math."):
            return all(self._is_number(each) for each in node.args)
        return _literal(node) is not None or ast.unparse(node) in ("math.pi", "math.e")

    def _operation(self, node: ast.expr) -> tuple[Operation, list[ast.expr | float]] | None:
        if len(self.operands) >= len(_NAMES) - 3:
            return None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return NEGATION, [node.operand]
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.Pow):
                return self._power(node.left, node.right)
            operation = BINARY.get(type(node.op).__name__)
            return (operation, [node.left, node.right]) if operation else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self._call(node, node.func)
        return None

    def _power(self, base: ast.expr, exponent: ast.expr) -> tuple[Operation, list[ast.expr | float]] | None:
        power = _literal(exponent)
        return (POWERS[power], [base]) if power in POWERS else None

    def _call(self, call: ast.Call, function: ast.Attribute) -> tuple[Operation, list[ast.expr | float]] | None:
        if any(isinstance(argument, ast.Starred) for argument in call.args):
            return None
        if _is_self(function):
            operation = UNARY.get(self.modules.get(function.attr, ""))
            if operation is None or len(call.args) != 1 or call.keywords:
                return None
            attributes = [ast.Attribute(function, name, ast.Load()) for name, _ in operation.parameters]
            return operation, [call.args[0], *attributes]
        library = ast.unparse(function.value).split(".")[0] in _LIBRARIES
        arguments = list(call.args) if library else [function.value, *call.args]
        keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        keywords.pop("inplace", None)
        if "input" in keywords and not arguments:
            arguments = [keywords.pop("input")]
        return self._function(function.attr.rstrip("_") if not library else function.attr, arguments, keywords)

    def _function(
        self, name: str, arguments: list[ast.expr], keywords: dict[str, ast.expr]
    ) -> tuple[Operation, list[ast.expr | float]] | None:
        if name in FUNCTIONS_OF_TWO:
            plain = len(arguments) == 2 and not keywords
            return (BINARY[FUNCTIONS_OF_TWO[name]], [*arguments]) if plain else None
        if name == "pow":
            return self._power(*arguments) if len(arguments) == 2 and not keywords else None
        if name in ("clamp", "clip"):
            return _clamp(arguments, keywords)
        if name == "gelu":
            kind = _gelu([*arguments[1:], *(value for key, value in keywords.items() if key == "approximate")])
            return (UNARY[kind], [arguments[0]]) if kind and not keywords.keys() - {"approximate"} else None
        operation = UNARY.get(name)
        if operation is None or name in ("at_least", "at_most", "gelu_tanh") or not arguments:
            return None
        values: list[ast.expr | float] = [*arguments]
        for parameter, default in operation.parameters[len(arguments) - 1 :]:
            value = keywords.pop(parameter, None)
            if value is None and default is None:
                return None
            values.append(value if value is not None else float(default or 0.0))
        return (operation, values) if not keywords and len(values) == 1 + len(operation.parameters) else None


def _clamp(arguments: list[ast.expr], keywords: dict[str, ast.expr]) -> tuple[Operation, list[ast.expr | float]] | None:
    if keywords.keys() - {"min", "max"} or not 1 <= len(arguments) <= 3:
        return None
    low = arguments[1] if len(arguments) > 1 else keywords.get("min")
    high = arguments[2] if len(arguments) > 2 else keywords.get("max")
    bounds = [None if bound is None or ast.unparse(bound) == "None" else bound for bound in (low, high)]
    if bounds[0] is not None and bounds[1] is not None:
        return UNARY["hardtanh"], [arguments[0], bounds[0], bounds[1]]
    if bounds[0] is not None:
        return UNARY["at_least"], [arguments[0], bounds[0]]
    return (UNARY["at_most"], [arguments[0], bounds[1]]) if bounds[1] is not None else None


def _literal(node: ast.expr) -> float | None:
    """The value of a number that is written out, with or without a sign; None for everything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        negated = _literal(node.operand)
        return None if negated is None else -negated
    value: object = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None
