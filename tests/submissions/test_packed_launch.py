"""The packed launch of the channel norms: its text, what the driver is handed, and when CuPy's own call is taken."""

from __future__ import annotations

import ctypes
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch

from kbsub.eval.host_executor import H200_LIMITS
from support.paths import ROOT

PACKED = re.compile(r"^# ---- packed launch:.*?^# ---- end of packed launch ----$", re.MULTILINE | re.DOTALL)
TEXTS = {file.relative_to(ROOT / "submissions").as_posix(): file.read_text("utf-8")
         for file in sorted(ROOT.glob("submissions/*/*.py"))}  # fmt: skip
FILES = {name: text for name, text in TEXTS.items() if "\nclass PackedLaunch:" in text}
HERE, ELSEWHERE, STREAM, FUNCTION = 0x1234, 0x5678, 77, 0xABC
# By the head of a file's name: shapes that take its kernels, and what ModelNew is made with.
SHAPES = {"pixel": ((2, 64, 8, 8), (2, 65, 7, 5)), "l1": ((16, 8191), (40, 1003)), "l2": ((16, 8191), (40, 1003))}
every = pytest.mark.parametrize("name", FILES)


def test_its_text_is_the_same_in_every_file() -> None:
    blocks = {name: PACKED.findall(text) for name, text in FILES.items()}
    assert len(blocks) >= 6 and all(len(found) == 1 for found in blocks.values()), blocks.keys()
    assert len({found[0] for found in blocks.values()}) == 1


class Driver:
    """Stands where CuPy's driver stands: reads each argument where it is said to lie, as wide as it is declared."""

    def __init__(self) -> None:
        self.context = HERE
        self.widths: list[int] = []  # of the arguments, in bytes
        self.launches: list[tuple[tuple[int, ...], list[bytes]]] = []

    def ctxGetCurrent(self) -> int:  # the driver's own name
        return self.context

    def launchKernel(self, function: int, *rest: int) -> None:
        *sizes, stream, parameters, extra = rest
        pointers = (ctypes.c_void_p * len(self.widths)).from_address(parameters)
        values = [ctypes.string_at(at, width) for at, width in zip(pointers, self.widths, strict=True)]
        assert (function, stream, extra) == (FUNCTION, STREAM, 0)
        self.launches.append((tuple(sizes), values))


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Any]:
    """The file with a module of the loader's own class, whose driver is a Driver and whose `launch` only notes."""
    space: dict[str, Any] = {}
    exec(compile(FILES[name], name, "exec"), space)

    of_loader: Any = space["CudaModule"]

    class Module(of_loader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.driver, self.index = Driver(), 0
            self.noted: list[tuple[Any, ...]] = []

        def kernel(self, kernel: str, shared_bytes: int) -> Any:
            return type("Function", (), {"ptr": FUNCTION})

        def launch(self, kernel: str, grid: Any, block: Any, arguments: Any, shared_bytes: int = 0) -> None:
            self.noted.append((grid, block, arguments, shared_bytes))

    module = Module()
    space |= {"DEVICE_TYPE": "cpu", "device_limits": lambda index: H200_LIMITS, "cuda_module": lambda *_: module}
    if "trees_of" in space:
        space["trees_of"] = lambda _: (True, True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return space, module


def model_of(space: dict[str, Any], name: str) -> Any:
    return space["ModelNew"](*((64,) if name.startswith("level1_36") else ()))


def shapes_of(name: str) -> tuple[tuple[int, ...], ...]:
    return SHAPES[name.split("/")[1].split("_")[0]]


@every
def test_the_driver_is_handed_what_cupy_would_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    space, module = loaded(name, monkeypatch)
    model, driver = model_of(space, name), module.driver
    for shape in shapes_of(name):
        x, other = torch.rand(shape), torch.rand(shape)
        model(x)
        grid, block, arguments, shared_bytes = module.noted[-1]
        driver.widths = [8 if isinstance(each, int) else each.dtype.itemsize for each in arguments]
        before = len(module.noted)
        y = model(other)
        assert len(module.noted) == before, "the second launch goes straight to the driver"
        (sizes, values) = driver.launches[-1]
        assert sizes == (*(grid + (1, 1))[:3], *(block + (1, 1))[:3], shared_bytes)
        expected = (np.uint64(other.data_ptr()), np.uint64(y.data_ptr()), *arguments[2:])
        assert values == [each.tobytes() for each in expected]


@every
def test_cupys_call_is_taken_while_another_context_is_current(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    space, module = loaded(name, monkeypatch)
    model, x = model_of(space, name), torch.rand(shapes_of(name)[0])
    ways = []
    for context in (HERE, HERE, 0, ELSEWHERE, HERE):  # 0: none, as in a thread that has used no device yet
        module.driver.context = context
        if context != HERE:
            monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        noted, direct = len(module.noted), len(module.driver.launches)
        model(x)
        ways.append((len(module.noted) - noted, len(module.driver.launches) - direct))
    assert ways == [(1, 0), (0, 1), (1, 0), (1, 0), (0, 1)]


@every
def test_a_call_of_known_facts_is_one_look_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    space, _ = loaded(name, monkeypatch)
    model, checked, asked = model_of(space, name), space["require_supported"], []

    def noted(x: torch.Tensor) -> None:
        asked.append(x)
        checked(x)

    space["require_supported"] = noted
    shape = shapes_of(name)[0]
    for _ in range(3):
        model(torch.rand(shape))
    assert len(asked) == 1
    model(torch.rand(shape).half())
    model(torch.rand(2 * torch.Size(shape).numel() + 1)[1:][: torch.Size(shape).numel()].view(shape))
    assert len(asked) == 3, "another dtype, another alignment"
    thread = threading.Thread(target=lambda: model(torch.rand(shape)))
    thread.start()
    thread.join()
    assert len(asked) == 4, "arguments lie packed for one thread"
    for _ in range(2):
        with pytest.raises(ValueError, match=r"x: dtype torch\.float64"):
            model(torch.rand(shape).double())
    assert len(asked) == 6, "what is refused is refused each time"


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("level1_36")])
def test_eps_is_read_at_every_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    space, module = loaded(name, monkeypatch)
    model, x = model_of(space, name), torch.rand(shapes_of(name)[0])
    for eps in (1e-5, 0.25, torch.tensor(0.5), torch.tensor(0.75)):
        model.eps = eps
        model(x)
        assert float(module.noted[-1][2][-1]) == pytest.approx(float(eps))
