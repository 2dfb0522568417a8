"""A stored result of an invented H200 run, for the tests of tables, plots and comparisons."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path

import numpy as np

from kbsub.eval.bench.timing import TimingProtocol

RUN, OTHER_RUN = "2026-01-01T00:00:00.000000Z", "2026-01-02T00:00:00.000000Z"


def replay(value: float, *, run: str = RUN, noise: float = 0.001, seed: int = 0, method: str = "graph_replay") -> dict:
    samples = list(value * np.exp(noise * np.random.default_rng(seed).normal(size=35)))
    ordered = sorted(samples)
    stats = {"median_ms": ordered[17], "q25_ms": ordered[8], "q75_ms": ordered[26], "samples_ms": samples, "run": run}
    return {method: {**stats, "order_seed": 913, "flags": []}}


def cuda_event(value: float, *, run: str = RUN, seed: int = 0) -> dict:
    samples = list(value * np.exp(0.001 * np.random.default_rng(seed).normal(size=100)))
    stats = {"mean_ms": value, "std_ms": 0.001, "min_ms": min(samples), "max_ms": max(samples), "trials": 100}
    return {"cuda_event": {**stats, "samples_ms": samples, "pass_medians_ms": samples[::10], "run": run}}


def candidate(value: float, *, contract: str = "bit-identical", eager: float = 8.1, **more) -> dict:
    official = {"compiled": True, "correctness": True, "trials": "(5 / 5)", "metadata": {"excessive_speedup": True}}
    row = {"sha256": "a" * 64, "contract": contract, "precision": "fp32", "status": "OK"}
    row["official"] = {**official, "runtime": value, "ref_runtime": eager}
    oracle = {"uniform": {"reference_max_abs": 1.5e-5, "candidate_max_abs": 1e-6, "nearer": "candidate"}}
    oracle["+1000"] = {"reference_max_abs": 1.4e-3, "candidate_max_abs": 2e-6, "nearer": "candidate"}
    return {
        **row,
        "oracle": oracle,
        "timing": {**replay(value * 0.95, seed=int(value * 1e4)), **cuda_event(value)},
        **more,
    }


def content() -> dict:
    environment = {
        "gpu": "NVIDIA H200",
        "driver": "580",
        "cuda": "13.0",
        "torch": "2.11",
        "cupy": "14.2",
        "nvrtc": "13.0",
    }
    environment |= {
        "python": "3.12",
        "kernelbench_commit": "4" * 40,
        "project_commit": None,
        "date": "2026-01-01T00:00:00",
    }
    shape = {"8x32": {"status": "OK", "bit_identity": {"identical": 9, "total": 9}, "timing": replay(0.05)}}
    eager_shape = {"8x32": {"timing": replay(0.10)}, "1x99": {"timing": replay(0.2)}}
    return {
        "schema": 1,
        "environment": environment,
        "task": {"level": 1, "problem_id": 40, "sha256": "b" * 64, "provenance": "kernelbench@4"},
        "floors": {"memory_ms": 0.137, "copy_gb_s": 4160.0, "chain_ms": 0.139, "memory_two_reads_ms": 0.2},
        "baselines": {
            "eager": {"timing": {**replay(8.07), **cuda_event(8.1)}, "shapes": eager_shape},
            "compile_default": {"timing": {**replay(0.33), **cuda_event(0.36)}},
            "compile_reduce_overhead": {"timing": cuda_event(0.42)},
            "copy": {"timing": replay(0.129)},
        },
        "candidates": {
            "exact": candidate(0.30, bit_identity={"identical": 30, "total": 30, "cases": []}, shapes=shape),
            "slow_exact": candidate(4.8),
            "near": candidate(0.19, contract="tolerance", accurate=True),
            "split": candidate(1.2, contract="control"),
            "broken": {"sha256": "c" * 64, "contract": "tolerance", "precision": "fp32", "status": "COMPILE_ERROR"},
        },
    }


def bench_run(scenes: dict[str, dict], floors: dict) -> dict:
    """One run under `bench.runs`: everything `kbsub bench` writes, the scenes' own numbers as given."""
    state = {"available": False, "reason": "no NVIDIA GPU"}
    scene = {
        "series": {},
        "quality": {"before": state, "after": state, "flags": []},
        "upstream_methods": "not asked for",
    }
    return {
        "protocol": asdict(TimingProtocol()),
        "methods": ["graph_replay"],
        "environment": content()["environment"],
        "floors": floors,
        "scenes": {key: {**scene, **numbers} for key, numbers in scenes.items()},
        "skipped": {},
        "notes": [],
    }


def with_files(stored: dict, folder: Path) -> dict:
    """The result with a file in `folder` for each of its candidates, measured as the file is."""
    folder.mkdir(parents=True, exist_ok=True)
    for key, row in stored["candidates"].items():
        file = folder / f"{key.partition('@')[0]}.py"
        file.write_text(f"# {file.stem}\n")
        row["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return stored
