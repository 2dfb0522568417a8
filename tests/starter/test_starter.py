"""`kbsub new`: what is found to be the last step, the file in each style, its names; it is right as written."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kbsub.adapters.task import Task, load_local_task, load_task
from kbsub.eval.cli import app
from kbsub.eval.starter import facts
from kbsub.eval.starter.reference import rewrite
from kbsub.eval.starter.styles import STYLES
from kbsub.eval.starter.text import starter

PROGRAM = """
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    '''Forward pass; try: nothing.'''
    def __init__(self, scale):
        super(Model, self).__init__()
        self.scale = scale
        self.bias = nn.Parameter(torch.randn(5, 1))
        self.act = {act}

    def forward(self, x, y):
{forward}

rows = 3

def get_inputs():
    return [torch.randn(rows, 5, 4) * 3, torch.randn(rows, 5, 4)]

def get_init_inputs():
    return [2.5]
"""

# The end of forward -> the step that is found in it. None: the kernel copies.
STEPS = {
    "return torch.relu(x)": "torch.relu(x)",
    "x = x + y\nreturn x": "x + y",
    "x += self.bias\nreturn x": "x + self.bias",
    "return x * self.scale": "x * self.scale",
    "return self.scale * x - 1": "self.scale * x - 1",
    "return F.leaky_relu(x, negative_slope=0.2)": "F.leaky_relu(x, negative_slope=0.2)",
    "return torch.nn.functional.elu(x, alpha=self.scale)": "torch.nn.functional.elu(x, alpha=self.scale)",
    "return torch.clamp(x, min=-1.0)": "torch.clamp(x, min=-1.0)",
    "return torch.clamp(x, max=1.0)": "torch.clamp(x, max=1.0)",
    "return x.clamp(-1, 1).tanh()": "x.clamp(-1, 1).tanh()",
    "return F.gelu(x, approximate='tanh')": "F.gelu(x, approximate='tanh')",
    "return F.gelu(x)": "F.gelu(x)",
    "return F.softplus(x, beta=2.0)": "F.softplus(x, beta=2.0)",
    "return F.mish(x) + F.silu(x) * F.hardswish(x)": "F.mish(x) + F.silu(x) * F.hardswish(x)",
    "return F.selu(x) - F.hardsigmoid(x) / 2": "F.selu(x) - F.hardsigmoid(x) / 2",
    "return x / (1 + torch.abs(x))": "x / (1 + torch.abs(x))",
    "return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * torch.pow(x, 3.0)))": (
        "0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * torch.pow(x, 3.0)))"
    ),
    "return x / x.norm(dim=1, keepdim=True)": "x / x.norm(dim=1, keepdim=True)",
    "return self.act(x)": "self.act(x)",
    "return self.scale * 2": None,
    "return torch.softmax(x, dim=1)": None,
    "return x.sum()": None,
    "return x ** self.scale": None,
    "return x, y": None,
    "return torch.argmax(x, dim=1)": None,
    "if self.scale > 3:\n    return torch.relu(x)\nreturn x - y": None,
    "x = torch.relu(x)\nreturn x.flatten(1)": None,
    "y = torch.relu(x)\nreturn x": None,
}
MODULES = ["nn.ReLU()", "nn.Mish()", "nn.LeakyReLU(0.3)",  "nn.GELU()",
           "nn.GELU(approximate='tanh')", "nn.Hardtanh(-2.0, 0.5)",
           "nn.ReLU6()", "nn.Softplus()", "nn.ELU(alpha=0.7)", "nn.Softsign()"]  # fmt: skip
CASES = [*((forward, "nn.ReLU()") for forward in STEPS), *(("return self.act(x)", act) for act in MODULES[1:])]

# At sizes a test can draw; the names are the reference program's own integers.
KERNELBENCH = {
    "level1_5": {"M": 30, "N": 20},
    "level1_20": {"batch_size": 2, "dim": 1000},
    "level1_36": {"batch_size": 2, "features": 8, "dim1": 5, "dim2": 6},
    "level1_88": {"batch_size": 2, "dim": 1000},
    "level1_23": {"batch_size": 2, "dim": 1000},  # softmax: a kernel that copies
}


def program(forward: str, act: str = "nn.ReLU()") -> str:
    return PROGRAM.format(act=act, forward="\n".join(f"        {line}" for line in forward.splitlines()))


def local(tmp_path: Path, text: str, name: str = "mine.py") -> Task:
    (tmp_path / name).write_text(text)
    return load_local_task(tmp_path / name)


def written(task: Task, style: str, *, payload: dict[str, Any]) -> tuple[str, Any]:
    known = facts.judge(payload, None)
    reference = rewrite(task.source, known["numbers"])
    return starter(task, reference, style, known, "kbsub eval mine_new.py"), reference


def agrees(source: str, text: str, sizes: dict[str, int] | None = None) -> None:
    """Execute both as upstream does and compare one call; the task's own names must be what they were."""
    context: dict[str, Any] = {}
    exec(compile(source, "<string>", "exec"), context)
    context.update(sizes or {})
    before = {name: value for name, value in context.items() if not name.startswith("__")}
    exec(compile(text, "<string>", "exec"), context)
    assert {name: context[name] for name in before} == before, "the file redefined a name of the task"
    outputs = []
    for name in ("Model", "ModelNew"):
        torch.manual_seed(42)
        model = context[name](*context["get_init_inputs"]())
        torch.manual_seed(7)
        with torch.no_grad():
            outputs.append(model(*context["get_inputs"]()))
    for expected, found in zip(*(each if isinstance(each, tuple) else (each,) for each in outputs), strict=True):
        torch.testing.assert_close(
            torch.as_tensor(found), torch.as_tensor(expected), atol=1e-5, rtol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize(("forward", "act"), CASES)
def test_the_step_is_found_and_the_torch_starter_is_right(tmp_path: Path, forward: str, act: str) -> None:
    task = local(tmp_path, program(forward, act))
    text, reference = written(task, "torch", payload={"task": str(tmp_path / "mine.py")})
    assert (reference.step.text if reference.step else None) == STEPS[forward]
    agrees(task.source, text)


@pytest.mark.parametrize("kinds", [("half", "float"), ("float", "half"), ("long", "float"), ("float", "bfloat16")])
def test_the_answer_is_of_the_dtype_that_torch_promotes_to(tmp_path: Path, kinds: tuple[str, str]) -> None:
    """Operands of two dtypes, whichever comes first."""
    text = program("return x + y").replace("torch.randn(rows, 5, 4) * 3", f"torch.ones(rows, 5, 4).{kinds[0]}()")
    task = local(tmp_path, text.replace("torch.randn(rows, 5, 4)]", f"torch.ones(rows, 5, 4).{kinds[1]}()]"))
    agrees(task.source, written(task, "torch", payload={"task": str(tmp_path / "mine.py")})[0])


@pytest.mark.parametrize("style", STYLES)
def test_what_is_written_keeps_the_rules(tmp_path: Path, style: str) -> None:
    """It parses, imports nothing of this project, compiles nothing when it is executed, holds no refused word."""
    for forward in STEPS:
        text, _ = written(local(tmp_path, program(forward)), style, payload={"task": str(tmp_path / "mine.py")})
        executed: dict[str, Any] = {}
        exec(compile(text, "<string>", "exec"), executed)  # on this machine, without a GPU: nothing is compiled
        assert "ModelNew" in executed
        assert not [word for word in ("pass", "try:", "except ", "threading", "kbsub.") if word in text.split()]
        assert '"""Starter for mine (mine): slow and right.' in text
        assert "x: float32 (3, 5, 4)" in text


def test_names_of_the_task_are_never_defined_again(tmp_path: Path) -> None:
    """Helpers and constants come along under other names, local names stay, own names give way."""
    text = """
import torch
from torch import nn
EPS = 1e-3
KERNEL = last_step = LAUNCHER = compiled = extension = launch = 3
width = height = 4
def norm(x, eps=EPS):
    return x / (x.norm() + eps)
class Block(nn.Module):
    def __init__(self, width):
        super(Block, self).__init__()
        self.linear = nn.Linear(width, width)
    def forward(self, x):
        return norm(self.linear(x))
class Unused(nn.Module):
    pass
class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width=width) for _ in range(2)])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return torch.relu(x)
def get_inputs():
    return [torch.rand(height, width)]
def get_init_inputs():
    return [width]
"""
    task = local(tmp_path, text)
    for style in STYLES:
        found, _ = written(task, style, payload={"task": str(tmp_path / "mine.py")})
        defined = set()
        for node in ast.parse(found).body:
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            names += [n.id for n in ast.walk(node) if isinstance(node, ast.Assign) and isinstance(n, ast.Name)
                      and isinstance(n.ctx, ast.Store)]  # fmt: skip
            defined |= set(names)
        assert {"ModelNew", "BlockNew", "own_norm", "own_EPS"} <= defined
        assert not defined & {
            "EPS",
            "KERNEL",
            "LAUNCHER",
            "last_step",
            "compiled",
            "extension",
            "launch",
            "Block",
            "width",
        }
        assert "UnusedNew" not in found
    agrees(task.source, written(task, "torch", payload={"task": str(tmp_path / "mine.py")})[0])


def kernel_texts(style: str, tmp_path: Path) -> set[str]:
    """The KERNEL of every starter above: the same arithmetic gives the same text."""
    found = set()
    for forward, act in CASES:
        text, _ = written(local(tmp_path, program(forward, act)), style, payload={"task": str(tmp_path / "mine.py")})
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KERNEL":
                found.add(ast.literal_eval(node.value))
    return found


@pytest.mark.parametrize(
    "style",
    ["cupy", pytest.param("cuda-inline", marks=pytest.mark.slow)],  # the same texts, but for extern "C"
)
def test_every_cuda_kernel_compiles(tmp_path: Path, style: str) -> None:
    pytest.importorskip("cupy", reason="cupy: NVRTC is what compiles here")
    from kbsub.eval.host_executor.compile_gate import compile_source

    texts = kernel_texts(style, tmp_path)
    assert len(texts) > 20
    for text in texts:
        compile_source(text, ("--std=c++17",), "sm_90")


def test_every_triton_kernel_compiles(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="triton: not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for index, text in enumerate(sorted(kernel_texts("triton", tmp_path))):
        file = tmp_path / f"kernel_{index}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kinds = {"out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
        names = module.last_step_kernel.arg_names
        signature = {name: kinds.get(name, "*fp32" if name.endswith("_in") else "fp32") for name in names}
        source = ASTSource(fn=module.last_step_kernel, signature=signature, constexprs={"BLOCK": 1024})
        assert "cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm


@pytest.mark.kernelbench
@pytest.mark.parametrize("slug", KERNELBENCH)
def test_starters_of_kernelbench_are_right_and_upstream_takes_them(kernelbench: Any, slug: str) -> None:
    checker = importlib.util.spec_from_file_location(
        "checker", kernelbench.path / "src" / "kernelbench" / "kernel_static_checker.py"
    )
    assert checker is not None and checker.loader is not None
    module = importlib.util.module_from_spec(checker)
    checker.loader.exec_module(module)
    level, problem = slug.removeprefix("level").split("_")
    task = load_task(int(level), int(problem), kernelbench=kernelbench.path)
    payload = {"task": slug, "kernelbench": str(kernelbench.path)}
    agrees(task.source, written(task, "torch", payload=payload)[0], KERNELBENCH[slug])
    for style in STYLES:
        text, _ = written(task, style, payload=payload)
        backend = {"torch": "cupy", "cuda-inline": "cuda"}.get(style, style)
        valid, errors, _ = module.validate_kernel_static(text, backend=backend, precision="fp32")
        assert valid, errors


@pytest.mark.usefixtures("warm_children")
def test_new_then_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command writes a file that `kbsub eval` calls OK as it is, says so, and writes over nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(program("return F.mish(x) + y"))
    assert CliRunner().invoke(app, ["new", "mine.py", "--out", "new/folder/a.py"]).exit_code == 0
    made = CliRunner().invoke(app, ["new", "mine.py"])
    assert made.exit_code == 0, made.output
    assert "wrote mine_torch.py: the step to make your own is F.mish(x) + y" in made.output
    assert "kbsub eval mine_torch.py --task mine.py" in made.output
    judged = CliRunner().invoke(app, ["eval", "mine_torch.py", "--task", "mine.py", "--only", "official"])
    assert judged.exit_code == 0, judged.output
    assert "official OK" in judged.output
    again = CliRunner().invoke(app, ["new", "mine.py"])
    assert again.exit_code == 2
    assert "mine_torch.py exists" in again.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["level1_36", "--style", "hip"], "there are torch, triton, cuda-inline, cupy"),
        (["nothing"], "write level<L>_<id>"),
        (["none.py"], "cannot be read as a reference program"),
        (["broken.py"], "does not parse: line 1"),
        (["modelless.py"], "no class Model with a forward of its own"),
    ],
)
def test_a_wrong_call_is_exit_2_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("class Model(:\n")
    (tmp_path / "modelless.py").write_text("import torch\n")
    outcome = CliRunner().invoke(app, ["new", *arguments])
    assert outcome.exit_code == 2
    assert words in " ".join(outcome.output.split())


@pytest.mark.slow
@pytest.mark.kernelbench
@pytest.mark.timeout(1800)
def test_40_torch_starters_are_ok_on_a_cpu(tmp_path: Path) -> None:
    """`kbsub starters`: each written and judged by `judge`, at the small size."""
    out = tmp_path / "starters.json"
    call = ["starters", "--style", "torch", "--device", "cpu", "--size", "small", "--out", str(out)]
    found = CliRunner().invoke(app, call)
    assert found.exit_code == 0, found.output
    assert found.output.count(" torch: OK ") == 40
    assert CliRunner().invoke(app, call).output.startswith("40 of 40 OK"), "a second run judges nothing again"


@pytest.mark.slow
@pytest.mark.kernelbench
@pytest.mark.timeout(900)
@pytest.mark.parametrize("style", ["cupy", "cuda-inline", "triton"])
def test_40_starters_of_each_kernel_style_compile(kernelbench: Any, tmp_path: Path, style: str) -> None:
    """Python compiles it, upstream's checker takes it, NVRTC compiles the CUDA text (triton's: the test above)."""
    from kbsub.adapters import static_checker
    from kbsub.eval.commands.starters import TASKS

    compiled: set[str] = set()
    for slug in TASKS:
        level, problem = slug.removeprefix("level").split("_")
        task = load_task(int(level), int(problem), kernelbench=kernelbench.path)
        text, _ = written(task, style, payload={"task": slug, "kernelbench": str(kernelbench.path)})
        exec(compile(text, slug, "exec"), {})
        said = static_checker.check(kernelbench.path, text, "fp32")
        assert said["valid"], (slug, said["errors"])
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KERNEL":
                kernel = ast.literal_eval(node.value)
                if style != "triton" and kernel not in compiled:
                    pytest.importorskip("cupy", reason="cupy: NVRTC is what compiles here")
                    from kbsub.eval.host_executor.compile_gate import compile_source

                    compile_source(kernel, ("--std=c++17",), "sm_90")
                compile(kernel, slug, "exec") if style == "triton" else None
                compiled.add(kernel)
    assert len(compiled) > 10
