"""Loads a ModelNew exactly as KernelBench does: executed as text, in the very dict the reference was executed in.

So a module-level `batch_size = 1` changes the official inputs, `__file__` does not exist, and with a build folder two
lines come first, which makes a `from __future__` a syntax error. Must not know what the candidate is for.
"""

from __future__ import annotations

import ast
import functools
import re
import unicodedata
from pathlib import Path
from typing import Any

from kbsub.adapters.task import Modules, Task
from kbsub.eval.process.isolated import JudgeFailure, Status, is_out_of_memory

# Imports that a machine without CUDA cannot honour.
_CUDA_IMPORTS = ("cupy", "cupy_backends", "triton", "torch.utils.cpp_extension", "cutlass", "tilelang", "cuda")
# A text without any of these needs no parsing: neither an import of the above nor CUDA_SOURCE can be in it.
_CUDA_WORDS = re.compile(r"CUDA_SOURCE|cupy|triton|cpp_extension|cutlass|tilelang|cuda")


# What a library call says that finds no GPU where the file asked for one.
_NO_GPU_TEXTS = ("no nvidia driver", "not compiled with cuda", "no cuda gpus", "cuda driver")


def asks_for_a_gpu(text: str) -> bool:
    """Whether the words of an exception say that the code asked for a GPU where there is none."""
    return any(words in text.lower() for words in _NO_GPU_TEXTS)


class CandidateError(JudgeFailure):
    """The file does not give a ModelNew; as a judge's failure it is a COMPILE_ERROR row."""

    def __init__(self, message: str, status: Status = Status.COMPILE_ERROR) -> None:
        super().__init__(status, message)


def load_candidate(
    source: str, task: Task, *, build_dir: bool | Path = False, modules: Modules | None = None
) -> type[Any]:
    """Execute `source` in the dict of `modules` (by default that of a fresh `task.modules()`) and return its ModelNew.

    `build_dir` puts upstream's two lines first, for a temporary folder or for the one that is given. Raises
    CandidateError: a syntax error with its line, an import or any other error while the file is executed, no ModelNew.
    """
    context = (modules or task.modules()).context
    text = source
    if build_dir:
        import tempfile

        folder = str(Path(tempfile.gettempdir()) / "kbsub-build" if build_dir is True else build_dir)
        context["BUILD_DIRECTORY"] = folder
        text = f"import os\nos.environ['TORCH_EXTENSIONS_DIR'] = {folder!r}\n{source}"
    try:
        exec(compile(text, "<string>", "exec"), context)
    except SyntaxError as error:
        line = (error.lineno or 0) - (2 if build_dir else 0)
        raise CandidateError(f"line {line}: {error.msg}") from error
    except Exception as error:
        status = Status.OUT_OF_MEMORY if is_out_of_memory(error) else Status.COMPILE_ERROR
        raise CandidateError(f"raised while the file was executed: {type(error).__name__}: {error}", status) from error
    model = context.get("ModelNew")
    if model is None:
        raise CandidateError("defines no ModelNew")
    return model  # type: ignore[no-any-return]


def source_problem(source: str) -> str | None:
    """What is wrong with a file before it is executed (syntax, no ModelNew), or None; nothing is run.

    Upstream gives one message for both; this one says which, and on which line. As in upstream's scripts two lines
    come first, so that a `from __future__` is a syntax error.
    """
    try:
        compile("import os\nimport os\n" + source, "<string>", "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno - 2}: {error.msg}" if error.lineno else str(error.msg)
    except ValueError as error:  # null bytes, before Python 3.12
        return str(error)
    return None if "ModelNew" in source else "defines no ModelNew"


@functools.lru_cache(maxsize=8)  # every stage of a row asks
def cuda_source_of(source: str) -> str | None:
    """What makes the file need CUDA ("CUDA_SOURCE", "import cupy" ...), read from its text, or None.

    Time and memory are bounded by the size of the text, which kbsub.adapters.source limits; numbers are there.
    """
    # Python reads names in their NFKC form: a "cupy" in other letters is cupy.
    if not _CUDA_WORDS.search(source if source.isascii() else unicodedata.normalize("NFKC", source)):
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the parent parses it: any text must do
        return None
    for statement in tree.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        if any(isinstance(target, ast.Name) and target.id == "CUDA_SOURCE" for target in targets):
            return "CUDA_SOURCE"
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for module in modules:
            if any(module == name or module.startswith(name + ".") for name in _CUDA_IMPORTS):
                return f"import {module}"
    return None
