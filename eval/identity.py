"""The bit-identity verdict: a candidate against `torch.native_layer_norm` on the same device, case by case.

`judge` runs in a child process (adapters.isolation) with the payload of `kbsub eval`. What is drawn is data in
identity_cases; how two tensors are compared is bitwise and predicate. Output, mean and rstd are judged, the last two
where the candidate has `forward_with_stats`. Any NaN equals any NaN; payload differences are counted apart. Nothing
here is an official verdict. For any other task the reference is its own Model, and only official inputs are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kbsub.adapters.candidate import cuda_source_of, load_candidate
from kbsub.adapters.isolation import JudgeFailure, Status, is_out_of_memory
from kbsub.adapters.task import Modules, Task, task_from_payload
from kbsub.eval.bitwise import judge_pair, repeated_hashes
from kbsub.eval.declarations import identity_contradictions
from kbsub.eval.identity_cases import (
    EPS,
    FULL_SIZE,
    GROUPS,
    INPUTS,
    OFFICIAL_SHAPE,
    REPEAT_SEED,
    REPEATS,
    WARM_UPS,
    Group,
    Mutation,
    Shape,
    Step,
    count,
    mutation_of,
    steps,
)
from kbsub.eval.identity_generic import Refused, run_generic
from kbsub.eval.identity_model import modelled_layer_norm
from kbsub.eval.predicate import OFFICIAL_TOLERANCE
from kbsub.eval.refusal import modules_of

Progress = Callable[[dict[str, Any]], None]
Outputs = dict[str, torch.Tensor]
NAN_RULE = "any NaN equals any NaN; payload differences are counted apart"


@dataclass
class Bench:
    """What every case of one run shares: the task, the candidate's class, the device and the words of the verdict."""

    task: Task
    modules: Modules
    candidate: type[Any]
    device: torch.device
    contract: str
    full: bool  # the declared shapes; else the small ones
    hosted: bool  # its kernels are executed on the CPU, against a model of native's order
    cases: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tolerance(self) -> float:
        return OFFICIAL_TOLERANCE[self.task.dtype]

    def shape_of(self, group: Group) -> Shape:
        return (group.shape or OFFICIAL_SHAPE) if self.full else group.small

    def draw(self, name: str, shape: Shape) -> torch.Tensor:
        """One input in the task's dtype; the uniform one of the official shape is the task's own."""
        if name == "uniform" and shape == OFFICIAL_SHAPE:
            x: torch.Tensor = self.modules.get_inputs()[0].to(self.device)
        else:
            x = INPUTS[name](shape, self.device)
        return x.to(self.task.dtype)


class LayerNormPair:
    """A candidate and the native operator with the same parameters, for rows of one shape."""

    def __init__(self, bench: Bench, normalized_shape: Shape) -> None:
        self.bench, self.shape = bench, normalized_shape
        self.weight = torch.ones(normalized_shape, dtype=bench.task.dtype, device=bench.device)
        self.bias = torch.zeros_like(self.weight)
        self.eps = EPS
        try:
            self.model = bench.candidate(normalized_shape).to(device=bench.device, dtype=bench.task.dtype)
        except Exception as error:
            raise JudgeFailure(Status.RUNTIME_ERROR, f"ModelNew({normalized_shape}): {error}") from error

    @property
    def has_state(self) -> bool:
        return set(self.model.state_dict()) == {"ln.weight", "ln.bias"}

    def set_affine(self, kind: str) -> None:
        """Both sides get (1, 0), or with kind "random" a draw in fp32 on the device, weight first, then bias."""
        if kind == "random":
            self.weight.copy_(torch.empty(self.shape, device=self.bench.device).normal_())
            self.bias.copy_(torch.empty(self.shape, device=self.bench.device).normal_())
        else:
            self.weight.fill_(1)
            self.bias.zero_()
        if self.has_state:
            self.model.load_state_dict({"ln.weight": self.weight, "ln.bias": self.bias})

    def refusal(self, affine: str, eps: float) -> str | None:
        """Why this setting cannot be asked of this candidate (it is not ours), or None; sets eps."""
        if affine == "random" and not self.has_state:
            return "its state dict has not the keys ln.weight and ln.bias"
        layer: Any = getattr(self.model, "ln", None)
        if eps != EPS and not hasattr(layer, "eps"):
            return "it has no ln.eps to set"
        if hasattr(layer, "eps"):
            layer.eps = eps
        self.eps = eps
        return None

    def native(self, x: torch.Tensor) -> Outputs:
        if self.bench.hosted:
            y, mean, rstd = modelled_layer_norm(x, self.weight, self.bias, self.eps)
        else:
            y, mean, rstd = torch.native_layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        expected = {"output": y}
        if hasattr(self.model, "forward_with_stats"):
            expected |= {"output_with_stats": y, "mean": mean.reshape(-1), "rstd": rstd.reshape(-1)}
        return expected

    def run(self, x: torch.Tensor) -> Outputs:
        got = {"output": self.model(x)}
        if hasattr(self.model, "forward_with_stats"):
            got["output_with_stats"], got["mean"], got["rstd"] = self.model.forward_with_stats(x)
        return got


def poison(like: torch.Tensor) -> None:
    """Leave NaN in a freed block of the size of `like`: an output that is not written shows."""
    if like.is_cuda and like.numel():
        torch.full_like(like, float("nan"))  # freed at once: the allocator hands this block out next


def verdict(expected: Outputs, got: Outputs, tolerance: float) -> dict[str, Any]:
    """The record of one case: the output's own findings, and mean and rstd under "tensors" where they exist."""
    found = {name: judge_pair(value, got[name], tolerance) for name, value in expected.items()}
    record = found.pop("output")
    if found:
        record["tensors"] = found
        record["output_identical"] = record["identical"]
        record["identical"] = record["identical"] and all(each["identical"] for each in found.values())
    return record


def run_case(pair: LayerNormPair, x: torch.Tensor, label: dict[str, Any]) -> dict[str, Any]:
    """Reference first, then the candidate on the same input. A ValueError is a refusal; other errors end the run."""
    if reason := pair.refusal(label["affine"], label["eps"]):
        return {**label, "skipped": reason}
    expected = pair.native(x)
    poison(expected["output"])
    try:
        got = pair.run(x)
        if x.is_cuda:
            torch.cuda.synchronize()
    except ValueError as error:
        return {**label, "identical": False, "refused": str(error)}
    return {**label, **verdict(expected, got, pair.bench.tolerance)}


def label_of(step: Step, shape: Shape, eps: float) -> dict[str, Any]:
    size = "x".join(map(str, shape))
    name = f"{step.group.name} {size}, seed {step.seed}, {step.affine} affine, {step.input}, eps {eps:g}"
    return {
        "name": name,
        "group": step.group.name,
        "shape": list(shape),
        "seed": step.seed,
        "affine": step.affine,
        "input": step.input,
        "eps": eps,
    }


def run_group(bench: Bench, group: Group) -> Iterator[dict[str, Any]]:
    """For each case, in the order in which the random numbers are drawn, first its label, then its record."""
    shape = bench.shape_of(group)
    pair = LayerNormPair(bench, shape[1:])
    for step in steps(group, bench.contract):
        if step.first_of_seed:
            torch.manual_seed(step.seed)
        if step.draw_affine:
            pair.set_affine(step.affine)
        x = bench.draw(step.input, shape)
        for eps in group.eps:
            label = label_of(step, shape, eps)
            yield label
            yield run_case(pair, x, label)


def _official_pair(bench: Bench) -> tuple[LayerNormPair, torch.Tensor]:
    """The timed input of upstream (seed 42) with random parameters."""
    shape = bench.shape_of(GROUPS[0])
    pair = LayerNormPair(bench, shape[1:])
    torch.manual_seed(REPEAT_SEED)
    x = bench.draw("uniform", shape)
    pair.set_affine("random" if pair.has_state else "default")
    return pair, x


def repeated_runs(bench: Bench, runs: int) -> dict[str, Any]:
    """`runs` calls on one input: how many distinct hashes. Freed memory is poisoned before each."""
    pair, x = _official_pair(bench)

    def once() -> tuple[torch.Tensor, ...]:
        poison(x)
        return tuple(pair.run(x).values())

    return repeated_hashes(once, runs)


def mutation_case(bench: Bench, mutation: Mutation) -> dict[str, Any]:
    """Capture, change input and parameters in place, replay, compare with a fresh reference.

    Without CUDA there are no graphs: the candidate is called before and after the change, at the same addresses.
    """
    pair, x = _official_pair(bench)
    captured = bench.device.type == "cuda"
    label = {
        "name": "graph mutation" if captured else "mutation in place (no graph on a CPU)",
        "group": "graph mutation",
        "shape": list(x.shape),
        "seed": REPEAT_SEED,
        "input": "uniform",
        "affine": "random" if pair.has_state else "default",
        "eps": EPS,
        "change": vars(mutation),
    }
    replay = _captured(pair, x) if captured else _called(pair, x)
    change_in_place(pair, x, mutation)
    return {**label, **verdict(pair.native(x), replay(), bench.tolerance)}


def change_in_place(pair: LayerNormPair, x: torch.Tensor, mutation: Mutation) -> None:
    """The input and, on both sides alike, the parameters; addresses stay."""
    x.mul_(mutation.x)
    if pair.has_state:
        for weight, bias in ((pair.weight, pair.bias), (pair.model.ln.weight, pair.model.ln.bias)):
            weight.mul_(mutation.weight)
            bias.add_(mutation.bias)


def _called(pair: LayerNormPair, x: torch.Tensor) -> Callable[[], Outputs]:
    for _ in range(WARM_UPS):
        pair.run(x)
    return lambda: pair.run(x)


def _captured(pair: LayerNormPair, x: torch.Tensor) -> Callable[[], Outputs]:
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            pair.run(x)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = pair.run(x)

    def replay() -> Outputs:
        for output in outputs.values():
            output.fill_(float("nan"))  # what replay does not write shows
        graph.replay()
        torch.cuda.synchronize()
        return outputs

    return replay


def open_bench(payload: dict[str, Any]) -> Bench:
    """The candidate loaded as upstream loads it; JudgeFailure NOT_RUN where its bits mean nothing here."""
    device = torch.device(payload["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        raise JudgeFailure(Status.NOT_RUN, "bit identity needs an NVIDIA GPU; torch sees none")
    needs = cuda_source_of(payload["candidate_source"])
    hosted = device.type == "cpu" and needs == "CUDA_SOURCE" and bool(payload.get("host_executor"))
    if device.type == "cpu" and needs and not hosted:
        raise JudgeFailure(
            Status.NOT_RUN,
            f"{needs}: its reference is native LayerNorm on CUDA, whose order the CPU's does not share; run this on a "
            "machine with an NVIDIA GPU, or against a model of that order with --device cpu (the host executor)",
        )
    declaration = payload.get("declaration") or {}
    task = task_from_payload(payload)
    if task.precision not in declaration.get("precision", (task.precision,)):
        raise JudgeFailure(Status.NOT_RUN, f"declared for {', '.join(declaration['precision'])}, not {task.precision}")
    modules = modules_of(task)
    candidate = load_candidate(payload["candidate_source"], task, modules=modules)
    if device.index is not None:
        torch.cuda.set_device(device)
    if hosted:
        from kbsub.eval.host_executor import H200_LIMITS, HostExecutor, adopt

        adopt(modules.context, H200_LIMITS, HostExecutor())
        candidate = modules.context["ModelNew"]
    contract = declaration.get("contract", "undeclared")
    full = device.type == "cuda" or bool(payload.get("full"))
    return Bench(task, modules, candidate, device, contract, full, hosted)


def judge(payload: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The `bit_identity` part of a result (results.md), plus `repeated_runs`; on CUDA `contradictions` too.

    Optional payload keys: "repeats" (calls that must give one hash), "full" (declared shapes on a CPU). Raises
    JudgeFailure: NOT_RUN, COMPILE_ERROR, RUNTIME_ERROR or OUT_OF_MEMORY, with the cases judged until then.
    """
    bench = open_bench(payload)
    layer_norm = (bench.task.level, bench.task.problem_id) == (1, 40)
    total = count(GROUPS, bench.contract) + 2 if layer_norm else len(GROUPS[0].seeds)
    extra: dict[str, Any] = {}
    at: dict[str, Any] = {}

    def announce(label: dict[str, Any]) -> None:
        at.update(label)
        progress({"stage": "case", "index": len(bench.cases) + 1, "of": total, "case": label["name"]})

    def take(records: Iterator[dict[str, Any]]) -> None:
        for label in records:
            announce(label)
            bench.cases.append(next(records))

    try:
        with torch.no_grad():
            if layer_norm:
                for group in GROUPS:
                    take(run_group(bench, group))
                announce({"name": "repeated runs"})
                extra["repeated_runs"] = repeated_runs(bench, payload.get("repeats", REPEATS[bench.device.type]))
                announce({"name": "graph mutation"})
                bench.cases.append(mutation_case(bench, mutation_of(bench.contract)))
            else:
                take(run_generic(bench))
    except JudgeFailure:
        raise
    except Refused as refusal:
        raise JudgeFailure(Status.NOT_RUN, str(refusal), summary(bench) | extra) from refusal
    except Exception as error:
        status = Status.OUT_OF_MEMORY if is_out_of_memory(error) else Status.RUNTIME_ERROR
        where = at.get("name", "start")
        raise JudgeFailure(status, f"{where}: {type(error).__name__}: {error}", summary(bench) | extra) from error
    result = summary(bench) | extra
    if not layer_norm and (why := bench.cases[0].get("skipped")):  # the task as it is: nothing else is worth a verdict
        raise JudgeFailure(Status.NOT_RUN, f"{bench.cases[0]['name']}: {why}", result)
    expect = (payload.get("declaration") or {}).get("expect")
    if expect and layer_norm and bench.device.type == "cuda":  # declarations speak of native on CUDA
        result["contradictions"] = identity_contradictions(expect, result)
    return result


def summary(bench: Bench) -> dict[str, Any]:
    """The counts over the cases: a refused case is in the total and not identical, a skipped one is not in it."""
    judged = [case for case in bench.cases if "skipped" not in case]
    full_size = [case for case in judged if case["group"] == FULL_SIZE]
    return {
        "identical": sum(case["identical"] for case in judged),
        "total": len(judged),
        "full_size": {"identical": sum(case["identical"] for case in full_size), "total": len(full_size)},
        "close": sum(case.get("allclose", False) for case in judged),
        "refused": sum("refused" in case for case in judged),
        "skipped": len(bench.cases) - len(judged),
        "precision": bench.task.precision,
        "tolerance": bench.tolerance,
        "equal_nan": True,
        "nan_rule": NAN_RULE,
        "nan_payload_differences": sum(case.get("nan_payload_differences", 0) for case in judged),
        "reference": "model of native's order (host executor)" if bench.hosted else f"native on {bench.device.type}",
        "device": bench.device.type,
        "official": False,
        "cases": bench.cases,
    }
