"""What `kbsub bench` writes into a result file, every key a field: timings, floors, how timing ended, and the run.

Times in ms, sizes in bytes, bandwidth in GB/s, clocks in MHz, power in watts. Each timing names its run, because only
samples of one run are paired. Must not know how anything was measured, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from pydantic import Field

from kbsub.eval.process.isolated import Status
from kbsub.eval.results.record import Environment, Record

OFFICIAL = "official"  # the key of the task's own shape, where shapes have keys


class Floors(Record):
    """What the hardware needs for the bytes or the order alone, measured in one run; absent where it does not apply."""

    memory_ms: float | None = None  # every byte once at copy_gb_s
    copy_gb_s: float | None = None
    chain_ms: float | None = None  # the reference order's dependent updates, mean alone
    chain_mean_m2_ms: float | None = None
    bytes: int | None = None
    memory_two_reads_ms: float | None = None


class Timing(Record):
    """One program by one timing method: mean_ms ... of upstream's methods, median_ms ... of replays."""

    mean_ms: float | None = None
    std_ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    trials: int | None = None
    median_ms: float | None = None
    q25_ms: float | None = None
    q75_ms: float | None = None
    samples_ms: list[float] | None = None
    order_seed: int | None = None
    replays: int | None = None  # between two events
    warmups: int | None = None
    samples: int | None = None  # how many there were, where they are too many to keep
    pass_medians_ms: list[float] | None = None  # of upstream's methods: what comparisons pair
    passes: int | None = None
    relative_iqr: float | None = None
    samples_for_half_percent: int | None = None
    ring: int | None = None  # buffers of a replay with a cold L2
    flags: list[str] | None = None  # what speaks against the samples
    run: str | None = None  # a key of Result.bench.runs

    def by_round(self) -> list[float]:
        """One number (ms) a round: a replay's sample, or the median of the trials of one of upstream's passes."""
        return list(self.pass_medians_ms or self.samples_ms or [])


class Verified(Record):
    """The outputs that were looked at while a program was timed, and how many had the reference's very bits."""

    outputs: int
    bit_identical: int


class BenchOutcome(Record):
    """How timing a program ended; never merged into the status of its row."""

    status: Status
    run: str
    reason: str | None = None
    verified: Verified | None = None
    notes: list[str] | None = None


class EqualOutputs(Record):
    """Bit-equal outputs at one shape; `by` says which command looked."""

    identical: int
    total: int
    by: str | None = None


class ShapeRow(Record):
    """One program at a shape beyond the official one."""

    status: Status | None = None
    reason: str | None = None
    bit_identity: EqualOutputs | None = None
    timing: dict[str, Timing] | None = None
    bench: BenchOutcome | None = None


class RoundOrders(Record):
    """One method in one scene: the programs, the order (indices into names) of every round, and how long it took."""

    names: list[str]
    orders: list[list[int]]
    seconds: float


class MachineState(Record):
    """One reading of the GPU's state; null what the driver did not answer, `reason` where nothing could be read."""

    available: bool
    reason: str | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    sm_max_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle_reasons: list[str] | None = None
    other_processes: int | None = None


class Quality(Record):
    """The machine before and after a scene, and what the two readings say against it."""

    before: MachineState
    after: MachineState
    flags: list[str] = Field(default_factory=list)


class SceneRecord(Record):
    """One shape at one precision of a run; `series`: timing method -> orders."""

    bytes: int
    input_bytes: int
    series: dict[str, RoundOrders]
    quality: Quality
    upstream_methods: str
    memory_floor_ms: float | None = None


class ProtocolRecord(Record):
    """The numbers a run was made with (kbsub.eval.bench.timing.TimingProtocol says what they mean)."""

    rounds: int
    replays: int
    warmups: int
    order_seed: int
    trials: int
    passes: int
    upstream_warmups: int
    discarded: int
    input_sets: int


class BenchRun(Record):
    """One run of `kbsub bench`. Keys of `scenes` and `skipped`: "<shape key>@<precision>"."""

    protocol: ProtocolRecord
    methods: list[str]
    environment: Environment
    floors: Floors
    scenes: dict[str, SceneRecord]
    skipped: dict[str, str] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    confined: dict[str, Any] | None = None  # {"level", "lacks", "why"} of the child's cell; absent in older files


class BenchRuns(Record):
    """The runs that some timing of the file refers to, by when they started."""

    runs: dict[str, BenchRun] = Field(default_factory=dict)

    def newest_first(self) -> Iterator[BenchRun]:
        return (self.runs[name] for name in sorted(self.runs, reverse=True))


class TimedRow(Protocol):
    """A candidate's or a baseline's row, as far as its timings go."""

    @property
    def timing(self) -> Mapping[str, Timing] | None: ...

    @property
    def shapes(self) -> Mapping[str, ShapeRow] | None: ...


def timings_by_shape(row: TimedRow) -> dict[str, dict[str, Timing]]:
    """What a row was timed at: the official shape, then every other one. Shape key -> method -> timing."""
    others = {key: dict(shape.timing or {}) for key, shape in (row.shapes or {}).items()}
    return {OFFICIAL: dict(row.timing or {}), **others}
