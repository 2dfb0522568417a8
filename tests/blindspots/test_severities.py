"""Ten problems at small sizes come out as expected (expected.json): vacuous to sound, through upstream's predicate."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kbsub.adapters.task import load_task, parse_task, trial_seeds
from kbsub.eval.blindspots.judge import judge
from kbsub.eval.blindspots.schedule import wanted
from kbsub.eval.results.blindspots import BlindSpots
from kbsub.eval.tasks.sizes import Size, size_payload

EXPECTED: dict[str, Any] = json.loads(Path(__file__).with_name("expected.json").read_text("utf-8"))


def record_of(slug: str, kernelbench: Path) -> BlindSpots:
    """The record of one problem at the size that expected.json says; in this process, one thread."""
    expected = EXPECTED[slug]
    payload = wanted(load_task(*parse_task(slug), kernelbench=kernelbench), expected["size"]).payload()
    if values := expected.get("values"):
        payload["size"] = size_payload(expected["size"], Size(values=values))
    common = {"kernelbench": str(kernelbench), "device": "cpu", "precision": "fp32"}
    found: list[dict[str, Any]] = []
    terms = {"limit_s": 60.0, "deadline": time.time() + 60, "memory_bytes": None}
    judge({"tasks": [payload], **common, **terms}, found.append)
    return BlindSpots.model_validate(found[-1]["record"])


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.kernelbench
@pytest.mark.parametrize("slug", EXPECTED)
def test_as_expected(slug, kernelbench, one_thread):
    record, expected = record_of(slug, kernelbench.path), EXPECTED[slug]
    passed = {row.name for row in record.variants if row.passed}
    failed = {row.name for row in record.variants if row.passed is False}
    assert record.worst == expected["worst"], record.severities()
    assert set(expected["passes"]) <= passed
    assert set(expected["fails"]) <= failed
    assert not failed & passed
    assert record.seeds == trial_seeds()  # the five of upstream, whatever else was drawn behind them
