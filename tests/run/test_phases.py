"""Where a judge's seconds went, and the verbs that are imported for a call."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from kbsub.eval import cli
from kbsub.eval.run import phases
from kbsub.eval.run.phases import Phases


def heard(*steps: tuple[str, float]) -> tuple[Phases, list[dict]]:
    passed: list[dict] = []
    listener = Phases(passed.append)
    for step, second in steps:
        listener.began = time.monotonic() - second
        listener.entered({}) if step == "cell" else listener.heard({"stage": step})
    return listener, passed


def test_phases_add_up_and_trials_are_upstreams():
    steps = [("cell", 0.1), ("import", 0.2), ("reference", 3.2), ("loading", 3.3), ("trial", 33.3), ("trial", 34.0)]
    listener, passed = heard(*steps, ("timing", 35.0), ("floor", 36.3))
    found = listener.seconds(36.5)
    wanted = {"cell": 0.1, "start": 0.1, "import": 3.0, "upstream": 3.1, "build": 30.0, "other": 0.2}
    assert found == pytest.approx(wanted, abs=0.02) and sum(found.values()) == pytest.approx(36.5, abs=0.02)
    assert [event["stage"] for event in passed] == [step for step, _ in steps[1:]] + ["timing", "floor"]


def test_a_judge_that_ended_early_and_one_that_invents_steps():
    listener, _ = heard(("cell", 0.5), *((f"made up {n}", 0.6) for n in range(50)), ("import", 1.0))
    assert listener.seconds(9.0) == pytest.approx({"cell": 0.5, "start": 0.5, "other": 8.0}, abs=0.02)
    assert set(listener.at) == {"cell", "import"}, "what a candidate sends takes no memory here"
    listener.heard({"stage": ["no", "name"]})


def test_the_age_of_a_process_counts_its_interpreters_start():
    code = "import time; time.sleep(0.3); from kbsub.eval.run.phases import age_s; print(age_s())"
    started = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.3 <= age <= time.monotonic() - started + 0.1
    assert "in all" not in phases.in_words(None, {}, 1.0)


def test_a_verb_is_imported_alone_and_an_unknown_one_meets_them_all():
    names = {command.name for command in cli.app.registered_commands}
    assert {"eval", "gate", "bench", "leaderboard"} <= names and not {"common", "saves"} & names
    assert [command.name for command in cli.make("eval").registered_commands] == ["eval"]
    for unknown in ("common", "no_such", "--help", None):
        assert {command.name for command in cli.make(unknown).registered_commands} == names
    code = "import sys, json; sys.argv = ['kbsub', 'eval', '--help']\nfrom kbsub.eval.cli import main\ntry: main()\n"
    code += "finally: print(json.dumps(sorted(m for m in sys.modules if m.startswith('kbsub') or m == 'torch')))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = json.loads(run.stdout.splitlines()[-1])
    assert "kbsub.eval.commands.eval" in loaded
    assert not {"torch", "kbsub.eval.commands.gate", "kbsub.eval.run.batch.job"} & set(loaded)
