"""The behaviour checks of the stress suite: what a single comparison of one output cannot see.

Each takes a Scene and returns what is wrong in words, or None; NotApplicable where the check has no meaning here.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kbsub.adapters.refusal import reference_asked
from kbsub.adapters.task import SEED
from kbsub.eval.operators.compare.oracle import spread_of
from kbsub.eval.operators.compare.predicate import Comparison, compare, same_bits
from kbsub.eval.operators.operator import Operator
from kbsub.eval.remote.graphs import called, captured
from kbsub.eval.remote.probes import behind_slow_work
from kbsub.eval.remote.ring import tensors_of
from kbsub.eval.suite.confined import Instance
from kbsub.eval.suite.inputs import NotApplicable
from kbsub.eval.suite.one_tensor import as_one, exact_problem, row_of_one
from kbsub.eval.suite.setting import forms_of, state_for

CALLS_S = 10.0  # of after_1000_calls, where that many calls would take longer
HELD_BYTES = 1 << 30  # of an answer that is held meanwhile: of larger ones there is room for no long ring


@dataclass
class Scene:
    """One entrant on the inputs of one case. strict: the contract asks for the reference's bits."""

    reference: torch.nn.Module
    model: Any
    inputs: list[Any]
    expected: torch.Tensor  # the reference's output on `inputs`
    output: torch.Tensor  # the entrant's
    strict: bool
    calls: int = 1000
    # How far its output is from the reference's already, over 1 + |y|, where that is more than the tolerance.
    slack: float = 0.0
    spoiled: bool = False  # a check changed the model's parameters: build it afresh


def run(model: Any, inputs: list[Any]) -> Any:
    """One call under no_grad, finished when it returns, so that an asynchronous error belongs to this call."""
    torch.manual_seed(SEED)  # both sides: a task that draws random numbers in forward draws the same
    with torch.no_grad():
        output = as_one(model(*inputs))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return output


def _of_reference(reference: torch.nn.Module, inputs: list[Any]) -> torch.Tensor:
    """The reference's own answer. NotApplicable where it has none: no candidate is to blame for that."""
    with reference_asked(NotApplicable):
        native = run(reference, inputs)
    if not isinstance(native, torch.Tensor):
        raise NotApplicable(f"the reference returns {type(native).__name__} here, not a tensor")
    return native


def run_twice(scene: Scene) -> str | None:
    """The same input twice gives the same bits."""
    again = run(scene.model, scene.inputs)
    return None if same_bits(scene.output, again) else "a second run on the same input gave other bits"


def device_still_works(scene: Scene) -> str | None:
    """What an unrelated operation gets wrong after the candidate's; it raises after an illegal launch."""
    if not scene.output.is_cuda or float(torch.ones(8, device=scene.output.device).sum()) == 8.0:
        return None
    return "an unrelated CUDA op is wrong after the empty batch"


def row_alone(scene: Scene) -> str | None:
    """A row alone against the same row in the batch: bit for bit under a bit-identical contract, else the tolerance.

    Where the reference's own row alone has other bits than in the batch (its order of sums depends on how many rows
    there are), no candidate can keep both: that row is held to the tolerance, and a scene without a fault is
    NotApplicable with that reason.
    """
    rows = scene.expected.shape[0] if scene.expected.dim() else 0
    if rows < 2:
        raise NotApplicable("the output has no two rows")
    others = []  # rows of which the reference has other bits
    for row in sorted({0, rows // 2, rows - 1}):
        alone = [_row(each, row, rows) for each in scene.inputs]
        native, together = _of_reference(scene.reference, alone), scene.expected[row : row + 1]
        if native.shape != together.shape or not close(together, native):
            raise NotApplicable("the reference's rows depend on one another")
        kept = compare(together, native).identical
        others += [] if kept else [str(row)]
        got = run(scene.model, alone)
        problem = _differs(scene, row_of_one(scene.output, row), got, strict=scene.strict and kept)
        if problem:
            return f"row {row} alone differs from the same row in the batch of {rows}: {problem}"
    if scene.strict and others:
        raise NotApplicable(
            f"row {', '.join(others)} alone has other bits than in the batch of {rows} in the reference itself"
        )
    return None


def _row(value: Any, row: int, rows: int) -> Any:
    batched = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows
    return value[row : row + 1].clone() if batched else value


def side_stream(scene: Scene) -> str | None:
    """On a stream of the caller's choice, behind slow work on it: a kernel launched elsewhere reads NaN."""
    _need_cuda(scene)
    if isinstance(scene.model, Instance):
        result = scene.model.on_side_stream(scene.inputs)
    else:
        result, _ = behind_slow_work(scene.model, scene.inputs, side=True)
    result = as_one(result)
    problem = _differs(scene, scene.expected, result)
    return f"on a side stream the answer is wrong: {problem}" if problem else None


def graph_mutation(scene: Scene) -> str | None:
    """Captured, then inputs and parameters changed in place, then replayed: the published protocol's mutation."""
    _need_cuda(scene)
    with reference_asked(NotApplicable):
        twin = copy.deepcopy(scene.reference)
    held = [each.clone() if isinstance(each, torch.Tensor) else each for each in scene.inputs]
    scene.spoiled = True
    of_candidate = isinstance(scene.model, Instance)
    got, native = (_replayed_in_worker if of_candidate else _replayed_here)(scene, twin, held)
    problem = _differs(scene, native, as_one(got))
    return f"replayed after inputs and parameters changed in place: {problem}" if problem else None


def _replayed_in_worker(scene: Scene, twin: torch.nn.Module, held: list[Any]) -> tuple[Any, torch.Tensor]:
    """(the candidate's answer, the reference's); where its parameters are not known, only the inputs change."""
    model = scene.model
    model.capture(held)
    _change_inputs(held)
    if model.match is not None and model.match.keys:  # the same places in the judge's memory, which the graph reads
        _change_parameters(dict(twin.named_parameters()))
        model.remote.load_state(state_for(model.match, twin.state_dict()), bind=True)
    return model.replay(held), _of_reference(twin, held)


def _replayed_here(scene: Scene, twin: torch.nn.Module, held: list[Any]) -> tuple[Any, torch.Tensor]:
    """Likewise for a baseline in this process, whose parameters may be the reference's own: they are put back."""
    named = scene.model.named_parameters() if isinstance(scene.model, torch.nn.Module) else ()
    parameters = {name.removeprefix("_orig_mod."): each for name, each in named}  # the prefix of torch.compile
    shared = set(parameters) == set(dict(twin.named_parameters()))
    before = {name: each.detach().clone() for name, each in parameters.items()}
    with torch.no_grad():
        replay = (captured if scene.expected.is_cuda else called)(scene.model, held)
    _change_inputs(held)
    try:
        if shared:
            _change_parameters(parameters)
            _change_parameters(dict(twin.named_parameters()))
        with torch.no_grad():
            got = replay()
        return got, _of_reference(twin, held)
    finally:
        with torch.no_grad():
            for name, each in parameters.items():
                each.copy_(before[name])


def _change_inputs(held: list[Any]) -> None:
    for each in held:
        if _is_float(each):
            each.mul_(0.8)


def _change_parameters(named: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in named.items():
            if name.rpartition(".")[2] == "bias":
                parameter.add_(0.01)
            else:
                parameter.mul_(0.9)


def _instance(scene: Scene) -> Instance:
    if not isinstance(scene.model, Instance):
        raise NotApplicable("asked of candidates only, in their own process")
    return scene.model


def after_1000_calls(scene: Scene) -> str | None:
    """New contents at the same addresses are answered rightly after `calls` calls on the old ones, and an answer from
    before them all, to other contents, which is still held, is as it was."""
    held = [each.clone() if isinstance(each, torch.Tensor) else each for each in scene.inputs]
    small = scene.expected.numel() * scene.expected.element_size() <= HELD_BYTES
    keeps = small and isinstance(scene.model, Instance) and not _answers_with_inputs(scene.reference, held)
    started = time.monotonic()
    others = [0.5 * each if _is_float(each) else each for each in held]
    first = scene.model.kept(others) if keeps else run(scene.model, others)
    del others
    scene.calls = min(scene.calls, max(3, int(CALLS_S / max(time.monotonic() - started, 1e-6))))
    if isinstance(scene.model, Instance):
        scene.model.repeat(held, scene.calls)
    else:
        for _ in range(scene.calls):
            run(scene.model, held)
    for each in held:
        if _is_float(each):
            each.mul_(-0.5).add_(0.25)
    problem = _differs(scene, _of_reference(scene.reference, held), run(scene.model, held))
    if problem:
        return f"after {scene.calls} calls new contents are answered wrongly: {problem}"
    if keeps and not same_bits(as_one(first), as_one(scene.model.as_it_is(held))):
        return f"the answer to an earlier call was changed by later ones ({scene.calls}): its memory is given twice"
    return None


def _answers_with_inputs(reference: torch.nn.Module, inputs: list[Any]) -> bool:
    """Whether something that the reference returns lies in its inputs, and changes when they do."""
    with reference_asked(NotApplicable), torch.no_grad():
        answers = tensors_of(reference(*inputs))
    lie = {each.untyped_storage().data_ptr() for each in tensors_of(inputs)}
    return any(each.untyped_storage().data_ptr() in lie for each in answers)


def others_keep_their_bits(
    scene: Scene, clean: list[Any], clean_reference: torch.Tensor, row: int
) -> tuple[str | None, bool]:
    """After one NaN or Inf in `row`: the other rows' outputs have the bits they have without it.

    Returns (problem, asked): not asked where the reference's own rows depend on one another.
    """
    keep = [each for each in range(scene.expected.shape[0]) if each != row] if scene.expected.dim() else []
    if not keep or not isinstance(clean_reference, torch.Tensor) or scene.expected.shape != clean_reference.shape:
        return None, False
    for span in (slice(0, row), slice(row + 1, None)):
        if not same_bits(scene.expected[span], clean_reference[span]):
            return None, False
    output = run(scene.model, clean)
    for span in (slice(0, row), slice(row + 1, None)):
        if not same_bits(scene.output[span], output[span]):
            return f"a special value in row {row} changed bits of other rows", True
    return None, True


def state(scene: Scene) -> str | None:
    """What a call changes in the model itself: running statistics and other buffers, and no parameter."""
    model = _instance(scene)
    with reference_asked(NotApplicable):
        twin = copy.deepcopy(scene.reference)
    buffers = [key for key, form in forms_of(twin).items() if not form.trained]
    before = {key: value.clone() for key, value in twin.state_dict().items()}
    _of_reference(twin, scene.inputs)
    after = twin.state_dict()
    changed = [key for key in buffers if not same_bits(before[key], after[key])]
    if model.match is None:
        raise NotApplicable("which of the candidate's tensors are the reference's is not known")
    if lost := [key for key in changed if key in model.match.lacking]:
        return f"the reference's forward updates {', '.join(lost)}; the candidate keeps no such state"
    if not before:
        raise NotApplicable("the task's model has no state")
    scene.spoiled = True
    model.remote.load_state(state_for(model.match, before))
    run(model, scene.inputs)
    found = model.remote.state()
    for its, mine in model.match.keys.items():
        got = found[its].reshape(after[mine].shape)
        if not after[mine].is_floating_point():
            if not bool((got.to(after[mine]) == after[mine]).all()):
                return f"after a call its {its} is {got.tolist()}, the reference's {mine} {after[mine].tolist()}"
        elif not close(after[mine], got) and not _within(scene, after[mine], got):
            what = "is not updated as" if mine in changed else "changes in a call, unlike"
            return f"its {its} {what} the reference's {mine}: {compare(after[mine], got).describe()}"
    return None


CHECKS: dict[str, Callable[[Scene], str | None]] = {
    "run_twice": run_twice,
    "row_alone": row_alone,
    "side_stream": side_stream,
    "graph_mutation": graph_mutation,
    "after_1000_calls": after_1000_calls,
    "state": state,
}


def close(reference: torch.Tensor, candidate: torch.Tensor) -> bool:
    return compare(reference, candidate).allclose


def _differs(scene: Scene, expected: torch.Tensor, got: Any, strict: bool | None = None) -> str | None:
    """strict: whether bits count; None: what the contract asks for."""
    if not isinstance(got, torch.Tensor):
        return f"returned {type(got).__name__}, not a tensor"
    comparison: Comparison = compare(expected, got)  # PredicateError is told apart by the caller
    if why := exact_problem(expected, got):
        return why
    if (scene.strict if strict is None else strict) and not comparison.identical:
        return f"not bit-identical: {comparison.describe()}"
    if comparison.allclose or _within(scene, expected, got):
        return None
    return comparison.describe()


def _within(scene: Scene, expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Of an answer nearer to float64 than native, or as far: whether it is about as far from native as it was before
    (twice: other contents have other roundings)."""
    if not scene.slack or expected.shape != got.shape or not torch.equal(expected.isfinite(), got.isfinite()):
        return False
    return spread_of(expected, got)[0] <= 2 * scene.slack


def _need_cuda(scene: Scene) -> None:
    if scene.expected.device.type != "cuda":
        raise NotApplicable("needs a CUDA device")


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def exactly_constant(operator: Operator, scene: Scene) -> str | None:
    """Rows of one constant give what the operator says, exactly; NotApplicable where nothing is known."""
    known = operator.of_constant_rows(scene.reference, scene.output)
    if known is None:
        raise NotApplicable("what a constant row gives is not known of the task's operator")
    if bool((scene.output == known).all()):
        return None
    return f"a constant row must give exactly beta: {compare(known, scene.output, atol=0.0, rtol=0.0).describe()}"
