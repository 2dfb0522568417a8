"""The four ways a starter's step is written: torch, Triton, CUDA through load_inline, CUDA through CuPy.

Each kernel reads its operands, broadcast and contiguous, as fp32, and writes fp32; the wrapper casts around it. That is
slow and right, and leaves the first things to improve in plain sight. No step: a kernel that copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kbsub.eval.starter.formulas import Operation
from kbsub.eval.starter.reference import KERNEL_CALL
from kbsub.eval.starter.step import LastStep, Operand

COPY = LastStep("the result", (Operand("a", "result", False),), ((Operation("{0}", "{0}", "{0}"), ("a",)),))


@dataclass(frozen=True)
class Style:
    """`what` ends the docstring's sentence; `names` are the module-level names that `write` uses."""

    what: str
    imports: tuple[str, ...]
    names: tuple[str, ...]
    write: Callable[[LastStep | None], str]


def formula(step: LastStep, language: str) -> list[str]:
    """The statements that compute t0, t1, ...: "t0 = a * 2.0" in `language` ("torch", "cuda" or "triton")."""
    lines = []
    for index, (operation, values) in enumerate(step.lines):
        template: str = getattr(operation, language)
        shown = [_literal(value, language) if isinstance(value, float) else value for value in values]
        lines.append(f"t{index} = {template.format(*shown)}")
    return lines


def _literal(value: float, language: str) -> str:
    text = repr(value) + ("f" if language == "cuda" else "")
    return f"({text})" if value < 0 else text


def _signature(step: LastStep) -> str:
    return ", ".join(operand.name for operand in step.operands)


def _result(step: LastStep) -> str:
    return f"t{len(step.lines) - 1}"


def _wrapper(step: LastStep, launch: list[str], *, on_gpu: bool = True) -> str:
    """The Python function that forward calls: casts, broadcasts, launches, casts back."""
    tensors, numbers = step.tensors, step.numbers
    names = ", ".join(operand.name for operand in tensors)
    first = "result" if step is COPY else tensors[0].name
    argument = "result" if step is COPY else _signature(step)
    lines = [f"def {KERNEL_CALL}({argument}):"]
    if step is COPY:
        lines += [
            '    """A copy of what the reference returns, tensor by tensor."""',
            "    if isinstance(result, (tuple, list)):",
            f"        return type(result)({KERNEL_CALL}(each) for each in result)",
            "    floats = (torch.float32, torch.float16, torch.bfloat16)",
            "    if not isinstance(result, torch.Tensor) or result.dtype not in floats:",
            "        return result",
            "    a = result",
        ]
    else:
        words = f"{step.text}, operands broadcast as torch broadcasts them; computed in fp32."
        lines += [f'    """{words}"""'] if len(words) < 100 else ['    """The step, computed in fp32."""']
        if len(tensors) > 1:
            # Which operand is a tensor is known when it is called: a scalar may stand in any place.
            lines += [
                f"    given = [each for each in ({names}) if isinstance(each, torch.Tensor)]",
                "    like = max(given, key=torch.Tensor.dim)",
                "    kind = like.dtype  # of the answer, as torch promotes it",
                "    for each in given:",
                "        kind = torch.promote_types(kind, each.dtype) if each.dim() else kind",
                f"    given = [torch.as_tensor(each, device=like.device) for each in ({names})]",
                f"    {names} = torch.broadcast_tensors(*given)",
            ]
            first = "like"
        else:
            lines += [f"    like = {first}"]
            first = "like"
    if on_gpu:
        lines += [
            f"    if not {first}.is_cuda:",
            f'        raise ValueError(f"{{{first}.device}}: the kernel needs its input on a CUDA device")',
        ]
    lines += [
        f"    {operand.name} = {operand.name}.float()" + (".contiguous()" if on_gpu else "") for operand in tensors
    ]
    lines += [f"    {operand.name} = float({operand.name})" for operand in numbers]
    lines += [f"    {line}" if line else "" for line in launch]
    lines.append("    return out.to(kind)" if len(tensors) > 1 else f"    return out.to({first}.dtype)")
    return "\n".join(lines)


def _torch(step: LastStep | None) -> str:
    step = step or COPY
    body = ["out = a.clone()"] if step is COPY else formula(step, "torch")
    body[-1] = body[-1].replace(f"{_result(step)} =", "out =", 1)
    return _wrapper(step, body, on_gpu=False)


def _kernel_arguments(step: LastStep) -> str:
    tensors = [f"const float* __restrict__ {operand.name}_in" for operand in step.tensors]
    numbers = [f"float {operand.name}" for operand in step.numbers]
    return ", ".join([*tensors, *numbers, "float* __restrict__ out", "long long n"])


def cuda_kernel(step: LastStep, linkage: str = "") -> str:
    """The CUDA C++ text of the step: one kernel, a thread an element, in a loop over the grid."""
    body = [f"const float {operand.name} = {operand.name}_in[i];" for operand in step.tensors]
    body += [f"const float {line};" for line in formula(step, "cuda")]
    inside = "\n".join(f"        {line}" for line in [*body, f"out[i] = {_result(step)};"])
    return f"""\
// A thread an element; grid: as many blocks as there are elements for, at most 1,048,576; block: 256 threads.
{linkage}__global__ void last_step_kernel({_kernel_arguments(step)}) {{
    const long long threads = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) {{
{inside}
    }}
}}
"""


def _cuda_inline(step: LastStep | None) -> str:
    step = step or COPY
    kernel = cuda_kernel(step)
    parameters = [f"torch::Tensor {operand.name}" for operand in step.tensors]
    parameters += [f"double {operand.name}" for operand in step.numbers]
    declaration = f"torch::Tensor launch_last_step({', '.join(parameters)})"
    first = step.tensors[0].name
    pointers = [f"{operand.name}.data_ptr<float>()" for operand in step.tensors]
    pointers += [f"(float){operand.name}" for operand in step.numbers]
    launcher = f"""\
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

{declaration} {{
    const c10::cuda::CUDAGuard guard({first}.device());
    auto out = torch::empty_like({first});
    const long long n = out.numel();
    if (n > 0) {{
        const int blocks = (int)std::min<long long>((n + 255) / 256, 1 << 20);
        last_step_kernel<<<blocks, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
            {", ".join([*pointers, "out.data_ptr<float>()", "n"])});
        C10_CUDA_KERNEL_LAUNCH_CHECK();
    }}
    return out;
}}
"""
    call = f"out = extension().launch_last_step({', '.join(o.name for o in (*step.tensors, *step.numbers))})"
    return f'''\
KERNEL = r"""
{kernel}"""

LAUNCHER = r"""
{launcher}"""


@functools.lru_cache(maxsize=None)
def extension():
    """Compiled by nvcc on the first call, half a minute; kept in torch's extension folder after that."""
    from torch.utils.cpp_extension import load_inline

    return load_inline(
        name="last_step_extension",
        cpp_sources="{declaration};",
        cuda_sources=KERNEL + LAUNCHER,
        functions=["launch_last_step"],
    )


{_wrapper(step, [call])}'''


def _cupy(step: LastStep | None) -> str:
    step = step or COPY
    launch = [
        f"out = torch.empty_like({step.tensors[0].name})",
        "n = out.numel()",
        "if n:",
        "    stream = torch.cuda.current_stream(out.device).cuda_stream",
        f"    pointers = [each.data_ptr() for each in ({''.join(f'{o.name}, ' for o in step.tensors).rstrip()})]",
        f"    numbers = [numpy.float32(each) for each in ({''.join(f'{o.name}, ' for o in step.numbers).rstrip()})]",
        "    launch(out.device.index, stream, n, (*pointers, *numbers, out.data_ptr(), numpy.int64(n)))",
    ]
    return f'''\
KERNEL = r"""
{cuda_kernel(step, 'extern "C" ')}"""


@functools.lru_cache(maxsize=None)
def compiled(device):
    """The kernel for one device, compiled by NVRTC on the first call there."""
    import cupy

    return cupy.RawKernel(KERNEL, "last_step_kernel", options=("--std=c++17",))


def launch(device, stream, n, arguments):
    """Run the kernel on `device` over n elements, on the stream that torch is using."""
    import cupy

    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(stream):
        compiled(device)((min((n + 255) // 256, 1 << 20),), (256,), arguments)


{_wrapper(step, launch)}'''


def _triton(step: LastStep | None) -> str:
    step = step or COPY
    arguments = [f"{operand.name}_in" for operand in step.tensors] + [operand.name for operand in step.numbers]
    loads = [f"{operand.name} = tl.load({operand.name}_in + i, mask=i < n)" for operand in step.tensors]
    body = "\n".join(f"    {line}" for line in [*loads, *formula(step, "triton")])
    extra = "from triton.language.extra import libdevice\n" if "libdevice." in body else ""
    values = ", ".join(operand.name for operand in (*step.tensors, *step.numbers))
    launch = [
        f"out = torch.empty_like({step.tensors[0].name})",
        "n = out.numel()",
        "if n:",
        "    with torch.cuda.device(out.device):",
        f"        compiled()[((n + 1023) // 1024,)]({values}, out, n, BLOCK=1024)",
    ]
    return f'''\
KERNEL = """
import triton
import triton.language as tl
{extra}

@triton.jit
def last_step_kernel({", ".join(arguments)}, out, n, BLOCK: tl.constexpr):
    # A program a block of BLOCK elements.
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
{body}
    tl.store(out + i, {_result(step)}, mask=i < n)
"""


@functools.lru_cache(maxsize=None)
def compiled():
    """The kernel. Triton reads its source from a file, and the text of a candidate has none: one is written for it."""
    file = pathlib.Path(tempfile.mkdtemp(prefix="kbsub-triton-")) / "last_step_kernel.py"
    file.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.last_step_kernel


{_wrapper(step, launch)}'''


STYLES = {
    "torch": Style("a function of plain torch calls", (), (KERNEL_CALL,), _torch),
    "triton": Style(
        "a Triton kernel",
        ("import functools", "import importlib.util", "import pathlib", "import tempfile"),
        ("KERNEL", "compiled", KERNEL_CALL),
        _triton,
    ),
    "cuda-inline": Style(
        "a CUDA kernel (load_inline)",
        ("import functools",),
        ("KERNEL", "LAUNCHER", "extension", KERNEL_CALL),
        _cuda_inline,
    ),
    "cupy": Style(
        "a CUDA kernel (NVRTC through CuPy)",
        ("import functools", "import numpy"),
        ("KERNEL", "compiled", "launch", KERNEL_CALL),
        _cupy,
    ),
}
