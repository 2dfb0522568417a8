"""Puts a starter's text together: docstring, rules, the step in the asked style, the reference's classes.

The text must be what CONTRIBUTING.md asks of a candidate: no `try`, no `from __future__`, nothing compiled at module
level, no name of the task's. Runs nothing.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from kbsub.adapters.task import Task
from kbsub.eval.starter.reference import KERNEL_CALL, ReferenceText
from kbsub.eval.starter.styles import STYLES
from kbsub.eval.tasks.meant import MARKER

# Words that upstream's checker refuses wherever they stand, strings included.
_REFUSED_WORDS = re.compile(r"\bpass\b|\btry\s*:|\bexcept\b|import\s+threading", re.IGNORECASE)

RULES = """\
# The rules that matter (each is checked by KernelBench or by kbsub):
# - ModelNew takes the constructor arguments of Model, draws its parameters in the same order, and returns what Model
#   returns: shape, dtype, and values within 1e-4 (fp32) or 1e-2 (fp16, bf16), absolute and relative.
# - This text is executed in the dict that holds the task. A name of the task that it defines again changes the inputs.
# - Compile inside a function, never at module level; no error handling that falls back to PyTorch.
# - Compute from the inputs of each call: no answer kept from the last call, no input written to, no other stream.
# - An input that is not supported is a ValueError that names the tensor and the rule.
"""


def starter(task: Task, reference: ReferenceText, style: str, facts: Mapping[str, Any], command: str) -> str:
    """The whole file. `facts` as facts.judge gives them, `command` what judges it."""
    form = STYLES[style]
    imports = [*form.imports, *reference.imports.splitlines(), "import torch"]
    ordered = sorted(dict.fromkeys(imports), key=lambda line: (line.startswith("from"), line))
    # A file for a problem of KernelBench says so itself, and no call needs --task (eval/tasks/meant.py).
    marker = f"{MARKER}{task.slug}\n" if task.level else ""
    head = (marker + _docstring(task, reference, style, facts, command), "\n".join(ordered), RULES.rstrip())
    step = form.write(reference.step)
    text = "\n\n".join(head) + ("\n\n\n" if step.startswith("def") else "\n\n") + f"{step}\n\n\n{reference.body}\n"
    return _own_names(text, reference.taken)


def _docstring(task: Task, reference: ReferenceText, style: str, facts: Mapping[str, Any], command: str) -> str:
    title = re.sub(r"[_\s]+", " ", task.name.removesuffix(".py")).strip()
    if reference.step is not None:
        does = f"its last elementwise step, {reference.step.text}, is {STYLES[style].what}."
    else:
        does = f"it ends in no elementwise step known here: its result goes through {STYLES[style].what} that copies."
    shapes = [f"    {name}: {words}" for name, words in zip(_names(reference, facts), facts["inputs"], strict=False)]
    if facts["output"]:
        shapes.append(f"    returns: {facts['output']}")
    if facts["init_inputs"]:
        shapes.append(f"    constructor: {', '.join(facts['init_inputs'])}")
    if facts["problem"]:
        shapes.append(f"    (more is not known without running it: {facts['problem']})")
    lines = [
        f"Starter for {task.slug} ({title}): slow and right. The forward is the reference's;",
        *textwrap.wrap(does, 110),
        "",
        "Shapes and dtypes:" if shapes else "Shapes: not known without running the task.",
        *[line for shape in shapes for line in textwrap.wrap(shape, 118, subsequent_indent="        ")],
        "",
        f"Judge it: {command}",
    ]
    text = _REFUSED_WORDS.sub("...", "\n".join(lines)).replace("\\", "/").replace('"""', "'''")
    return f'"""{text}\n"""'


def _names(reference: ReferenceText, facts: Mapping[str, Any]) -> list[str]:
    return [*reference.arguments, *(f"input {k}" for k in range(len(reference.arguments), len(facts["inputs"])))]


def _own_names(text: str, taken: frozenset[str]) -> str:
    """The text with another name for each of a starter's own names that the task has, too."""
    own = (KERNEL_CALL, *sorted({name for style in STYLES.values() for name in style.names}))
    for name in own:
        if name in taken:
            fresh = f"{name}_{hashlib.sha256(name.encode()).hexdigest()[:4]}"
            text = re.sub(rf"\b{name}\b", fresh, text)
    return text
