"""Reference and candidate models of a stress case, built as upstream builds them, with parameters and eps set.

Knows tasks and candidates; nothing of comparisons or verdicts. The reference lives in a module dict of its own: a
candidate that overrides the task's globals changes only its own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kbsub.adapters.candidate import CandidateError, cuda_source_of
from kbsub.adapters.task import SEED, Task
from kbsub.eval.operators.register import operator_of
from kbsub.eval.remote.model import RemoteModel
from kbsub.eval.suite.confined import Confined, Instance
from kbsub.eval.suite.inputs import NotApplicable, make_inputs, misaligned, set_parameters
from kbsub.eval.tasks.cases import OWN_EPS, Case, CaseShape, TaskCases, load_task_cases
from kbsub.eval.tasks.folder import submissions_folder

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
        set_parameters(model, case.parameters)
        for path in eps_paths(model, case.eps):
            vars(model.get_submodule(path))["eps"] = case.eps
        model.requires_grad_(False)
        ordered = self.operator.in_cuda_order(model) if self.cuda_order else None
        if ordered is not None:
            model.forward = ordered
        return model

    def build(self, who: Entrant, reference: torch.nn.Module, case: Case) -> Any:
        """The entrant's callable, same parameters and eps. Raises NotApplicable, or what its constructor raises."""
        arguments = self.init(case.shape)
        if who.confined is None:
            assert who.build is not None
            torch.manual_seed(SEED)
            with torch.no_grad():
                return who.build(reference, arguments)
        model = who.confined.start().construct(arguments)
        try:
            self._set(model, reference, case)
        except NotApplicable:
            model.drop()
            raise
        return Instance(model)

    def _set(self, model: RemoteModel, reference: torch.nn.Module, case: Case) -> None:
        load_parameters(model, reference, case)
        for path in eps_paths(reference, case.eps):
            name = f"{path}.eps" if path else "eps"
            if not model.set_attribute(name, case.eps):
                raise NotApplicable(f"the candidate has no {name} to set")

    def _place(self, model: Any) -> Any:
        return model.to(device=self.device, dtype=self.dtype)

    def inputs(self, case: Case) -> list[Any]:
        """The inputs of a case, contiguous. Raises NotApplicable."""
        if case.shape.inputs:
            templates: Sequence[Any] = [torch.empty(shape, device="meta") for shape in case.shape.inputs]
        else:
            templates = self._official()
        return make_inputs(case.input, templates, self.dtype, self.device)

    def _official(self) -> list[Any]:
        if not self._own_inputs:
            torch.manual_seed(100)  # the seed that stands in the case table; made on the CPU, as upstream does
            self._own_inputs = list(self.modules.get_inputs())
        return self._own_inputs

    def elements(self, case: Case) -> int:
        """Elements of all inputs together."""
        if case.shape.inputs:
            return case.shape.elements
        return sum(each.numel() for each in self._official() if isinstance(each, torch.Tensor))


def is_modelled(reference: torch.nn.Module) -> bool:
    """Whether `reference` answers in the order of PyTorch's CUDA kernel, on the CPU."""
    return "forward" in vars(reference)


def eps_paths(reference: torch.nn.Module, eps: float) -> list[str]:
    """Paths of the submodules with a float eps. Raises NotApplicable when there is none but eps is not the default."""
    paths = [path for path, module in reference.named_modules() if isinstance(vars(module).get("eps"), float)]
    if not paths and eps != OWN_EPS:
        raise NotApplicable("the task's model has no eps")
    return paths


def load_parameters(model: RemoteModel, reference: torch.nn.Module, case: Case) -> None:
    """Give a candidate the reference's parameters, when the state dicts have the same keys and shapes.

    Otherwise NotApplicable, except for the initial ones: the same seed came before both constructors. Where the case
    misaligns or changes parameters, the candidate's become views of memory that the judge writes.
    """
    theirs = {key: value.detach() for key, value in reference.state_dict().items()}
    mine = {key: shape for key, (_, shape) in model.state_forms.items()}
    same = mine == {key: tuple(value.shape) for key, value in theirs.items()}
    if case.layout == "misaligned_parameters":
        own = theirs if same else _own_parameters(model, case, theirs)
        floats = [key for key, value in own.items() if value.is_floating_point()]
        if not floats:
            raise NotApplicable("the candidate has no float parameters")
        model.load_state({key: misaligned(own[key]) if key in floats else own[key] for key in own}, bind=True)
    elif same:
        if theirs:
            model.load_state(theirs, bind=case.check == "graph_mutation")
    else:
        _require_initial(case, theirs, mine)


def _own_parameters(model: RemoteModel, case: Case, theirs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A candidate's own initial parameters and buffers, where they are not named as the reference's."""
    _require_initial(case, theirs, model.state_forms)
    return model.state()


def _require_initial(case: Case, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    if case.parameters.kind != "initial":
        raise NotApplicable(
            f"its parameters cannot be set: the reference's state dict has {', '.join(theirs) or 'no key'}, "
            f"the candidate's {', '.join(mine) or 'none'}, or shapes differ"
        )
