"""The child of `kbsub measure sweep`: one candidate in one dtype, at every shape of a grid, against float64.

Knows torch and one candidate. Must not know records, other candidates or what is asked again after a crash.

What a full grid should cost on an H200 (an estimate): 16.4e9 elements go through the candidate, and the comparison
moves about 120 bytes for each of them, 2 TB. The float64 answer is computed once a width, for the most rows (6.3e9
elements, about 300 bytes each, 1.9 TB): the answer to fewer rows is its beginning. About 1 s at 4 TB/s, and 2 to 4 s
of launches. A file that TorchScript traces and fuses anew for every shape takes its compile time 1,112 times.
Memory: x, two outputs and the float64 answer of the largest shape, 12 GB at 600 million fp32 elements.
"""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from kbsub.adapters.candidate import cuda_source_of, load_candidate
from kbsub.adapters.task import Modules, Task, dtype_of, task_from_payload
from kbsub.eval.operators.compare.oracle import BOUND_ABSOLUTE, BOUND_RELATIVE, Truth, ulp
from kbsub.eval.operators.compare.predicate import OFFICIAL_TOLERANCE, same_bits, unravel
from kbsub.eval.operators.register import operator_of
from kbsub.eval.process.isolated import JudgeFailure, Status
from kbsub.eval.tasks.cases import CaseShape
from kbsub.eval.tasks.grid import GridShape

RIGHT = "right"  # within the dtype's bound of float64
REFUSED = "refused"  # a ValueError that the file itself raises
DECLARED = "declared_failure"  # beyond the bound, and declared a control, or to be so far beyond it
WRONG = "wrong"
DRIVER = "driver_error"  # CUDA, or the host executor in its place, refused or broke off a launch
OTHER = "other_error"
NOT_RUN = "not_run"  # the children died too often before it was its turn
OUTCOMES = (RIGHT, REFUSED, DECLARED, WRONG, DRIVER, OTHER, NOT_RUN)

SEED = 1300
CHUNK_ELEMENTS = 1 << 25
OWN_FILE = "<string>"  # the file name that a candidate's code has: it is executed as text
DRIVER_ERRORS = ("CUDADriverError", "CUDARuntimeError", "AcceleratorError", "HostFault")

Progress = Callable[[dict[str, Any]], None]


def judge(payload: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Ask one candidate at every [grid, rows, width] of payload["shapes"]; those of one width must stand together.

    payload: task, precision, device, candidate_source, declaration, grid (of task.toml, counted above), shapes.
    On the CPU a CUDA source runs on the host
    executor. Sends {"stage": "shape", "case": "3x1000"} before each shape and {"stage": "row", "row": {...}} after it:
    {"shape", "outcome"} and, where they say something, "share" (largest error / what the official tolerance allows, 1
    is its end), "bound" (the same for the bound of accurate files), "bits" (equal to native's, on CUDA), "text".
    Raises JudgeFailure: CRASHED when the CUDA context does not survive a shape (its row is sent before).
    """
    device = torch.device(payload["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        raise JudgeFailure(Status.NOT_RUN, "torch sees no NVIDIA GPU here")
    task = task_from_payload(payload)
    modules = task.modules()
    source = payload["candidate_source"]
    model_class: Any = load_candidate(source, task, modules=modules)
    if device.type == "cpu" and cuda_source_of(source) == "CUDA_SOURCE":
        model_class = _hosted(modules)
    grid = [GridShape.model_validate(each) for each in payload["grid"]]
    shapes = [(int(which), int(rows), int(width)) for which, rows, width in payload["shapes"]]
    asked = 0
    for (which, width), group in itertools.groupby(shapes, key=lambda shape: (shape[0], shape[2])):
        rows_of_width = [rows for _, rows, _ in group]
        most = grid[which].at(max(rows_of_width), width)
        question = SweptShape(most, task, modules, device, payload.get("declaration") or {})
        model: Any = None
        for rows in rows_of_width:
            asked += 1
            case = grid[which].at(rows, width).name
            progress({"stage": "shape", "index": asked, "of": len(shapes), "case": case})
            try:
                model = model if model is not None else question.build(model_class)
                row = question.ask(model, rows)
            except Exception as error:
                row = {"outcome": kind_of(error), "text": in_words(error)}
            progress({"stage": "row", "row": {"shape": case, **row}})
            if row["outcome"] in (DRIVER, OTHER):
                _still_usable(device)
        del question, model  # before the next answer: both at once would need twice the memory
    return {"asked": asked}


def _hosted(modules: Modules) -> Any:
    from kbsub.eval.host_executor import SMALL_LIMITS, HostExecutor, adopt

    adopt(modules.context, SMALL_LIMITS, HostExecutor())
    return modules.context["ModelNew"]


def kind_of(error: Exception) -> str:
    """Which outcome an exception is. Refusing is what the file itself raises, not what is raised below it."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ValueError) and frames and frames[-1].filename == OWN_FILE and str(error).strip():
        return REFUSED
    of_the_host = any("host_executor" in frame.filename for frame in frames[-2:])
    if type(error).__name__ in DRIVER_ERRORS or of_the_host or "CUDA error" in str(error):
        return DRIVER
    return OTHER


def in_words(error: Exception) -> str:
    """An exception on one line of at most 300 characters; of a refusal the words alone."""
    text = " ".join(str(error).split())[:300]
    return text if kind_of(error) == REFUSED else f"{type(error).__name__}: {text}"


def _still_usable(device: torch.device) -> None:
    """Raise JudgeFailure when every further call of this process would fail with the error of the last shape."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).item()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise JudgeFailure(Status.CRASHED, f"the CUDA context is unusable: {in_words(error)}") from error


class SweptShape:
    """Inputs of the most rows and their float64 answer; fewer rows are asked for as the beginning of both.

    most: the shape with the most rows, and the constructor's arguments. The reference Model has random parameters.
    """

    def __init__(
        self, most: CaseShape, task: Task, modules: Modules, device: torch.device, declaration: Mapping[str, Any]
    ) -> None:
        generator = torch.Generator(device).manual_seed(SEED + most.inputs[0][1])
        self.dtype, self.device, self.init = task.dtype, device, most.init

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(self.dtype)

        self.contract = declaration.get("contract", "")
        self.accurate = bool(declaration.get("accurate"))
        farthest: Mapping[str, float] = (declaration.get("expect") or {}).get("beyond_float64") or {}
        self.declared_share = max((farthest[name] for name in farthest if dtype_of(name) == self.dtype), default=1.0)
        self.tolerance = OFFICIAL_TOLERANCE[self.dtype]
        self.inputs = [normal(*each) for each in most.inputs]
        with torch.no_grad():
            self.reference = modules.Model(*most.init).to(device=device, dtype=self.dtype)
            for parameter in self.reference.parameters():
                parameter.copy_(normal(*parameter.shape))
            self.answer: Truth = operator_of(task).truth(self.reference, self.inputs)

    def build(self, model_class: Any) -> Any:
        """An instance with the reference's parameters, under the names that they have there."""
        with torch.no_grad():
            model = model_class(*self.init).to(device=self.device, dtype=self.dtype)
        if state := self.reference.state_dict():
            model.load_state_dict(state)
        return model

    def ask(self, model: Any, rows: int) -> dict[str, Any]:
        """The row of one shape, without its name. What the candidate raises goes through, late CUDA errors too."""
        inputs = [each[:rows] for each in self.inputs]
        with torch.no_grad():
            output = model(*inputs)
        problem = self._no_answer(output, rows)
        if problem:
            return {"outcome": self._failed(math.inf), "text": problem}
        share, bound = self._shares(output, rows)
        row: dict[str, Any] = {"outcome": RIGHT, "share": share}
        if self.accurate:
            row["bound"] = bound
        if self.device.type == "cuda" and self.contract == "bit-identical":
            with torch.no_grad():
                row["bits"] = same_bits(self.reference(*inputs), output, any_nan=True)
        if not (share <= 1 and (bound <= 1 or not self.accurate)):  # a NaN is neither
            row |= {"outcome": self._failed(share), "text": self._worst(output, rows)}
        return {key: str(value) if _no_number(value) else value for key, value in row.items()}

    def _failed(self, share: float) -> str:
        declared = self.contract == "control" or (share <= self.declared_share and not self.accurate)
        return DECLARED if declared else WRONG

    def _no_answer(self, output: Any, rows: int) -> str:
        if not isinstance(output, torch.Tensor):
            return f"returned a {type(output).__name__}"
        expected = ((rows, *self.answer.y.shape[1:]), self.dtype, self.device.type)
        got = (tuple(output.shape), output.dtype, output.device.type)
        return "" if got == expected else f"returned {got}, must be {expected}"

    @property
    def _row_elements(self) -> int:
        return max(1, math.prod(self.answer.y.shape[1:]))

    def _chunks(self, rows: int) -> Iterator[slice]:
        step = max(1, CHUNK_ELEMENTS // self._row_elements)
        for start in range(0, rows, step):
            yield slice(start, min(rows, start + step))

    def _ratios(self, output: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """|error| / (tolerance + tolerance * |true|), and the error itself, of some rows in float64; NaN stays NaN."""
        true = self.answer.y[part]
        error = (output[part].double() - true).abs_()
        return error / true.abs().mul_(self.tolerance).add_(self.tolerance), error

    def _shares(self, output: torch.Tensor, rows: int) -> tuple[float, float]:
        """Largest share of the official tolerance, and for accurate files of their bound (else 0)."""
        found = []
        for part in self._chunks(rows):
            ratio, error = self._ratios(output, part)
            bound = (error / self._allowed(part)).max() if self.accurate else ratio.new_zeros(())
            found.append(torch.stack([ratio.max(), bound]))  # max() of a tensor with a NaN is NaN
        share, bound_ = torch.stack(found).amax(0).tolist()
        return share, bound_

    def _allowed(self, part: slice) -> torch.Tensor:
        """The bound of accurate files (operators/compare/oracle.py), half a step more where y is rounded once more."""
        true, beta = self.answer.y[part], self.answer.beta
        if beta is None:
            size = true.abs()
        else:  # one row, flat
            offset = beta.view(true.shape[1:])
            size = (true - offset).abs_() + offset.abs()
        allowed = size.mul_(BOUND_RELATIVE).add_(BOUND_ABSOLUTE)
        return allowed if self.dtype == torch.float32 else allowed + 0.5 * (1 + 2.0**-9) * ulp(true, self.dtype)

    def _worst(self, output: torch.Tensor, rows: int) -> str:
        """Where an output is farthest from its float64 answer, in words; how much of it is beyond the tolerance."""
        worst, beyond, where, at = -1.0, 0, slice(0, 1), 0
        for part in self._chunks(rows):
            ratio = torch.nan_to_num(self._ratios(output, part)[0], nan=math.inf, posinf=math.inf)
            beyond += int((ratio > 1).sum())
            if (largest := float(ratio.max())) > worst:
                worst, where, at = largest, part, int(ratio.argmax())
        index = unravel(where.start * self._row_elements + at, (rows, *output.shape[1:]))
        got, true = float(output[index]), float(self.answer.y[index])
        many = f"{beyond} of {rows * self._row_elements} elements beyond {self.tolerance:g}"
        return f"{list(index)} is {got:.9g}, float64 has {true:.9g}; {many}"


def _no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
