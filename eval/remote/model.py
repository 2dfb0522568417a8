"""The judge's side of the transport: a Worker is one confined process with one candidate, a RemoteModel its instance.

    with Worker.start(source, task, cell=Cell(candidate_folder(sha256))) as worker:
        model = worker.construct(task.modules().get_init_inputs(), seed=42)
        model.load_state(reference.state_dict())
        y = model(x)                     # or model.call([x], grad=True): a Reply, with what is known of the call

No line of the candidate is executed here, and nothing it says is taken on trust. What goes wrong is a RemoteError, a
JudgeFailure with the row's status: CandidateRaised (CandidateRefused, a ValueError, is its refusal), or WorkerFailure
for a process that hangs, dies or talks nonsense, after which the worker is gone. Must not know what is judged.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

import torch

from kbsub.adapters.task import SEED, Task
from kbsub.eval.process.cell import Cell
from kbsub.eval.process.frames import Channel, FrameError, check, printable
from kbsub.eval.process.isolated import JudgeFailure, Status
from kbsub.eval.remote.reading import FACTS_FORM, OutputReader, TensorFacts
from kbsub.eval.remote.sending import Blocks

_ERROR_FORM = {"error": {"kind": str, "type": str, "text": str}}
TOLD_FORM = {
    "value": dict,
    "tensors": [FACTS_FORM],
    "block": {"number": int, "fresh": bool},
}
# As run_isolated starts the official verdict's process: a candidate sees the same.
WORKER_VARIABLES = {"PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}
_STATE_ENTRIES = 100_000
_END_S = 5.0


class RemoteError(JudgeFailure):
    """Something that went wrong on the candidate's side; `status` is the row's."""


class WorkerFailure(RemoteError):
    """The process hung, died or sent what is no reply. It has been ended."""


class CandidateRaised(RemoteError):
    """An exception of the candidate's, told by its process: `type_name` and `text` are printable and bounded."""

    def __init__(self, status: Status, type_name: str, text: str) -> None:
        super().__init__(status, f"{type_name}: {text}" if type_name else text)
        self.type_name, self.text = type_name, text


class CandidateRefused(CandidateRaised, ValueError):
    """The candidate raised ValueError: it refuses this input."""


@dataclass(frozen=True)
class Reply:
    """What one call gave: `value` in memory of our own, facts of each tensor in it, the indices of the inputs that
    differ in any bit from what was sent, and the seconds from request to reply by this side's clock."""

    value: Any
    tensors: tuple[TensorFacts, ...]
    mutated: tuple[int, ...]
    seconds: float


class Worker:
    """One candidate in one confined process. Made by `start`; end it with `close` or a with statement."""

    def __init__(
        self, child: subprocess.Popen[bytes], channel: Channel, cell: Cell, device: torch.device, timeout_s: float
    ) -> None:
        self.child, self.channel, self.cell = child, channel, cell
        self.device, self.timeout_s = device, timeout_s
        self._blocks, self._reader = Blocks(device), OutputReader(device)
        self._instances = 0
        self._start_words: dict[str, Any] = {}
        self._failure: WorkerFailure | None = None

    @classmethod
    def start(cls, candidate_source: str, task: Task, **options: Any) -> Worker:
        """`spawn` and `load` in one. Raises what they raise."""
        worker = cls.spawn(candidate_source, task, **options)
        worker.load()
        return worker

    @classmethod
    def spawn(
        cls,
        candidate_source: str,
        task: Task,
        *,
        cell: Cell,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        hosted: str | None = None,
        workers: int | None = None,
        build_dir: bool = False,
        host_cache: str | None = None,
        timeout_s: float = 300.0,
        output: int | None = None,
        like: Mapping[str, Any] | None = None,
    ) -> Worker:
        """Start a process in `cell`, in which `load` loads the candidate, in the dict of its own copy of `task`.

        dtype: what models are cast to (the task's). hosted: the name of Limits of the host executor ("H200_LIMITS",
        "SMALL_LIMITS") that executes its CUDA source on the CPU, with `workers` processes; host_cache: a folder with
        the executor's compiled runtime, copied into the cell. timeout_s: for this and, by default, for every request.
        output: the descriptor that the process prints on (default: this process's stderr). like: what the process is
        made to look like (remote/likeness.py; default: itself).
        """
        place = torch.device(device)
        if str(place) == "cuda":
            place = torch.device("cuda", torch.cuda.current_device())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-u", "-X", "faulthandler", "-m", "kbsub.eval.remote.worker", str(theirs.fileno())]
        command += [host_cache] if host_cache else []
        output = sys.__stderr__.fileno() if output is None and sys.__stderr__ is not None else output
        try:
            child = cell.popen(command, env=WORKER_VARIABLES, pass_fds=(theirs.fileno(),), stdout=output, stderr=output)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        worker = cls(child, Channel(ours), cell, place, timeout_s)
        worker._start_words = {
            "source": candidate_source,
            "task": asdict(replace(task, folder=None)),  # its source is all that is executed
            "device": str(place),
            "dtype": str(dtype or task.dtype).removeprefix("torch."),
            "hosted": hosted,
            "workers": workers,
            "build_dir": build_dir,
            "like": dict(like) if like is not None else None,
        }
        return worker

    def load(self) -> None:
        """Wait until the process is there, and have it load the candidate; a failure ends it.

        Raises CandidateRaised (COMPILE_ERROR: the file does not load), or WorkerFailure: NOT_RUN before a line of the
        candidate has run.
        """
        try:
            self._await_ready(self.timeout_s)
            self._ask("start", {}, self.timeout_s, self._start_words)
        except BaseException:
            self.close()
            raise

    def construct(
        self, init_inputs: Sequence[Any], seed: int | None = SEED, *, grad: bool = False, timeout_s: float | None = None
    ) -> RemoteModel:
        """ModelNew(*init_inputs) after torch.manual_seed(seed), moved to the device and dtype of the worker.

        Several instances may be alive; `RemoteModel.drop` ends one.
        """
        self._instances += 1
        words = {"instance": self._instances, "seed": seed, "grad": grad}
        reply = self._ask("construct", {"state": Any}, timeout_s, words, list(init_inputs))
        return RemoteModel(self, self._instances, self._forms(reply["state"]))

    def close(self) -> None:
        """End the process and everything in the cell, and free what was shared."""
        self.cell.end(self.child)
        self.channel.close()
        self._reader.close()
        self._blocks.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---- words ----

    def _await_ready(self, timeout_s: float) -> None:
        try:
            self.channel.receive({"ready": bool}, timeout_s)
        except FrameError as error:
            self._kill()
            status = error.status if error.status == Status.TIMEOUT else Status.NOT_RUN
            raise WorkerFailure(
                status,
                f"the candidate's process did not start (exit code {self.child.returncode}): {error.message}; "
                "its own words are in the log",
            ) from error

    def _ask(
        self,
        op: str,
        form: dict[str, Any],
        timeout_s: float | None,
        words: Mapping[str, Any],
        value: Any = None,
        block: str = "call",
        descriptors: Sequence[int] = (),
        sent: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """One request and its reply, checked; with `tensors` in it, they are read in `_told`. Raises RemoteError.

        sent: called once the request is under way."""
        if self._failure is not None:
            raise self._failure
        limit = self.timeout_s if timeout_s is None else timeout_s
        request: dict[str, Any] = {"op": op, **words}
        if value is not None:
            told, descriptors = self._blocks.put(block, value, again=op == "replay")
            request |= told
        try:
            self.channel.send(request, limit, descriptors)
            sent()
            reply, rights = self.channel.receive(Any, limit)
            self._reader.take(rights if "value" in form else [], rights)
            if reply.get("error") is not None:
                check(reply, _ERROR_FORM)
            else:
                check(reply, {"error": None, **form})
        except FrameError as error:
            raise self._fail(error.status, error.message, op) from error
        except ValueError as error:
            raise self.nonsense(op, error) from error
        if reply.get("error") is not None:
            raise self._raised(reply["error"], op)
        return reply

    def _told(self, reply: dict[str, Any], op: str) -> tuple[Any, tuple[TensorFacts, ...]]:
        try:
            return self._reader.read(reply)
        except ValueError as error:
            raise self.nonsense(op, error) from error

    def _forms(self, told: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
        try:
            if not isinstance(told, dict) or len(told) > _STATE_ENTRIES:
                raise ValueError("the forms of a state dict are no object")
            for form in told.values():
                check(form, [(str, list)])
                check(form[1:], [[int]])
                if len(form) != 2 or not isinstance(form[0], str):
                    raise ValueError("the form of a state's tensor is not dtype and shape")
        except ValueError as error:
            raise self.nonsense("construct", error) from error
        return {key: (form[0], tuple(form[1])) for key, form in told.items()}

    def _raised(self, error: Mapping[str, str], op: str) -> CandidateRaised:
        name, text, kind = printable(error["type"], 80), printable(error["text"]), error["kind"]
        if kind == "value":
            return CandidateRefused(Status.RUNTIME_ERROR, name, text)
        if kind == "load" and op == "start":
            return CandidateRaised(Status.COMPILE_ERROR, "", text)
        if kind == "exit":
            return CandidateRaised(Status.CRASHED, name, f"the candidate called sys.exit({text})")
        return CandidateRaised(Status.OUT_OF_MEMORY if kind == "memory" else Status.RUNTIME_ERROR, name, text)

    def nonsense(self, op: str, why: object) -> WorkerFailure:
        """End the worker for a reply that does not hold; the failure to raise."""
        return self._fail(Status.CRASHED, f"a malformed reply: {why}", op)

    def _fail(self, status: Status, message: str, op: str) -> WorkerFailure:
        """End the worker; the failure that this and every later request raises."""
        if status == Status.TIMEOUT:
            with contextlib.suppress(OSError):
                self.child.send_signal(signal.SIGUSR1)  # its faulthandler writes down where it hangs
            time.sleep(0.3)
        elif "malformed" not in message:
            status, message = self._how_it_ended(message)
        self._kill()
        self._failure = WorkerFailure(status, f"{op}: {printable(message)}")
        return self._failure

    def _how_it_ended(self, message: str) -> tuple[Status, str]:
        try:
            code = self.child.wait(_END_S)
        except subprocess.TimeoutExpired:
            return Status.CRASHED, message
        if code == -signal.SIGKILL:
            return Status.OUT_OF_MEMORY, "killed by SIGKILL: the system's out-of-memory killer, most likely"
        if code < 0:
            with contextlib.suppress(ValueError):
                return Status.CRASHED, f"died of {signal.Signals(-code).name}"
            return Status.CRASHED, f"died of signal {-code}"
        return Status.CRASHED, f"the process ended with exit code {code}, before it had answered"

    def _kill(self) -> None:
        self.cell.end(self.child)


class RemoteModel:
    """One instance of ModelNew in a worker. `state_forms`: dtype and shape of each tensor of its state dict."""

    def __init__(self, worker: Worker, number: int, state_forms: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        self.worker, self.number, self.state_forms = worker, number, state_forms

    def __call__(self, *inputs: Any) -> Any:
        """What the instance returns for `inputs` under no_grad."""
        return self.call(inputs).value

    def call(
        self,
        inputs: Sequence[Any],
        *,
        method: str | None = None,
        grad: bool = False,
        poison: bool = False,
        timeout_s: float | None = None,
    ) -> Reply:
        """The instance, or its `method`, on `inputs` (tensors on the worker's device; lists, tuples, numbers, None).

        The tensors are copied to memory that the worker sees, with their strides and their alignment, and compared
        with it afterwards. poison: NaN is left in freed memory of their size before. Raises RemoteError.
        """
        words = {"method": method, "grad": grad, "poison": poison}
        return self._answer("call", words, list(inputs), "call", timeout_s)

    def capture(
        self, inputs: Sequence[Any], *, methods: Sequence[str | None] = (None,), timeout_s: float | None = None
    ) -> None:
        """Warm up on `inputs` and capture a CUDA graph; on a CPU, warm up. They get memory of their own.

        methods: called one after the other (None: the instance itself); `replay` gives the answer of the only one, or
        one list of what all of them return.
        """
        self._ask("capture", {}, timeout_s, list(inputs), block=f"captured {self.number}", methods=list(methods))

    def replay(self, inputs: Sequence[Any], timeout_s: float | None = None) -> Reply:
        """Put `inputs`, of the same forms, where the captured ones lie, and replay the graph (on a CPU: call)."""
        return self._answer("replay", {}, list(inputs), f"captured {self.number}", timeout_s)

    def repeat(self, inputs: Sequence[Any], calls: int, timeout_s: float | None = None) -> None:
        """Call the instance `calls` times on `inputs`, where those of the next `call` of the same forms will lie."""
        self._ask("repeat", {}, timeout_s, list(inputs), calls=calls)

    def on_side_stream(self, inputs: Sequence[Any], timeout_s: float | None = None) -> Reply:
        """Call on a stream of its own (CUDA), behind slow work that fills copies of `inputs`."""
        return self._answer("on_side_stream", {}, list(inputs), "call", timeout_s)

    def load_state(
        self, state: Mapping[str, torch.Tensor], *, bind: bool = False, timeout_s: float | None = None
    ) -> None:
        """model.load_state_dict(state). bind: its parameters become views of the judge's memory instead, with the
        strides and alignment that `state` has."""
        block = f"state {self.number}" if bind else "call"
        self._ask("load_state", {}, timeout_s, dict(state), block=block, bind=bind)

    def state(self, timeout_s: float | None = None) -> dict[str, torch.Tensor]:
        """Copies of the tensors of its state dict. Raises RemoteError, also when it is no dict of tensors."""
        reply = self._ask("state", TOLD_FORM, timeout_s)
        value, _ = self.worker._told(reply, "state")
        if not isinstance(value, dict) or not all(isinstance(each, torch.Tensor) for each in value.values()):
            raise CandidateRaised(Status.RUNTIME_ERROR, "", "the state dict has something that is no tensor")
        return value

    def set_attribute(self, path: str, value: Any, timeout_s: float | None = None) -> bool:
        """Set an attribute that exists, by its path ("ln.eps"); False where there is none."""
        reply = self._ask("set_attribute", {"answer": bool}, timeout_s, value, path=path)
        return bool(reply["answer"])

    def has(self, name: str, timeout_s: float | None = None) -> bool:
        """Whether the instance has an attribute, such as "forward_with_stats"."""
        return bool(self._ask("has", {"answer": bool}, timeout_s, name=name)["answer"])

    def drop(self) -> None:
        """Let the instance go, and its memory."""
        self._ask("drop", {}, None)

    def _ask(
        self,
        op: str,
        form: dict[str, Any],
        timeout_s: float | None,
        value: Any = None,
        block: str = "call",
        **words: Any,
    ) -> dict[str, Any]:
        return self.worker._ask(op, form, timeout_s, {"instance": self.number, **words}, value, block)

    def _answer(self, op: str, words: dict[str, Any], inputs: list[Any], block: str, timeout_s: float | None) -> Reply:
        started = time.monotonic()
        reply = self._ask(op, TOLD_FORM, timeout_s, inputs, block=block, **words)
        seconds = time.monotonic() - started
        value, facts = self.worker._told(reply, op)
        return Reply(value, facts, self.worker._blocks.changed(block), seconds)
