"""The stress suite: asks the cases of eval/tasks/cases.py of candidates in their own processes and classes each answer.

A case is judged against native (the task's Model, torch.allclose at the precision's tolerance, equal_nan=True) *and*
against the float64 oracle; both are reported. Reference and oracle values are computed once a case and shared by all
entrants of a run. Nothing here touches the official verdict. `batch.py` runs this in a child process.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kbsub.adapters.candidate import CandidateError, asks_for_a_gpu
from kbsub.adapters.refusal import REFERENCE_REFUSES, modules_of
from kbsub.adapters.refusal import short_error as _short
from kbsub.adapters.task import OFFICIAL_SIZE, Task, task_from_payload
from kbsub.eval.operators.compare.oracle import error_of, spread_of
from kbsub.eval.operators.compare.predicate import PredicateError, compare, same_bits
from kbsub.eval.process.isolated import JudgeFailure, Status, is_out_of_memory
from kbsub.eval.remote.model import CandidateRaised, CandidateRefused, RemoteError, WorkerFailure
from kbsub.eval.suite import checks
from kbsub.eval.suite.applicable import applicable, secret_asked, without_parameters
from kbsub.eval.suite.classes import Question, classify, oracle_facts, row_of
from kbsub.eval.suite.confined import Instance, Lost
from kbsub.eval.suite.inputs import NotApplicable, first_tensor, lay_out, special_place, values_of
from kbsub.eval.suite.models import Entrant, Workshop, entrant, is_modelled, peaks, task_cases
from kbsub.eval.suite.one_tensor import exact_problem
from kbsub.eval.suite.questions import Broken, ask, still_usable
from kbsub.eval.suite.records import NEEDS_GPU, NO_TIME, ended_without, no_verdict, oracle_record, stress_record
from kbsub.eval.tasks.cases import APART, FAIL, NEARER, PASS, REFUSED, SKIPPED, Case, Row, select, suite
from kbsub.eval.tasks.secret import secret_seed

Progress = Callable[[dict[str, Any]], None]

CPU_ELEMENTS = 1 << 20  # cases of a larger shape of their own are left to a GPU
HOSTED_ELEMENTS = 1 << 17  # the same where every thread of a kernel is executed on the CPU
HOSTED_CALLS = 20  # instead of 1,000
SHARE_OF_TIME = 0.85  # of the child's time: what is not begun by then is skipped, and said


@dataclass
class Options:
    """device facts and limits of one run."""

    strict: bool  # bit-identical contracts are held to the reference's bits (CUDA only: the CPU's order is another)
    max_elements: int  # 0: no limit
    calls: int = 1000
    ends_at: float = math.inf  # by time.monotonic, after which no case is begun
    hosted: bool = False  # kernels are executed on the CPU: native is then the model of CUDA's order


def judge(payload: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """The stress record of one candidate (the stage contract's payload): counts, and a row a case."""
    return _one("stress", payload, progress)


def judge_oracle(payload: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """The oracle record of one candidate: {case: errors of the reference and of the candidate}."""
    return _one("oracle", {**payload, "oracle_only": True}, progress)


def _one(section: str, payload: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    found = judge_many({**payload, "candidates": [payload]}, progress)
    for stem, message in found["failed"].items():
        raise JudgeFailure(Status(found["statuses"][stem]), message)
    record: dict[str, Any] = found[section][payload["stem"]]
    rows = found["stress"][payload["stem"]]
    if why := no_verdict(section, [*rows["cases"], *rows.get("secret", ())]):
        raise JudgeFailure(ended_without(why), why, record)
    return record


def judge_many(payload: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Judge several entrants case by case: {"stress": {stem: record}, "oracle": {stem: {case: record}}, "failed": ...}.

    payload: task, precision, kernelbench, device as in the stage contract; candidates: a list of entrant payloads;
    and optional: size (of the task), only (patterns of case names), oracle_only (just the cases of the error table),
    full (no limit on elements on the CPU), done ({stem: [case names]} that need no second run), secret_seed (of the
    secret cases; by default drawn here; null: none).
    host_executor: run the kernels of CUDA candidates on the CPU (eval/host_executor), on fewer and smaller cases.
    "failed" holds {stem: message} of the files that give no ModelNew. A candidate that leaves the CUDA context unusable
    ends the run as CRASHED; its row and all before it have been sent by then.
    Every finished row is sent at once as progress({"stage": "row", "candidate": stem, "row": row, ...}).
    """
    device = torch.device(payload["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        raise JudgeFailure(Status.NOT_RUN, "no CUDA device here; use --device cpu for small shapes")
    task = task_from_payload(payload)
    full = bool(payload.get("full"))
    cases = suite(task_cases(task))
    if payload.get("oracle_only"):
        cases = [case for case in cases if case.oracle]
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    modules_of(task)  # a reference program that does not run leaves nothing to judge, and no candidate to blame
    asked = applicable(shop := Workshop(task, device), cases)
    cases = select(asked.cases, payload.get("only") or ())
    seed = secret_seed(payload)
    posed = [] if seed is None else secret_asked(shop, seed, oracle_only=bool(payload.get("oracle_only")))
    secret = select(posed, payload.get("only") or ())
    entrants, failed = _load([{**payload, **each} for each in payload["candidates"]], task, device)
    hosted = bool(payload.get("host_executor")) and any(who.hosted for who in entrants)
    limit = 0 if device.type == "cuda" or full else HOSTED_ELEMENTS if hosted else CPU_ELEMENTS
    options = Options(
        strict=device.type == "cuda",
        max_elements=int(payload.get("max_elements", limit)),
        calls=int(payload.get("calls", HOSTED_CALLS if hosted else 1000)),
        ends_at=time.monotonic() + SHARE_OF_TIME * float(payload.get("timeout_s") or math.inf) * len(entrants),
        hosted=hosted,
    )
    declared = {str(each.get("stem")): each.get("declaration") or {} for each in payload["candidates"]}
    started = time.monotonic()
    base = _reset_peak(device)
    rows: dict[str, list[Row]] = {who.stem: [] for who in entrants}

    def emit(who: Entrant, row: Row, index: int) -> None:
        rows[who.stem].append(row)
        event = {"stage": "row", "index": index, "of": len(cases) + len(secret), "case": row["name"]}
        progress({**event, "candidate": who.stem, "row": row})

    done = {stem: set(names) for stem, names in (payload.get("done") or {}).items()}
    try:
        parts = [cases, secret]
        secrets.SystemRandom().shuffle(parts)  # when they are asked is no sign of them
        for part in parts:
            run_cases(task, device, entrants, part, options, done, emit, progress)
        unset = [who for who in entrants if who.found.parameters == ""]
        if unset:
            others = secret if payload.get("oracle_only") else [*asked.cases, *secret]
            more = select(without_parameters(others), payload.get("only") or ())
            run_cases(task, device, unset, more, options, done, emit, progress)
    except Broken as error:
        raise JudgeFailure(Status.CRASHED, str(error)) from error
    finally:
        for who in entrants:
            if who.confined is not None:
                who.confined.close()
    facts = {
        "device": device.type,
        "precision": task.precision,
        "shapes": "full" if task.size == OFFICIAL_SIZE else task.size,
        "seconds": round(time.monotonic() - started, 3),
        "shared_by": len(entrants),
        "complete": task.size == OFFICIAL_SIZE and not payload.get("only") and not payload.get("oracle_only"),
        **(
            {"host_executor": True, "native": "eval/operators/layer_norm/order.py, the model of CUDA's order"}
            if hosted
            else {}
        ),
    }
    judge_peak = torch.cuda.max_memory_allocated(device) - base if device.type == "cuda" else None
    confined = {
        who.stem: {**who.confined.record(), **who.found.record(), **peaks(who, judge_peak)}
        for who in entrants
        if who.confined
    }
    if judge_peak is not None:
        facts["peak_extra_bytes"] = judge_peak  # of the judge alone, for a baseline; others have theirs in `confined`
    if asked.left_out:
        facts["left_out"] = dict(asked.left_out)
    return {
        "stress": {
            stem: stress_record(each, {**facts, **confined.get(stem, {})}, declared.get(stem))
            for stem, each in rows.items()
        },
        "oracle": {stem: oracle_record(each) for stem, each in rows.items()},
        "failed": {stem: message for stem, (_, message) in failed.items()},
        "statuses": {stem: status for stem, (status, _) in failed.items()},
        "confined": confined,
        "facts": facts,
    }


def _load(
    payloads: Sequence[Mapping[str, Any]], task: Task, device: torch.device
) -> tuple[list[Entrant], dict[str, tuple[str, str]]]:
    """The entrants, each candidate in its own process, and {stem: (status, message)} of those that did not load."""
    entrants, failed = [], {}
    for each in payloads:
        stem = str(each.get("stem", each.get("baseline", "?")))
        try:
            entrants.append(entrant(each, task, device))
        except CandidateError as error:
            failed[stem] = (str(Status.COMPILE_ERROR), error.message)
        except RemoteError as error:
            failed[stem] = (str(error.status), error.message)
    return entrants, failed


def error_table(task: Task, device: torch.device, entrants: Sequence[Entrant]) -> dict[str, dict[str, Any]]:
    """{stem: {case: record}} over the cases of the error table, in this process; for callables of one's own."""
    cases = [case for case in suite(task_cases(task)) if case.oracle]
    rows: dict[str, list[Row]] = {who.stem: [] for who in entrants}
    options = Options(strict=False, max_elements=0 if device.type == "cuda" else CPU_ELEMENTS)
    run_cases(task, device, entrants, cases, options, {}, lambda who, row, _: rows[who.stem].append(row))
    return {stem: oracle_record(each) for stem, each in rows.items()}


def _reset_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def run_cases(
    task: Task,
    device: torch.device,
    entrants: Sequence[Entrant],
    cases: Sequence[Case],
    options: Options,
    done: Mapping[str, set[str]],
    emit: Callable[[Entrant, Row, int], None],
    progress: Progress = lambda event: None,
) -> None:
    """Run every case for every entrant that has not done it; `emit(entrant, row, index)` gets each row."""
    shop = Workshop(task, device, cuda_order=options.hosted)
    numbered = [(index, case) for index, case in enumerate(cases)]
    for _, group in itertools.groupby(numbered, key=lambda each: (each[1].shape, each[1].parameters, each[1].eps)):
        models: dict[tuple[str, str], Any] = {}  # one instance a parameter setting, as long as the group lasts
        for index, case in group:
            pending = [who for who in entrants if case.name not in done.get(who.stem, ())]
            if not pending:
                continue
            try:
                late = time.monotonic() > options.ends_at
                question = NO_TIME if late else ask(shop, case, options.max_elements)
            except Broken as error:
                for who in pending:
                    emit(who, row_of(case, SKIPPED, f"{REFERENCE_REFUSES}: {error}"), index)
                raise
            for who in pending:
                event = {"stage": "case", "index": index, "of": len(cases), "case": case.name}
                progress({**event, "candidate": who.stem, "seed": case.input.seed})
                if isinstance(question, str):
                    emit(who, row_of(case, SKIPPED, question), index)
                    continue
                emit(who, _judge_case(shop, who, question, models, options), index)
            del question
        _drop(models)
        if device.type == "cuda":
            gc.collect()  # models in reference cycles would hold GPU memory


def _drop(models: dict[tuple[str, str], Any]) -> None:
    """Let the instances go, those in workers too; one whose worker is gone is gone with it."""
    for each in models.values():
        if isinstance(each, Instance):
            with contextlib.suppress(RemoteError):
                each.remote.drop()
    models.clear()


# ---- one entrant on one case ----


def _judge_case(
    shop: Workshop, who: Entrant, question: Question, models: dict[tuple[str, str], Any], options: Options
) -> Row:
    """The row of one entrant, the inputs being again what the reference got afterwards. Raises Broken."""
    pristine = [each.clone() if isinstance(each, torch.Tensor) else each for each in question.inputs]
    row = _attempt(shop, who, question, models, pristine, options)
    for held, kept in zip(question.inputs, pristine, strict=True):
        if isinstance(held, torch.Tensor) and not same_bits(held, kept, any_nan=False):
            held.copy_(kept)
    return row


def _attempt(
    shop: Workshop,
    who: Entrant,
    question: Question,
    models: dict[tuple[str, str], Any],
    pristine: list[Any],
    options: Options,
) -> Row:
    """Build, run and judge; an exception of the candidate is a row too."""
    case = question.case
    own = case.layout if case.layout == "misaligned_parameters" else ""
    own = "graph_mutation" if case.check == "graph_mutation" else own  # its parameters are bound before its first call
    key = (who.stem, own)
    try:
        if key not in models:
            models[key] = shop.build(who, question.reference, case)
        given = list(question.inputs)
        if (lead := first_tensor(given)) is not None:
            given[lead] = lay_out(given[lead], case.layout)
        output = checks.run(models[key], given)
        return _judge_output(shop, who, question, models, key, given, pristine, output, options)
    except NotApplicable as why:
        return row_of(case, SKIPPED, str(why))
    except PredicateError as error:
        return row_of(case, FAIL, str(error))
    except Lost as why:
        return row_of(case, FAIL, f"lost: {why}")
    except WorkerFailure as error:
        assert who.confined is not None
        who.confined.failed(error)
        for gone in [each for each in models if each[0] == who.stem]:
            del models[gone]
        return row_of(case, FAIL, f"{str(error.status).lower().replace('_', ' ')}: {error.message}")
    except CandidateRaised as error:
        if shop.device.type == "cpu" and asks_for_a_gpu(error.message):
            return row_of(case, SKIPPED, f"{NEEDS_GPU} ({_brief(error)[:200]})")
        refusal = isinstance(error, CandidateRefused) and error.type_name != "ValueProblem"
        if not refusal:
            models.pop(key, None)
            word = "out of memory" if error.status == Status.OUT_OF_MEMORY else "raised"
            return row_of(case, FAIL, f"{word}: {_brief(error)}")
        if case.may_refuse and error.text.strip():
            return row_of(case, REFUSED, f"ValueError: {error.text}")
        what = "refused a case that it must answer" if error.text.strip() else "ValueError without a word"
        return row_of(case, FAIL, f"{what}: ValueError: {error.text}")
    except ValueError as error:
        if case.may_refuse and str(error).strip():
            return row_of(case, REFUSED, f"ValueError: {error}")
        what = "refused a case that it must answer" if str(error).strip() else "ValueError without a word"
        return row_of(case, FAIL, f"{what}: ValueError: {error}")
    except Exception as error:
        models.pop(key, None)
        still_usable(shop.device, error)
        word = "out of memory" if is_out_of_memory(error) else "raised"
        return row_of(case, FAIL, f"{word}: {_short(error)}")


def _brief(error: CandidateRaised) -> str:
    """The first line of an exception and the first errors of a compiler's log, on one line."""
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    return " | ".join(lines[:1] + [line for line in lines[1:] if "error:" in line][:2])[:400]


def _judge_output(
    shop: Workshop,
    who: Entrant,
    question: Question,
    models: dict[tuple[str, str], Any],
    key: tuple[str, str],
    given: list[Any],
    pristine: list[Any],
    output: Any,
    options: Options,
) -> Row:
    case = question.case
    if not isinstance(output, torch.Tensor):
        return row_of(case, FAIL, f"returned {type(output).__name__}, not a tensor as the reference does")
    comparison = compare(question.expected, output)
    error = error_of(question.truth, output) if question.truth is not None else None
    comparable = options.strict or (who.hosted and is_modelled(question.reference))
    strict = comparable and who.contract == "bit-identical"
    class_, reason = classify(
        question, output, comparison, error, strict=strict, accurate=who.accurate, undeclared=not who.contract
    )
    facts: Row = {"native": comparison.to_json(), **oracle_facts(question, error)}
    if why := exact_problem(question.expected, output):
        return row_of(case, FAIL, why, **facts)
    told = models[key].mutated if isinstance(models[key], Instance) else ()
    if told:
        return row_of(case, FAIL, f"changed its input {told[0]}", **facts)
    lead = first_tensor(given)
    for index, (held, kept) in enumerate(zip(given, pristine, strict=True)):
        original = values_of(kept, case.layout) if index == lead else kept
        if isinstance(held, torch.Tensor) and not same_bits(held.contiguous(), original, any_nan=False):
            return row_of(case, FAIL, f"changed its input {index}", **facts)
    slack = 0.0 if comparison.allclose else spread_of(question.expected, output)[0]
    scene = checks.Scene(
        question.reference, models[key], given, question.expected, output, strict, options.calls, slack
    )
    if class_ in (PASS, NEARER) or (class_ == APART and case.check != "compare"):
        problem = _further(shop, scene, question, facts)
        if scene.spoiled:
            models.pop(key, None)
        if problem:
            class_, reason = FAIL, problem
    return row_of(case, class_, reason, **facts)


def _further(shop: Workshop, scene: checks.Scene, question: Question, facts: Row) -> str | None:
    """What a right output alone does not show."""
    case = question.case
    if case.check != "compare":
        if case.check == "after_1000_calls":
            facts["calls"] = scene.calls
        return checks.CHECKS[case.check](scene)
    if case.expect == "beta":
        return checks.exactly_constant(shop.operator, scene)
    if question.clean is not None:
        row, _ = special_place(case.input, scene.expected.shape[0] if scene.expected.dim() else 1, 1)
        problem, facts["other_rows_asked"] = checks.others_keep_their_bits(scene, *question.clean, row)
        return problem
    return checks.device_still_works(scene) if not scene.output.numel() else None
