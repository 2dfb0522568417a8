"""The bit-identity verdict: a candidate against the native operator on the same device, case by case.

`judge` runs in a child process with the payload of `kbsub eval`. It owns inputs, parameters, reference and comparison
and executes no line of the candidate, which lives in a process of its own (subject.py). The cases are the operator's
(operators/identity.py); a task whose operator knows none is compared with its own Model (generic.py). Output and, where
the candidate has them, statistics are judged. Any NaN equals any NaN; payload differences are counted apart. Nothing
here is an official verdict.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kbsub.adapters.candidate import cuda_source_of
from kbsub.adapters.refusal import modules_of, reference_asked
from kbsub.adapters.task import Modules, Task, task_from_payload
from kbsub.eval.operators.compare.bitwise import judge_pair, repeated_hashes
from kbsub.eval.operators.compare.oracle import OracleError
from kbsub.eval.operators.identity import FULL_SIZE, SECRET, SECRET_INPUTS, IdentitySuite, Outputs, Question, Setting
from kbsub.eval.operators.register import operator_of
from kbsub.eval.process.cell import Cell, candidate_folder
from kbsub.eval.process.isolated import JudgeFailure, Status, is_out_of_memory
from kbsub.eval.remote.model import CandidateRefused, RemoteError, Worker
from kbsub.eval.tasks.secret import secret_seed
from kbsub.eval.tasks.toml_file import TaskFolderError
from kbsub.eval.verdicts.identity.bench import Bench
from kbsub.eval.verdicts.identity.declared import contradictions_of
from kbsub.eval.verdicts.identity.generic import SEEDS, Refused, run_generic
from kbsub.eval.verdicts.identity.registration import OF_ORDER
from kbsub.eval.verdicts.identity.subject import Subject, WrongForm

Progress = Callable[[dict[str, Any]], None]
NAN_RULE = "any NaN equals any NaN; payload differences are counted apart"
REPEATS = {"cuda": 200, "cpu": 5}
HOSTED_LIMITS = "H200_LIMITS"  # the device that the host executor stands for
SHARE_OF_TIME = 0.9  # of the judge's own limit, for the candidate: what is left tells of a hang and ends the cell


def verdict(expected: Outputs, got: Outputs, tolerance: float) -> dict[str, Any]:
    """The record of one case: the output's own findings, and the statistics under "tensors" where they exist."""
    found = {name: judge_pair(value, got[name], tolerance) for name, value in expected.items()}
    record = found.pop("output")
    if found:
        record["tensors"] = found
        record["output_identical"] = record["identical"]
        record["identical"] = record["identical"] and all(each["identical"] for each in found.values())
    return record


def wrong_form(why: WrongForm) -> dict[str, Any]:
    return {"identical": False, "allclose": False, "reason": str(why)}


def run_case(bench: Bench, question: Question) -> dict[str, Any]:
    """Reference first, then the candidate on the same input. A ValueError is a refusal; other errors end the run."""
    if reason := bench.subject.refusal(question):
        return {**question.label, "skipped": reason}
    try:
        expected = bench.subject.expected(question)
    except ValueError as error:
        return {**question.label, "skipped": f"the reference has no answer: {error}"}
    try:
        got = bench.subject.run(question.inputs)
    except CandidateRefused as error:
        return {**question.label, "identical": False, "refused": error.text}
    except WrongForm as why:
        return {**question.label, **wrong_form(why)}
    return {**question.label, **verdict(expected, got, bench.tolerance)}


def run_suite(bench: Bench, suite: IdentitySuite) -> Iterator[dict[str, Any]]:
    """For each case, in the order in which the random numbers are drawn, first its label, then its record."""
    for question in suite.questions(bench.setting):
        yield question.label
        yield run_case(bench, question)


def run_secret(bench: Bench, suite: IdentitySuite) -> Iterator[dict[str, Any]]:
    """Likewise for the cases of the secret seed."""
    for question in suite.secret(bench.setting, bench.secret_seed) if bench.secret_seed is not None else ():
        yield question.label
        yield run_case(bench, question)


def _timed(bench: Bench, suite: IdentitySuite, *, bind: bool) -> Question:
    """The timed input of upstream, its instance set up: with random parameters where they can be set."""
    question = suite.timed(bench.setting, with_state=True)
    bench.subject.build(question.init_inputs)
    if not bench.subject.has_state(question):
        question = suite.timed(bench.setting, with_state=False)
    if reason := bench.subject.refusal(question, bind=bind):
        raise JudgeFailure(Status.NOT_RUN, reason)
    return question


def repeated_runs(bench: Bench, suite: IdentitySuite, runs: int) -> dict[str, Any]:
    """`runs` calls on one input: how many distinct results. Freed memory is poisoned before each."""
    question = _timed(bench, suite, bind=False)

    def once() -> tuple[torch.Tensor, ...]:
        bench.subject.hurry()
        return tuple(bench.subject.run(question.inputs).values())

    return repeated_hashes(once, runs)


def mutation_case(bench: Bench, suite: IdentitySuite) -> dict[str, Any]:
    """Capture, change input and parameters in place, replay, compare with a fresh reference.

    Input and parameters lie in memory of the judge's, which the candidate's process was given. Without CUDA there are
    no graphs: the candidate is called before and after the change, at the same addresses.
    """
    subject = bench.subject
    question = _timed(bench, suite, bind=True)
    captured = bench.setting.device.type == "cuda"
    label = {  # its own name and group: it is none of the full-size cases, whose label the timed question may have
        **question.label,
        "name": "graph mutation" if captured else "mutation in place (no graph on a CPU)",
        "group": "graph mutation",
    }
    subject.capture(question.inputs)
    label["change"] = suite.change(bench.setting, question)
    if reason := subject.refusal(question, bind=True):  # the changed parameters, at the same addresses
        raise JudgeFailure(Status.NOT_RUN, reason)
    expected = subject.expected(question)
    try:
        got = subject.replay(question.inputs)
    except WrongForm as why:
        return {**label, **wrong_form(why)}
    return {**label, **verdict(expected, got, bench.tolerance)}


def setting_of(payload: dict[str, Any], task: Task) -> Setting:
    """Where and how the cases are run; JudgeFailure NOT_RUN where the candidate's bits mean nothing here."""
    device = torch.device(payload["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        raise JudgeFailure(Status.NOT_RUN, "bit identity needs an NVIDIA GPU; torch sees none")
    needs = cuda_source_of(payload["candidate_source"])
    hosted = device.type == "cpu" and needs == "CUDA_SOURCE" and bool(payload.get("host_executor"))
    if device.type == "cpu" and needs and not hosted:
        raise JudgeFailure(
            Status.NOT_RUN,
            f"{needs}: its reference is the native operator on CUDA, whose order the CPU's does not share; run this "
            "on a machine with an NVIDIA GPU, or against a model of that order with --device cpu (the host executor)",
        )
    declaration = payload.get("declaration") or {}
    if task.precision not in declaration.get("precision", (task.precision,)):
        raise JudgeFailure(Status.NOT_RUN, f"declared for {', '.join(declaration['precision'])}, not {task.precision}")
    if device.type == "cuda":
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device.index)
        device = torch.device("cuda", torch.cuda.current_device())
    full = device.type == "cuda" or bool(payload.get("full"))
    return Setting(device, task.dtype, declaration.get("contract", "undeclared"), full, hosted)


def suite_of(task: Task, modules: Modules) -> IdentitySuite | None:
    """The operator's cases; JudgeFailure NOT_RUN where the task is not what it declares, or has itself no answer."""
    try:
        operator = operator_of(task)
        with reference_asked(Refused):
            try:
                return operator.identity(modules)
            except OracleError as why:
                raise Refused(str(why)) from why
    except (Refused, TaskFolderError) as why:
        raise JudgeFailure(Status.NOT_RUN, str(why)) from why


def start_worker(payload: dict[str, Any], task: Task, setting: Setting, timeout_s: float) -> Worker:
    """The candidate in a cell of its own. RemoteError: it does not load, or no process could be started."""
    host: dict[str, Any] = {}
    if setting.hosted:
        from kbsub.eval.host_executor.build import cache_folder, require_host

        require_host()
        host = {"hosted": HOSTED_LIMITS, "host_cache": str(cache_folder())}
    source = payload["candidate_source"]
    cell = Cell(candidate_folder(hashlib.sha256(source.encode("utf-8")).hexdigest()))
    return Worker.start(source, task, cell=cell, device=setting.device, timeout_s=timeout_s, **host)


def judge(payload: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The `bit_identity` part of a result, plus `repeated_runs`; on CUDA `contradictions` too.

    Optional payload keys: "repeats" (calls that must give one hash), "full" (declared shapes on a CPU), "secret_seed"
    (of the secret cases; by default drawn here, and never told the candidate's process). Raises
    JudgeFailure, with the cases judged until then: NOT_RUN, COMPILE_ERROR, RUNTIME_ERROR, OUT_OF_MEMORY, and TIMEOUT
    or CRASHED for a candidate's process that hangs, dies or talks nonsense.
    """
    started = time.monotonic()
    task = task_from_payload(payload)
    setting = setting_of(payload, task)
    modules = modules_of(task)
    with torch.no_grad():
        suite = suite_of(task, modules)
    limit = SHARE_OF_TIME * float(payload.get("timeout_s") or 300.0)
    with start_worker(payload, task, setting, limit) as worker:
        seed = secret_seed(payload)
        bench = Bench(task, modules, Subject(worker, suite, started + limit), suite, setting, seed)
        return _judge(bench, payload, progress)


def _judge(bench: Bench, payload: dict[str, Any], progress: Progress) -> dict[str, Any]:
    suite = bench.suite
    # Two more of a suite: repeated runs and the change in place. And the secret cases.
    total = suite.count(bench.setting) + 2 + 1 + len(SECRET_INPUTS) if suite else len(SEEDS) + 1
    extra: dict[str, Any] = {}
    at: dict[str, Any] = {}

    def announce(label: dict[str, Any]) -> None:
        at.update(label)
        bench.subject.hurry()
        begun = len(bench.cases) + len(bench.secret) + 1
        progress({"stage": "case", "index": begun, "of": total, "case": label["name"]})

    def take(records: Iterator[dict[str, Any]]) -> None:
        for label in records:
            announce(label)
            record = next(records)
            (bench.secret if record["group"] == SECRET else bench.cases).append(record)

    def found() -> dict[str, Any]:
        return summary(bench) | extra

    try:
        with torch.no_grad():
            if suite is None:
                take(run_generic(bench))
            else:
                parts = [run_suite, run_secret]
                secrets.SystemRandom().shuffle(parts)  # when they are asked is no sign of them
                for part in parts:
                    take(part(bench, suite))
                announce({"name": "repeated runs"})
                repeats = payload.get("repeats", REPEATS[bench.setting.device.type])
                extra["repeated_runs"] = repeated_runs(bench, suite, repeats)
                announce({"name": "graph mutation"})
                bench.cases.append(mutation_case(bench, suite))
    except RemoteError as error:
        raise JudgeFailure(error.status, f"{at.get('name', 'start')}: {error.message}", found()) from error
    except JudgeFailure as error:
        raise JudgeFailure(error.status, error.message, found()) from error
    except Refused as refusal:
        raise JudgeFailure(Status.NOT_CHECKED, str(refusal), found()) from refusal
    except Exception as error:
        status = Status.OUT_OF_MEMORY if is_out_of_memory(error) else Status.RUNTIME_ERROR
        where = at.get("name", "start")
        raise JudgeFailure(status, f"{where}: {type(error).__name__}: {error}", found()) from error
    result = found()
    if suite is None and (why := bench.cases[0].get("skipped")):  # the task as it is: nothing else is worth a verdict
        raise JudgeFailure(Status.NOT_CHECKED, f"{bench.cases[0]['name']}: {why}", result)
    expect = (payload.get("declaration") or {}).get("expect")
    if expect and suite and bench.setting.device.type == "cuda":  # declarations speak of native on CUDA
        result["contradictions"] = contradictions_of(expect, result)
    return result


def summary(bench: Bench) -> dict[str, Any]:
    """The counts over the cases: a refused case is in the total and not identical, a skipped one is not in it."""
    judged = [case for case in bench.cases if "skipped" not in case]
    full_size = [case for case in judged if case["group"] == FULL_SIZE]
    device = bench.setting.device.type
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
        "reference": f"{OF_ORDER} (host executor)" if bench.setting.hosted else f"native on {device}",
        "device": device,
        "confined": bench.subject.worker.confined(),
        "official": False,
        **({"parameters_set": bench.subject.parameters_set} if bench.suite is not None else {}),
        "cases": bench.cases,
        **({"secret": bench.secret} if bench.secret else {}),
    }
