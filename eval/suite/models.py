"""Reference and candidate models of a stress case, built as upstream builds them, with parameters and eps set.

Knows tasks and candidates; nothing of comparisons or verdicts. The reference lives in a module dict of its own: a
candidate that overrides the task's globals changes only its own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kbsub.adapters.candidate import CandidateError, cuda_source_of
from kbsub.adapters.task import SEED, Task
from kbsub.eval.operators.register import operator_of
from kbsub.eval.suite.confined import Confined, Instance
from kbsub.eval.suite.inputs import OWN, NotApplicable, make_inputs, misaligned, set_parameters
from kbsub.eval.suite.setting import (
    HowSet,
    forms_told,
    match_of,
    set_eps,
    set_remote_eps,
    state_for,
    with_eps,
)
from kbsub.eval.tasks.cases import INPUT, OWN_EPS, PARAMETERS_NOT_SET, Case, CaseShape, TaskCases, load_task_cases
from kbsub.eval.tasks.folder import submissions_folder

OFFICIAL_SEED = INPUT["official"].seed
Build = Callable[[torch.nn.Module, tuple[Any, ...]], Any]


@dataclass(frozen=True)
class Entrant:
    """One program to be judged: a candidate, or a baseline such as eager.

    build(reference, init_inputs) returns a baseline's callable, with its parameters already set. A candidate has
    `confined` instead: no line of it runs in this process.
    """

    stem: str
    contract: str
    accurate: bool
    build: Build | None = None
    hosted: bool = False  # its kernels are executed on the CPU
    confined: Confined | None = None
    found: HowSet = field(default_factory=HowSet)  # how its parameters and eps are set


BASELINES: dict[str, Build] = {
    "eager": lambda reference, _: reference,
    "compile_default": lambda reference, _: torch.compile(reference),
}


def entrant(payload: Mapping[str, Any], task: Task, device: torch.device) -> Entrant:
    """The entrant of one stage payload (stem, candidate_source, declaration, host_executor ...), or of a baseline's:
    {"baseline": "eager" | "compile_default", "stem"}.

    A candidate is loaded in a process of its own. Raises RemoteError when that gives no ModelNew, CandidateError for
    an unknown baseline.
    """
    if "baseline" in payload:
        name = payload["baseline"]
        if name not in BASELINES:
            raise CandidateError(f"unknown baseline {name!r}; known are {', '.join(BASELINES)}")
        return Entrant(payload.get("stem", name), "baseline", False, BASELINES[name])
    source = payload["candidate_source"]
    hosted = bool(payload.get("host_executor")) and cuda_source_of(source) == "CUDA_SOURCE"
    if hosted:
        from kbsub.eval.host_executor.build import require_host

        require_host()
    declared = payload.get("declaration") or {}
    confined = Confined(source, task, device, hosted)
    confined.start()
    return Entrant(
        payload["stem"],
        declared.get("contract", ""),
        bool(declared.get("accurate", False)),
        hosted=hosted,
        confined=confined,
    )


def task_cases(task: Task) -> TaskCases:
    """The cases of submissions/<task>/cases.toml; none for a task without such a folder."""
    return load_task_cases(submissions_folder(task.slug))


class Workshop:
    """Builds the models and inputs of one task on one device.

    cuda_order: the reference answers in the order of PyTorch's CUDA kernel, where its operator knows one: kernels
    executed on the CPU then have the right thing to be compared with: the CPU's own operators add in another order.
    """

    def __init__(self, task: Task, device: torch.device, cuda_order: bool = False) -> None:
        self.task, self.device, self.dtype, self.cuda_order = task, device, task.dtype, cuda_order
        self.modules = task.modules()
        self.operator = operator_of(task)
        self._own_inputs: list[Any] = []
        self._reference: tuple[Any, torch.nn.Module | None] = (None, None)  # the last one built
        self._initial: dict[str, torch.Tensor] = {}  # its state as constructed
        self._own_eps: dict[str, float] = {}  # its eps before they were set; {} where they are its own

    def init(self, shape: CaseShape) -> tuple[Any, ...]:
        """Constructor arguments, cast as upstream casts them."""
        torch.manual_seed(SEED)
        arguments = list(shape.init) if shape.inputs else list(self.modules.get_init_inputs())
        return tuple(self.task.cast(arguments, self.device))

    def reference(self, case: Case) -> torch.nn.Module:
        """The task's Model with the parameters and eps of this case, kept until another is asked for.

        Raises NotApplicable.
        """
        key = (case.shape, case.parameters, case.eps)
        if self._reference[0] == key and self._reference[1] is not None:
            return self._reference[1]
        self._reference = (None, None)
        model = self._new_reference(case)
        self._reference = (key, model)
        return model

    def _new_reference(self, case: Case) -> torch.nn.Module:
        arguments = self.init(case.shape)
        torch.manual_seed(SEED)  # after init, before the constructor: the same draw as the candidate's
        model: torch.nn.Module = self._place(self.modules.Model(*arguments))
        self._initial = {key: value.clone() for key, value in model.state_dict().items()}
        set_parameters(model, case.parameters)
        self._own_eps = set_eps(model, case.eps) if case.eps != OWN_EPS else {}
        model.requires_grad_(False)
        ordered = self.operator.in_cuda_order(model) if self.cuda_order else None
        if ordered is not None:
            model.forward = ordered
        return model

    def build(self, who: Entrant, reference: torch.nn.Module, case: Case) -> Any:
        """The entrant's callable, same parameters and eps. Raises NotApplicable, or what its constructor raises.

        `reference`: the one of this case, the last that `reference` gave.
        """
        arguments = self.init(case.shape)
        if who.confined is None:
            assert who.build is not None
            torch.manual_seed(SEED)
            with torch.no_grad():
                return who.build(reference, arguments)
        given = with_eps(arguments, self._own_eps, case.eps) if self._own_eps else arguments
        model = who.confined.start().construct(given)
        instance = Instance(model)
        try:
            instance.match = match_of(forms_told(model.state_forms), model.state, reference, self._initial)
            load_parameters(instance, reference, case, who.found)
            if self._own_eps:
                who.found.eps = ""
                by_argument = given != arguments
                who.found.eps = set_remote_eps(model, self._own_eps, case.eps, by_argument=by_argument)
        except NotApplicable:
            model.drop()
            raise
        return instance

    def _place(self, model: Any) -> Any:
        return model.to(device=self.device, dtype=self.dtype)

    def inputs(self, case: Case) -> list[Any]:
        """The inputs of a case, contiguous. Raises NotApplicable."""
        if case.shape.inputs:
            templates: Sequence[Any] = [torch.empty(shape, device="meta") for shape in case.shape.inputs]
        else:
            templates = self.official()
            if case.input.kind in OWN and case.input.seed != OFFICIAL_SEED:
                templates = self._secret(case)
        return make_inputs(case.input, templates, self.dtype, self.device)

    def official(self) -> list[Any]:
        """The task's own inputs at its size, as get_inputs gives them."""
        if not self._own_inputs:
            torch.manual_seed(OFFICIAL_SEED)
            self._own_inputs = self.modules.inputs_on(self.device)
        return self._own_inputs

    def _secret(self, case: Case) -> list[Any]:
        """The task's own inputs of the case's seed; where they are the same for every seed, NotApplicable, or these for
        a case that asks something else of them."""
        torch.manual_seed(case.input.seed)
        or_own = case.input.kind != "official" or case.parameters.kind != "initial"
        drawn: list[Any] = self.modules.inputs_on(self.device)
        pairs = zip(drawn, self.official(), strict=True)
        if not or_own and all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs):
            raise NotApplicable("the task's own inputs are the same for every seed")
        return drawn

    def elements(self, case: Case) -> int:
        """Elements of all inputs together."""
        if case.shape.inputs:
            return case.shape.elements
        return sum(each.numel() for each in self.official() if isinstance(each, torch.Tensor))


def peaks(who: Entrant, judge: int | None) -> dict[str, Any]:
    """How much memory a candidate's cases took at most, beyond what was there before: a process each, and together.

    Of the judge, on a GPU, by torch's allocator; "shared" is the judge's memory that the candidate's process sees."""
    assert who.confined is not None
    parts = {"judge": judge, "candidate": who.confined.peak_bytes, "shared": who.confined.shared_bytes}
    known = {name: value for name, value in parts.items() if value is not None}
    return {"peak_extra_bytes_of": known, **({"peak_extra_bytes": sum(known.values())} if len(known) == 3 else {})}


def is_modelled(reference: torch.nn.Module) -> bool:
    """Whether `reference` answers in the order of PyTorch's CUDA kernel, on the CPU."""
    return "forward" in vars(reference)


def load_parameters(instance: Instance, reference: torch.nn.Module, case: Case, found: HowSet) -> None:
    """Give a candidate the reference's parameters and buffers, by key, by order and shape, or by shape.

    Where none of these fits, NotApplicable, except for the initial ones: the same seed came before both constructors.
    Where the case misaligns or changes parameters, the candidate's become views of memory that the judge writes.
    """
    model, match = instance.remote, instance.match
    state = reference.state_dict()
    if not state:
        return
    found.parameters = match.how if match is not None else ""
    if match is None:
        if case.parameters.kind == "initial" and case.layout == "misaligned_parameters":
            own = model.state()  # of its own names, as constructed
            model.load_state(
                {key: misaligned(each) if each.is_floating_point() else each for key, each in own.items()}, bind=True
            )
        if case.parameters.kind != "initial":
            raise NotApplicable(
                f"{PARAMETERS_NOT_SET}: the reference's state dict has {_listed(state)}, "
                f"the candidate's {_listed(model.state_forms)}, and neither names, order nor shapes agree"
            )
        return
    theirs = state_for(match, state)
    if case.layout == "misaligned_parameters":
        floats = [key for key, value in theirs.items() if value.is_floating_point()]
        if not floats:
            raise NotApplicable("the candidate has no float parameters of the reference's")
        theirs = {key: misaligned(value) if key in floats else value for key, value in theirs.items()}
        model.load_state(theirs, bind=True)
    elif theirs:
        model.load_state(theirs, bind=case.check == "graph_mutation")


def _listed(names: Iterable[str]) -> str:
    """The first names of a state dict."""
    names = list(names)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") if names else "no key"
