"""What only a GPU can show of the stress suite: streams, graphs, the official shape in time and in memory."""

from __future__ import annotations

import pytest

from kbsub.eval.process.isolated import Status
from kbsub.eval.suite.batch import run_batch
from support.paths import ROOT
from support.sizes import SMALL_LEVEL1_40
from support.stress_stand_ins import NATIVE, source

pytestmark = pytest.mark.gpu
FOLDER = ROOT / "submissions" / "level1_40"
COMMON = {"task": "level1_40", "precision": "fp32", "kernelbench": None, "device": "cuda"}

# name: (body of forward, the case that must catch it)
WRONG = {
    "a stream of its own, not joined": (
        "s = state.setdefault('s', torch.cuda.Stream())\nwith torch.cuda.stream(s):\n    y = layer(x)\nreturn y",
        "side_stream/normal/random",
    ),
    "parameters kept from the first call": (
        "w, b = state.setdefault('p', (layer.weight.clone(), layer.bias.clone()))\n"
        "return torch.nn.functional.layer_norm(x, layer.normalized_shape, w, b, layer.eps)",
        "graph_mutation/normal/random",
    ),
    "a synchronisation that cannot be captured": (
        "torch.cuda.synchronize()\nreturn layer(x)",
        "graph_mutation/normal/random",
    ),
}


def candidate(stem: str, text: str, **declaration):
    return {"stem": stem, "candidate_source": text, "declaration": declaration}


@pytest.mark.parametrize("name", WRONG)
def test_what_only_a_gpu_shows_is_caught(name):
    body, case = WRONG[name]
    batch = [candidate("wrong", source(body)), candidate("native", source(NATIVE))]
    found = run_batch(batch, {**COMMON, "size": SMALL_LEVEL1_40, "only": [case]}, timeout_s=120)
    rows = {stem: each.rows[0]["class"] for stem, each in found.items()}
    assert rows == {"wrong": "fail", "native": "pass"}, {stem: each.rows for stem, each in found.items()}


def test_the_official_shape_takes_under_a_minute_and_four_gigabytes():
    text = (FOLDER / "reference_order.py").read_text("utf-8")
    found = run_batch([candidate("reference_order", text, contract="bit-identical")], COMMON, timeout_s=280)
    record = found["reference_order"].stress
    assert found["reference_order"].status is Status.OK, found["reference_order"].message
    failed = [(row["name"], row["reason"]) for row in record["cases"] if row["class"] == "fail"]
    assert not failed
    assert record["seconds"] < 60 and record["peak_extra_bytes"] < 4 << 30, (
        record["seconds"],
        record["peak_extra_bytes"],
    )


def test_baselines_are_asked_what_needs_a_gpu_and_the_reference_stays_as_it_is():
    only = ["side_stream/normal/random", "graph_mutation/normal/random", "after_1000_calls/normal/random"]
    batch = [{"baseline": name, "stem": name} for name in ("eager", "compile_default")]
    found = run_batch(
        [*batch, candidate("native", source(NATIVE))], {**COMMON, "small": True, "only": only}, timeout_s=240
    )
    for stem, each in found.items():
        rows = {row["name"]: row["class"] for row in each.rows}
        assert len(rows) == 3 and set(rows.values()) == {"pass"}, (stem, each.rows)
    parts = found["native"].stress["peak_extra_bytes_of"]
    assert min(parts[name] for name in ("judge", "candidate", "shared")) > 0, parts
    assert found["native"].stress["peak_extra_bytes"] == sum(parts.values())
