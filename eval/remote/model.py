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
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

import torch

from kbsub.adapters.task import SEED, Task
from kbsub.eval.process.cell import Cell, CellProcess
from kbsub.eval.process.frames import Channel, FrameError, check, printable
from kbsub.eval.process.isolated import Status
from kbsub.eval.remote.failures import CandidateRaised as CandidateRaised
from kbsub.eval.remote.failures import CandidateRefused as CandidateRefused
from kbsub.eval.remote.failures import RemoteError as RemoteError
from kbsub.eval.remote.failures import WorkerFailure as WorkerFailure
from kbsub.eval.remote.failures import how_it_ended, raised
from kbsub.eval.remote.probes import Poison
from kbsub.eval.remote.reading import FACTS_FORM, OutputReader, StateForm, TensorFacts, state_forms
from kbsub.eval.remote.sending import Blocks

_ERROR_FORM = {"error": {"kind": str, "type": str, "text": str}}
TOLD_FORM = {
    "value": dict,
    "tensors": [FACTS_FORM],
    "block": {"number": int, "fresh": bool},
}
# As run_isolated starts the official verdict's process: a candidate sees the same.
WORKER_VARIABLES = {"PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}


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
        self, child: CellProcess, channel: Channel, cell: Cell, device: torch.device, timeout_s: float
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
            # How many threads add on a CPU decides the last bits: BatchNorm's on two are others than on one.
            "threads": torch.get_num_threads(),
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
        try:
            forms = state_forms(reply["state"])
        except ValueError as error:
            raise self.nonsense("construct", error) from error
        return RemoteModel(self, self._instances, forms)

    def confined(self) -> dict[str, Any]:
        """What the process was confined by before it began, as it stands in a record."""
        entered = self.child.entered()
        assert entered is not None  # or `start` had failed
        return entered.record()

    def peak_bytes(self, timeout_s: float | None = None) -> int:
        """By its own word, how much the process took at most beyond what it had before the candidate was loaded: on a
        GPU of torch's allocator, on a CPU of resident memory."""
        return max(0, int(self._ask("peak", {"answer": int}, timeout_s, {})["answer"]))

    @property
    def shared_bytes(self) -> int:
        """Bytes of the judge's memory that the worker sees."""
        return self._blocks.nbytes

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
            if self.child.entered(timeout_s) is None:
                self._kill()
                words = f"the cell cannot be entered, so nothing was run: {self.child.refusal}; see kbsub doctor"
                raise WorkerFailure(Status.NOT_RUN, printable(words))
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
            told, descriptors = self._blocks.put(block, value, again=op in ("replay", "read"))
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
            raise raised(reply["error"], op)
        return reply

    def _told(self, reply: dict[str, Any], op: str) -> tuple[Any, tuple[TensorFacts, ...]]:
        try:
            return self._reader.read(reply)
        except ValueError as error:
            raise self.nonsense(op, error) from error

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
            status, message = how_it_ended(self.child, message)
        self._kill()
        self._failure = WorkerFailure(status, f"{op}: {printable(message)}")
        return self._failure

    def _kill(self) -> None:
        self.cell.end(self.child)


class RemoteModel:
    """One instance of ModelNew in a worker. `state_forms`: of each tensor of its state dict, in its order."""

    def __init__(self, worker: Worker, number: int, state_forms: dict[str, StateForm]) -> None:
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
        poison: Poison | None = None,
        same: bool = False,
        touch: bool = False,
        keep: int | None = None,
        seed: int | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """The instance, or its `method`, on `inputs` (tensors on the worker's device; lists, tuples, numbers, None).

        The tensors are copied to memory that the worker sees, with their strides and their alignment, and compared
        with it afterwards: inputs of the same forms and alignment come at the same addresses. same: then as the same
        tensor objects, too, as those of the last call that said so. touch: whose version counters move. keep: a number
        under which `read` finds what was returned. seed: for torch.manual_seed, before. Raises RemoteError.
        """
        words: dict[str, Any] = {"method": method, "grad": grad, "poison": None if poison is None else poison.record()}
        words |= {"same": same, "touch": touch, "keep": keep, "seed": seed}
        return self._answer("call", words, list(inputs), "call", timeout_s)

    def read(self, keep: int, inputs: Sequence[Any], timeout_s: float | None = None) -> Reply:
        """What the call that said `keep` returned, as it is now, after `inputs` were put where the last call's lie.
        They have the forms of those. `seconds` and `mutated` mean nothing here."""
        return self._answer("read", {"keep": keep}, list(inputs), "call", timeout_s)

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
        return self._answer("on_stream", {"side": True, "poison": None}, list(inputs), "call", timeout_s)

    def on_current_stream(
        self, inputs: Sequence[Any], poison: Poison | None = None, timeout_s: float | None = None
    ) -> Reply:
        """Likewise on the current stream: a list of the output as it was read there at once, and as it was at last."""
        told = None if poison is None else poison.record()
        return self._answer("on_stream", {"side": False, "poison": told}, list(inputs), "call", timeout_s)

    def load_state(
        self, state: Mapping[str, torch.Tensor], *, bind: bool = False, timeout_s: float | None = None
    ) -> None:
        """model.load_state_dict(state); what `state` does not have stays. bind: its parameters become views of the
        judge's memory instead, with the strides and alignment that `state` has."""
        block = f"state {self.number}" if bind else "call"
        whole = set(state) == set(self.state_forms)
        self._ask("load_state", {}, timeout_s, dict(state), block=block, bind=bind, strict=whole)

    def bound_state_changed(self) -> bool:
        """Whether the memory of the state that was bound last differs from what was put there."""
        return bool(self.worker._blocks.changed(f"state {self.number}"))

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

    def floats(self, timeout_s: float | None = None) -> dict[str, float]:
        """Path -> value of every float attribute of the instance and its submodules ("ln.eps")."""
        told = self._ask("floats", {"answer": dict}, timeout_s)["answer"].items()
        return {path: value for path, value in told if isinstance(value, float)}

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
