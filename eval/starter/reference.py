"""The reference program's text as a candidate's: its Model becomes ModelNew, what it needs comes along, renamed.

A candidate is executed in the dict of the reference, so a name of the task that it defined again would change the
official inputs. Every class, function and constant that comes along therefore gets a name of its own. Docstrings and
comments stay behind: upstream's checker refuses words in them (CONTRIBUTING.md). Reads text, executes nothing.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection
from dataclasses import dataclass

from kbsub.adapters.task import TaskError
from kbsub.eval.starter.step import LastStep, find, modules_of

MODEL, CANDIDATE = "Model", "ModelNew"
KERNEL_CALL = "last_step"  # what a rewritten forward calls
_NOT_TAKEN = ("get_inputs", "get_init_inputs")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class ReferenceText:
    """`imports` and `body` are text. `step` is what forward's last statement computed, None where it is copied."""

    imports: str
    body: str
    arguments: tuple[str, ...]
    step: LastStep | None
    taken: frozenset[str]  # names the task defines, none of which a candidate may use


def rewrite(source: str, numbers: Collection[str] = ()) -> ReferenceText:
    """The program of a task as the text of a candidate that calls `last_step(...)` for its last elementwise step.

    `numbers`: attributes of the model that are Python numbers (facts.py). Raises TaskError where the text has no
    class Model with a forward of its own.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise TaskError(f"the reference program does not parse: line {error.lineno}: {error.msg}") from error
    defined = _definitions(tree)
    model = defined.get(MODEL)
    forward = _forward_of(model)
    if not isinstance(model, ast.ClassDef) or forward is None:
        raise TaskError("the reference program has no class Model with a forward of its own: write the file by hand")
    needed = _needed(defined, MODEL)
    names = {name: _new_name(name, node) for name, node in defined.items() if name in needed}
    step = _last_step(forward, model, numbers)
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    parts = []
    for node in dict.fromkeys(defined[name] for name in defined if name in needed):
        changed = _Renamed(names).visit(_without_docstrings(copy.deepcopy(node)))
        if isinstance(changed, ast.ClassDef | _Function):
            changed.name = names[changed.name]
        parts.append(ast.unparse(ast.fix_missing_locations(changed)))
    arguments = tuple(argument.arg for argument in forward.args.args[1:])
    return ReferenceText("\n".join(imports), "\n\n\n".join(parts), arguments, step, frozenset(defined))


def _forward_of(model: ast.stmt | None) -> _Function | None:
    for node in model.body if isinstance(model, ast.ClassDef) else ():
        if isinstance(node, _Function) and node.name == "forward":
            return node
    return None


def _new_name(name: str, node: ast.stmt) -> str:
    if name == MODEL:
        return CANDIDATE
    return f"{name}New" if isinstance(node, ast.ClassDef) else f"own_{name}"


def _definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """Name -> the statement of the module that defines it, imports left out; in the order of the text."""
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | _Function):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for each in ast.walk(node):
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                    found[each.id] = node
    return found


def _needed(defined: dict[str, ast.stmt], start: str) -> set[str]:
    needed, waiting = set[str](), [start]
    while waiting:
        name = waiting.pop()
        if name in needed or name in _NOT_TAKEN:
            continue
        needed.add(name)
        finder = _Globals()
        finder.visit(defined[name])
        # One statement may define several names (height = width = 128): they come along together.
        together = [other for other, node in defined.items() if node is defined[name]]
        waiting += [*(finder.found & defined.keys()), *together]
    return needed


def _local_names(function: _Function | ast.Lambda) -> set[str]:
    """The names that are local to a function: its arguments and what it binds."""
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    arguments += [each for each in (given.vararg, given.kwarg) if each is not None]
    names = {argument.arg for argument in arguments}
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.ClassDef | _Function):
                names.add(node.name)
    return names


class _Scoped(ast.NodeTransformer):
    """Visits names together with the knowledge of which are local where they stand."""

    def __init__(self) -> None:
        self.scopes: list[set[str]] = []

    def _inside(self, node: _Function | ast.Lambda) -> ast.AST:
        # Defaults, annotations and decorators belong to the scope outside; to treat them as inside renames less.
        outside = [*node.args.defaults, *(each for each in node.args.kw_defaults if each)]
        for each in outside:
            self.visit(each)
        self.scopes.append(_local_names(node))
        self.generic_visit(node)
        self.scopes.pop()
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _inside

    def is_global(self, name: str) -> bool:
        return not any(name in scope for scope in self.scopes)


class _Globals(_Scoped):
    """Collects the names that a statement takes from its module."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if self.is_global(node.id):
            self.found.add(node.id)
        return node


class _Renamed(_Scoped):
    """Gives the names of the task's module the candidate's own names."""

    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if self.is_global(node.id) and node.id in self.names:
            node.id = self.names[node.id]
        return node


def _without_docstrings(node: ast.stmt) -> ast.stmt:
    """The statement without the docstrings in it."""
    for each in ast.walk(node):
        if isinstance(each, ast.ClassDef | _Function) and ast.get_docstring(each, clean=False) is not None:
            rest = each.body[1:]
            each.body = rest or [ast.Expr(ast.Constant(...))]
        elif isinstance(each, ast.ClassDef | _Function) and all(isinstance(line, ast.Pass) for line in each.body):
            each.body = [ast.Expr(ast.Constant(...))]  # upstream's checker refuses the statement
    return node


def _last_step(forward: _Function, model: ast.ClassDef, numbers: Collection[str]) -> LastStep | None:
    """Rewrite the end of `forward`: its last elementwise step, or else all that it returns, goes through last_step."""
    returns = _returns_of(forward)
    last = forward.body[-1]
    modules = modules_of(model)
    if len(returns) == 1 and isinstance(last, ast.Return) and last.value is not None:
        value = last.value
        before = forward.body[-2] if len(forward.body) > 1 else None
        holder: ast.Return | ast.Assign | ast.AugAssign = last
        if isinstance(value, ast.Name) and _assigns(before, value.id):
            assert isinstance(before, ast.Assign | ast.AugAssign)
            holder = before
            value = before.value
            if isinstance(before, ast.AugAssign):
                assert isinstance(before.target, ast.Name)
                value = ast.BinOp(ast.Name(before.target.id, ast.Load()), before.op, before.value)
        step = find(value, modules, numbers)
        if step is not None:
            call = ast.parse(f"{KERNEL_CALL}({', '.join(operand.text for operand in step.operands)})", mode="eval").body
            if isinstance(holder, ast.AugAssign):
                assert isinstance(holder.target, ast.Name)
                forward.body[-2] = ast.Assign([ast.Name(holder.target.id, ast.Store())], call)
            else:
                holder.value = call
            return step
    for node in returns:
        if node.value is not None:
            node.value = ast.Call(ast.Name(KERNEL_CALL, ast.Load()), [node.value], [])
    return None


def _assigns(statement: ast.stmt | None, name: str) -> bool:
    """Whether the statement is `name = ...` or `name += ...`."""
    if isinstance(statement, ast.Assign):
        return len(statement.targets) == 1 and ast.unparse(statement.targets[0]) == name
    return isinstance(statement, ast.AugAssign) and ast.unparse(statement.target) == name


def _returns_of(forward: _Function) -> list[ast.Return]:
    """The return statements of the function itself, those of functions inside it left out."""
    found: list[ast.Return] = []
    waiting: list[ast.AST] = [*forward.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Return):
            found.append(node)
        elif not isinstance(node, ast.ClassDef | _Function | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return found
