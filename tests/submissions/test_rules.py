"""The rules that every candidate file keeps, one test a rule, over every folder of submissions/ that declares files.

A new folder needs no test here: it is found by its candidates.toml. What holds of one task only is in test_<task>.py.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kbsub.adapters.candidate import load_candidate
from kbsub.adapters.checkout import CheckoutError, find_checkout
from kbsub.adapters.task import Task, TaskError, load_local_task, load_task, parse_task
from kbsub.eval.tasks.declarations import read_declarations
from support.paths import ROOT

SUBMISSIONS = ROOT / "submissions"
LOADER = re.compile(r"^# ---- loader:.*?^# ---- end of loader ----$", re.MULTILINE | re.DOTALL)


def declared(pattern: str) -> list[Path]:
    """The files that the folders of a pattern declare."""
    folders = sorted(table.parent for table in SUBMISSIONS.glob(pattern))
    return [folder / f"{stem}.py" for folder in folders for stem in read_declarations(folder)]


def names(files: list[Path]) -> list[str]:
    return [file.relative_to(SUBMISSIONS).with_suffix("").as_posix() for file in files]


CANDIDATES, PEERS = declared("*/candidates.toml"), declared("*/peers/candidates.toml")
every = pytest.mark.parametrize("file", CANDIDATES, ids=names(CANDIDATES))
every_peer = pytest.mark.parametrize("file", PEERS, ids=names(PEERS))


@lru_cache(maxsize=None)
def task_of(folder: Path) -> Task:
    """What the files of a folder are judged against: its reference.py, or the KernelBench problem it is named after."""
    if (folder / "reference.py").is_file():
        return load_local_task(folder / "reference.py")
    level, problem = parse_task(folder.name)
    try:
        return load_task(level, problem, kernelbench=None)  # level1_40 is embedded
    except TaskError:
        try:
            return load_task(level, problem, kernelbench=find_checkout().path)
        except CheckoutError as error:
            pytest.skip(f"kernelbench: {str(error).splitlines()[0]}")


def has_kernels(source: str) -> bool:
    return "\nCUDA_SOURCE = " in source


def alone(file: Path) -> dict[str, Any]:
    """The file executed by itself, in an empty dict."""
    space: dict[str, Any] = {}
    exec(compile(file.read_text("utf-8"), file.name, "exec"), space)
    return space


def test_every_task_folder_declares_its_files():
    folders = {path.parent for path in SUBMISSIONS.glob("*/*.py")}
    assert len(folders) >= 2 and {file.parent for file in CANDIDATES} == folders


# ---- text ----


@every
def test_imports_only_torch_numpy_cupy_and_the_standard_library(file):
    imported = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import cannot work where upstream executes the text"
            imported.add(str(node.module).split(".")[0])
    foreign = imported - {"torch", "numpy", "cupy", "cupy_backends"} - set(sys.stdlib_module_names)
    assert not foreign, f"{file.name} imports {foreign}"


FORBIDDEN = {  # pattern: why; read with # comments stripped, as upstream's checker reads (docstrings count)
    r"\btry\s*:": "rejected by upstream's static checker",
    r"\bexcept\s*:|\bexcept\s+\w+": "rejected by upstream's static checker",
    r"\bpass\b": "rejected by upstream's static checker, 'one-pass' too",
    r"import\s+threading|concurrent\.futures|multiprocessing": "rejected by upstream's static checker",
    r"\(torch\.Tensor\)|\(Tensor\)": "a tensor subclass is rejected by upstream's static checker",
    r"contextlib\.suppress": "hides errors, as try would",
    r"__future__": "a syntax error once upstream puts two lines before the text",
    r"__file__": "does not exist where upstream executes the text",
    r"load_inline|cpp_extension": "a token planted to please backend=cuda",
}


@every
@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_holds_no_forbidden_words(file, pattern):
    lines = [line.split("#")[0] for line in file.read_text("utf-8").split("\n")]
    found = [f"line {at}: {line.strip()}" for at, line in enumerate(lines, 1) if re.search(pattern, line)]
    assert not found, f"{file.name}, {FORBIDDEN[pattern]}: {found}"


@pytest.mark.kernelbench
@every
def test_upstreams_static_checker_accepts_it_as_cupy(file, kernelbench):
    where = kernelbench.path / "src" / "kernelbench" / "kernel_static_checker.py"
    spec = importlib.util.spec_from_file_location("upstream_static_checker", where)
    checker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checker)
    source = file.read_text("utf-8")
    for precision in read_declarations(file.parent)[file.stem].precision:
        valid, errors, warnings = checker.validate_kernel_static(source, backend="cupy", precision=precision)
        assert valid and not errors, f"{file.name} at {precision}: {errors}"
        if has_kernels(source):  # the library rungs call torch's own operators, and are warned about for it
            assert not warnings, f"{file.name} at {precision}: {warnings}"


def test_the_loader_is_byte_identical_in_every_cuda_file():
    texts = {file: file.read_text("utf-8") for file in SUBMISSIONS.rglob("*.py")}
    loaders = {file.relative_to(SUBMISSIONS): LOADER.findall(text) for file, text in texts.items() if "NVRTC" in text}
    assert len(loaders) >= 3, "no CUDA file was found"
    assert all(len(found) == 1 for found in loaders.values()), {str(f): len(found) for f, found in loaders.items()}
    by_text: dict[str, list[str]] = {}
    for file, (loader,) in loaders.items():
        by_text.setdefault(loader, []).append(str(file))
    assert len(by_text) == 1, f"files by version of the loader: {list(by_text.values())}"


# ---- execution beside the reference ----


def changed_names(file: Path, task: Task, **options: Any) -> list[str]:
    """Names of the reference program that mean something else once the candidate has been loaded beside it.

    Not __doc__: executing any text with a docstring sets it, and nothing reads it.
    """
    modules = task.modules()
    before = dict(modules.context)
    load_candidate(file.read_text("utf-8"), task, modules=modules, **options)
    return [name for name, value in before.items() if modules.context[name] is not value and name != "__doc__"]


@every
@pytest.mark.parametrize("build_dir", [False, True], ids=["plain", "build_dir"])
def test_leaves_every_name_of_the_reference_alone(file, build_dir):
    changed = changed_names(file, task_of(file.parent), build_dir=build_dir)
    assert not changed, f"{file.name} redefines {changed}, which upstream's get_inputs reads"


OF_KERNELBENCH = [file for file in CANDIDATES if not (file.parent / "reference.py").is_file()]


@pytest.mark.kernelbench
@pytest.mark.parametrize("file", OF_KERNELBENCH, ids=names(OF_KERNELBENCH))
def test_leaves_every_name_of_the_pinned_reference_alone(file, kernelbench):
    changed = changed_names(file, load_task(*parse_task(file.parent.name), kernelbench=kernelbench.path))
    assert not changed, f"{file.name} redefines {changed}, which upstream's get_inputs reads"


@every
def test_is_executed_and_constructed_without_cupy_and_compiles_nothing(file, monkeypatch):
    for name in ("cupy", "cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.libs"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError

    def trace(*_args, **_options):
        raise AssertionError("traced before the first forward: the harness moves the model afterwards")

    monkeypatch.setattr(torch.jit, "trace", trace)
    space = alone(file)
    space["ModelNew"](*task_of(file.parent).modules().get_init_inputs())
    if "CUDA_SOURCE" in space:
        assert "__global__" in space["CUDA_SOURCE"]
        assert "--ftz=false" in space["NVRTC_OPTIONS"]


BAD_ARGUMENTS = [None, 0, -1, (), (4, 0), (4, -1), "48", (2.5,), 3.5, (1 << 50,)]


def takes_arguments(folder: Path) -> bool:
    """Whether the task's Model takes any; yes where no checkout says it: the test then skips, and says why."""
    try:
        return bool(task_of(folder).modules().get_init_inputs())
    except pytest.skip.Exception:
        return True


TAKE_ARGUMENTS = [file for file in CANDIDATES if takes_arguments(file.parent)]


@pytest.mark.parametrize("file", TAKE_ARGUMENTS, ids=names(TAKE_ARGUMENTS))
@pytest.mark.parametrize("argument", BAD_ARGUMENTS, ids=repr)
def test_the_constructor_raises_only_runtime_error(file, argument):
    others = task_of(file.parent).modules().get_init_inputs()[1:]
    with pytest.raises(Exception) as caught:
        alone(file)["ModelNew"](argument, *others)
    assert type(caught.value) is RuntimeError, f"upstream catches RuntimeError only, not {caught.value!r}"
    for words in ("lock", "No such file or directory"):
        assert words not in str(caught.value), f"upstream takes {words!r} for a build failure and returns None"


def settings(module: torch.nn.Module) -> dict[str, Any]:
    """The values a module was made with: eps, normalized_shape. Not the switches, which the state shows."""
    plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, tuple)) and not k.startswith("_")}
    return {k: v for k, v in plain.items() if not isinstance(v, bool)}


@every
def test_holds_the_state_of_the_reference(file):
    modules = task_of(file.parent).modules()
    arguments = modules.get_init_inputs()
    reference, candidate = modules.Model(*arguments), alone(file)["ModelNew"](*arguments)
    shapes = [{k: v.shape for k, v in model.state_dict().items()} for model in (candidate, reference)]
    assert shapes[0] == shapes[1]
    candidate.load_state_dict(reference.state_dict())
    assert all(torch.equal(candidate.state_dict()[k], v) for k, v in reference.state_dict().items())
    for name, module in reference.named_children():
        own = settings(candidate.get_submodule(name))
        different = {k: (own.get(k), v) for k, v in settings(module).items() if own.get(k) != v}
        assert not different, f"{file.name}: {name} is made otherwise (its own, the reference's): {different}"


# ---- peers ----


@every_peer
def test_peers_load_without_their_packages(file):
    modules = task_of(file.parent.parent).modules()
    arguments = modules.get_init_inputs()
    exec(compile(file.read_text("utf-8"), "<string>", "exec"), modules.context)
    peer = modules.context["ModelNew"](*arguments)
    peer.load_state_dict(modules.Model(*arguments).state_dict())
