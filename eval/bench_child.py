"""The bench child: every candidate and baseline of one run in one process, interleaved, scene after scene.

A program that fails is dropped with its own status, and the others go on. What nobody in this process can survive (a
broken CUDA context, a hang, a crash) ends the child; eval/bench.py, the parent, then starts it again without the
culprit. Everything found out is sent at once, so that a later crash loses nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kbsub.adapters import environment
from kbsub.adapters.candidate import load_candidate
from kbsub.adapters.evaluator import import_upstream
from kbsub.adapters.isolation import JudgeFailure, Status, is_out_of_memory
from kbsub.adapters.task import task_from_payload
from kbsub.eval import baselines, floors, quality
from kbsub.eval.machine import CpuMachine, CudaMachine, machine_for
from kbsub.eval.ring import Ring, RingProgram
from kbsub.eval.scene import BenchScene
from kbsub.eval.timing import (
    COLD_CPU_REHEARSAL,
    COLD_REPLAY,
    CPU_REHEARSAL,
    GRAPH_REPLAY,
    REPLAYS,
    Dropped,
    Series,
    TimingProtocol,
    replay_rounds,
    replay_statistics,
    upstream_rounds,
    upstream_statistics,
)

Progress = Callable[[dict[str, Any]], None]
RING_WARMUPS = 2  # of the whole ring
BUILD_SHARE = 0.5  # of the budget; later compile baselines are skipped rather than eat the time of the rounds


class ContextLost(RuntimeError):
    """The device no longer answers: only a new process helps."""


@dataclass
class Program:
    """One program under the clock. `before`: its parameters as they were, to see whether timing changed them."""

    call: Callable[..., Any]
    model: torch.nn.Module
    own_graphs: bool = False
    before: dict[str, torch.Tensor] = field(default_factory=dict)


class TimerWatch:
    """Remembers the timing functions before any candidate is loaded, and puts them back when one replaced them."""

    NAMES = ("synchronize", "Event", "Stream", "current_stream", "empty_cache")

    def __init__(self) -> None:
        self.cuda = {name: getattr(torch.cuda, name) for name in self.NAMES}
        self.elapsed = torch.cuda.Event.elapsed_time
        self.clock = time.perf_counter

    def replaced(self) -> str | None:
        """The first function that is no longer the original, now mended; or None."""
        found = None
        for name, function in self.cuda.items():
            if getattr(torch.cuda, name) is not function:
                setattr(torch.cuda, name, function)
                found = found or f"torch.cuda.{name}"
        if torch.cuda.Event.elapsed_time is not self.elapsed:
            torch.cuda.Event.elapsed_time = self.elapsed  # type: ignore[method-assign]
            found = found or "torch.cuda.Event.elapsed_time"
        if time.perf_counter is not self.clock:
            time.perf_counter = self.clock
            found = found or "time.perf_counter"
        return found


def run(payload: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Time every scene of the payload (made by eval/bench.py); everything found out goes through `progress`.

    Payload: device, task, kernelbench, methods, protocol, budget_s, floors {chain: {...}|None}|None, sources {name:
    text}, scenes [{key, precision, shape|None, candidates [...], baselines [...], rounds|None}].
    """
    return BenchRun(payload, progress).run()


class BenchRun:
    """One process's worth of benchmarking."""

    def __init__(self, payload: dict[str, Any], progress: Progress) -> None:
        self.payload, self.progress = payload, progress
        self.started = time.monotonic()
        self.machine: CudaMachine | CpuMachine = machine_for(payload["device"])
        self.watch = TimerWatch()
        self.stand_ins: tuple[str, ...] = ()
        self.functions: dict[str, Any] = {}
        self.get_stats: Any = None
        self.upstream_reason = self._import_upstream()
        self.budget_s = float(payload["budget_s"])

    def _import_upstream(self) -> str:
        """Get upstream's timing functions from the checkout; why there are none, or "" when there are."""
        wanted = [method for method in self.payload["methods"] if method not in REPLAYS]
        if not wanted:
            return "not asked for"
        if not self.machine.graphs:
            return "upstream's methods need CUDA"
        if not self.payload.get("kernelbench"):
            return "upstream's methods need the checkout: kbsub fetch"
        upstream = import_upstream(Path(self.payload["kernelbench"]))
        timing = upstream.module.timing
        self.functions = {method: timing.get_timing_function(method) for method in wanted}
        self.get_stats, self.stand_ins = timing.get_timing_stats, upstream.stand_ins
        return ""

    def used(self) -> float:
        """The share of the time budget that is gone."""
        return (time.monotonic() - self.started) / self.budget_s

    def run(self) -> dict[str, Any]:
        done = []
        self._emit({"kind": "environment", "environment": environment.facts(self.payload["device"], self.stand_ins)})
        with torch.no_grad():
            if self.payload.get("floors") is not None:
                self._floors(self.payload["floors"])
            for spec in self.payload["scenes"]:
                if self.used() >= 1.0:
                    self._emit({"kind": "skipped", "scene": _scene_id(spec), "reason": _budget_words(self.budget_s)})
                    continue
                try:
                    SceneRun(self, spec).run()
                    done.append(_scene_id(spec))
                except ContextLost:
                    raise
                except Exception as error:  # the scene itself (its inputs, its reference); the other scenes go on
                    self.machine.synchronize()
                    reason = f"the scene cannot be set up: {type(error).__name__}: {str(error)[:600]}"
                    self._emit({"kind": "skipped", "scene": _scene_id(spec), "reason": reason})
                self._release()
        return {"scenes": done, "seconds": time.monotonic() - self.started}

    def _emit(self, event: dict[str, Any]) -> None:
        self.progress({"stage": event["kind"], "case": event.get("scene", ""), "bench": event})

    def _floors(self, wanted: Mapping[str, Any]) -> None:
        self.progress({"stage": "floors"})
        if not isinstance(self.machine, CudaMachine):
            return
        found: dict[str, float] = {"copy_gb_s": floors.copy_bandwidth(self.machine.device)}
        self._emit({"kind": "floors", "floors": found})
        chain = wanted.get("chain")
        if chain is not None:
            try:
                found.update(floors.chain_floor(self.machine.device.index, chain["chains"], chain["updates"]))
            except Exception as error:  # a floor that cannot be measured is absent; the programs are still timed
                self._emit({"kind": "note", "text": f"chain floor: {type(error).__name__}: {error}"})
            self.machine.synchronize()
            self._emit({"kind": "floors", "floors": found})

    def _release(self) -> None:
        import torch._dynamo

        torch._dynamo.reset()  # compiled code of one shape must not make the next one compile as "dynamic"
        gc.collect()
        self.machine.release()


class SceneRun:
    """One shape and precision: build, verify, capture, time."""

    def __init__(self, bench: BenchRun, spec: dict[str, Any]) -> None:
        self.bench, self.spec, self.id = bench, spec, _scene_id(spec)
        self.machine = bench.machine
        protocol = dict(bench.payload["protocol"])
        if spec.get("rounds"):
            protocol["rounds"] = spec["rounds"]
        self.protocol = TimingProtocol(**protocol)
        self.programs: dict[str, Program] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.series: dict[str, dict[str, Any]] = {}
        self.scene: BenchScene

    def run(self) -> None:
        bench, spec = self.bench, self.spec
        bench.progress({"stage": "inputs", "case": self.id})
        task = task_from_payload({**bench.payload, "precision": spec["precision"]})
        self.scene = BenchScene(task, self.machine.device, spec.get("shape"), self.protocol.input_sets)
        self.uuid = self.machine.uuid
        # Candidates first: when the time is short, a compile baseline is what goes, never a candidate.
        for name in [*spec["candidates"], *spec["baselines"]]:
            self._build(name)
        self.before = quality.snapshot(self.uuid)
        if GRAPH_REPLAY in bench.payload["methods"]:
            self._replay()
        if COLD_REPLAY in bench.payload["methods"]:
            self._cold_replay()
        for method, function in bench.functions.items():
            self._upstream(method, function)
        self._parameters_unchanged()
        self._emit(finished=True)

    # ---- building ----

    def _guard(self, name: str, stage: str, action: Callable[[], Any]) -> tuple[bool, Any]:
        """Run an action for one program; on any failure drop the program, and check that the device still answers."""
        self.bench.progress({"stage": stage, "case": f"{name} at {self.id}", "program": name, "scene": self.id})
        try:
            return True, action()
        except Dropped as gone:
            status, message = gone.status, gone.message
        except JudgeFailure as failure:
            status, message = failure.status, failure.message
        except ValueError as error:
            building = stage.startswith("build")
            status = Status.NOT_RUN if building else Status.RUNTIME_ERROR
            message = f"refuses this input: {error}" if building else f"{stage}: ValueError: {error}"
        except Exception as error:
            status = Status.OUT_OF_MEMORY if is_out_of_memory(error) else Status.RUNTIME_ERROR
            message = f"{stage}: {type(error).__name__}: {str(error).strip()[:600]}"
        self._drop(name, status, message)
        try:
            self.machine.synchronize()
        except Exception as error:
            raise ContextLost(f"{name}: {message}; the CUDA context is lost: {error}") from error
        return False, None

    def _drop(self, name: str, status: Status, message: str) -> None:
        self.programs.pop(name, None)
        self.rows[name] = {"status": status.value, "reason": message}
        self.bench._emit({"kind": "dropped", "scene": self.id, "name": name, **self.rows[name]})

    def _build(self, name: str) -> None:
        baseline = baselines.BASELINES.get(name)
        if baseline is not None and baseline.backend is not None and self.bench.used() > BUILD_SHARE:
            self._drop(name, Status.NOT_RUN, "no time left to compile it; " + _budget_words(self.bench.budget_s))
            return

        def first_call() -> Program:
            program = self._baseline(name) if baseline is not None else self._candidate(name)
            program.before = {key: value.clone() for key, value in program.model.state_dict().items()}
            if name in self.bench.payload.get("other_functions", ()):
                self.scene.hold_to_itself(name, program.call)
            frames = baselines.compiled_frames() if baseline is not None and baseline.backend else None
            shown = self.scene.load(0)
            output = program.call(*self.scene.captured_arguments())
            self.machine.synchronize()
            if frames is not None and baselines.compiled_frames() == frames:
                raise Dropped(Status.COMPILE_ERROR, "torch.compile compiled nothing and fell back to eager")
            complaint = self.scene.check(name, output, shown)
            if complaint:
                wrong_shape = "shape" in complaint
                raise Dropped(Status.INCORRECT_SHAPE if wrong_shape else Status.INCORRECT_NUMERICAL, complaint)
            replaced = self.bench.watch.replaced()
            if replaced:
                raise Dropped(Status.RUNTIME_ERROR, f"it replaced {replaced}, a timing function")
            return program

        kept, program = self._guard(name, "build and first call of", first_call)
        if kept:
            self.programs[name] = program
            self.rows[name] = {"status": Status.OK.value, "timing": {}}

    def _candidate(self, name: str) -> Program:
        model = self.scene.build(load_candidate(self.bench.payload["sources"][name], self.scene.task))
        return Program(model, model)

    def _baseline(self, name: str) -> Program:
        model = self.scene.build(self.scene.modules.Model)
        call = baselines.build(name, model, self.scene.captured_arguments())
        return Program(call, model, own_graphs=baselines.BASELINES[name].own_graphs)

    # ---- timing ----

    def _replay(self) -> None:
        captured: dict[str, Any] = {}
        for name, program in list(self.programs.items()):
            if program.own_graphs and self.machine.graphs:
                continue

            def capture(program: Program = program) -> Any:
                self.scene.load(0)
                return self.machine.capture(program.call, self.scene.captured_arguments(), self.protocol.warmups)

            kept, value = self._guard(name, "capture of", capture)
            if kept:
                captured[name] = value
        method = GRAPH_REPLAY if self.machine.graphs else CPU_REHEARSAL
        series = replay_rounds(
            captured, self.machine, self.scene, self.protocol, self._guard, self._out_of_time, method
        )
        self._store(method, series, lambda name, samples: replay_statistics(samples, self.protocol))

    def _cold_replay(self) -> None:
        """The same rounds over a ring of buffers: a sample is the mean over the ring, replayed once."""
        ring = Ring(self.scene) if self.machine.graphs else Ring(self.scene, ring_bytes=0)
        captured: dict[str, Any] = {}
        for name, program in list(self.programs.items()):
            if program.own_graphs and self.machine.graphs:
                continue

            def capture(program: Program = program) -> RingProgram:
                return RingProgram(self.machine.capture(ring.over(program.call), [], RING_WARMUPS), ring)

            kept, value = self._guard(name, "capture over the ring of", capture)
            if kept:
                captured[name] = value
        once = replace(self.protocol, replays=1, warmups=RING_WARMUPS)
        method = COLD_REPLAY if self.machine.graphs else COLD_CPU_REHEARSAL
        series = replay_rounds(captured, self.machine, ring, once, self._guard, self._out_of_time, method)
        for samples in series.samples.values():
            samples[:] = [sample / ring.size for sample in samples]
        self._store(method, series, lambda _, samples: {**replay_statistics(samples, once), "ring": ring.size})

    def _upstream(self, method: str, function: Callable[..., list[float]]) -> None:
        calls = {name: program.call for name, program in self.programs.items()}
        series = upstream_rounds(
            method, function, calls, self.scene, self.protocol, self._guard, self.machine.device, self._out_of_time
        )
        self._store(
            method,
            series,
            lambda name, samples: upstream_statistics(
                samples, series.passes[name], self.bench.get_stats(samples), self.protocol
            ),
        )

    def _out_of_time(self) -> bool:
        return self.bench.used() >= 1.0

    def _store(self, method: str, series: Series, statistics: Callable[[str, list[float]], dict[str, Any]]) -> None:
        self.series[method] = {"names": series.names, "orders": series.orders, "seconds": round(series.seconds, 3)}
        for name, samples in series.samples.items():
            if name in self.programs and samples:
                stats = statistics(name, samples)
                stats["flags"] = quality.sample_flags(stats, len(samples))
                self.rows[name]["timing"][method] = stats
        self._emit()

    def _parameters_unchanged(self) -> None:
        for name, program in list(self.programs.items()):
            for key, value in program.model.state_dict().items():
                before = program.before.get(key)
                if before is None or not torch.equal(before.to(value.device), value):
                    self._drop(name, Status.INCORRECT_NUMERICAL, f"it changed its parameter {key} while it was timed")
                    break

    def _emit(self, finished: bool = False) -> None:
        after = quality.snapshot(self.uuid)
        for name, row in self.rows.items():
            equal = self.scene.identical.get(name)
            if equal and name not in self.scene.own and row["status"] == Status.OK.value:
                row["verified"] = {"outputs": len(equal), "bit_identical": sum(equal)}
        self.bench._emit(
            {
                "kind": "scene",
                "finished": finished,
                "scene": self.id,
                "key": self.spec["key"],
                "precision": self.spec["precision"],
                "bytes": self.scene.bytes_moved,
                "input_bytes": self.scene.input_bytes,
                "rows": self.rows,
                "series": self.series,
                "quality": {"before": self.before, "after": after, "flags": quality.machine_flags(self.before, after)},
                "upstream_methods": self.bench.upstream_reason or "called from the checkout, unmodified",
            }
        )


def _scene_id(spec: Mapping[str, Any]) -> str:
    return f"{spec['key']}@{spec['precision']}"


def _budget_words(budget_s: float) -> str:
    return f"the budget of {budget_s:g} s is used up; raise it with --budget"
