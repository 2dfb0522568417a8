"""A whole verdict on a CPU: an honest file gets its time, a dishonest one is found out or gets its true one."""

from __future__ import annotations

import sys

import pytest

from support.paths import TESTS
from support.refereed import CALL_MS, refereed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TWINS = TESTS / "twins" / "referee"
ROWS = tomllib.loads((TWINS / "referee.toml").read_text())
ELSEWHERE = TESTS / "support" / "remote_candidates"
CHEATS = (
    "forge_json_dumps", "forge_env_token", "native_replaced_everywhere", "layernorm_class_replaced",
    "c2_instance_override", "c4_reference_patched", "c6_function_mode", "lazy_everywhere",
)  # fmt: skip
HONEST = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = torch.nn.LayerNorm(normalized_shape)
    def forward(self, x):
        {change}
        return self.ln(x)
"""
QUICK = ("sleeps_in_small_batches",)  # the others take as long, and are --slow


def test_an_honest_file_gets_its_time_and_all_its_outputs_are_right():
    status, found = refereed(HONEST.format(change="pass"))
    assert status == "OK" and found["outputs"] > 30 and found["wrong"] == 0 and not found["problems"], found
    assert found["by"] == "slope" and found["ms"] == pytest.approx(CALL_MS)
    assert found["tells_apart"] and found["held"] and "notes" not in found and found["parameters_changed"]
    assert found["confined"]["level"] in ("namespaces", "landlock", "unconfined")


RENAMED = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.ones({shape}))
        self.beta = torch.nn.Parameter(torch.zeros({shape}))
        self.form = normalized_shape
    def forward(self, x):
        gamma, beta = self.gamma.reshape(self.form), self.beta.reshape(self.form)
        return torch.nn.functional.layer_norm(x, self.form, {used})
"""


@pytest.mark.parametrize(("used", "wrong"), [pytest.param("gamma, beta", False, marks=pytest.mark.slow), ("", True)])
def test_parameters_of_other_names_are_changed_too(used, wrong):
    """A file that ignores its parameters passed when it called them otherwise."""
    status, found = refereed(RENAMED.format(shape="normalized_shape", used=used))
    assert status == "OK" and found["parameters_changed"] and bool(found["wrong"]) == wrong, found


@pytest.mark.slow
def test_where_no_parameter_can_be_set_the_record_says_so():
    source = RENAMED.replace("torch.nn.Parameter", "").format(shape="normalized_shape", used="gamma, beta")
    status, found = refereed(source)
    assert status == "OK" and not found["wrong"] and found["parameters_changed"] is False, found
    (note,) = found["notes"]
    assert note == "its parameters cannot be set: neither names, order nor shapes are those of the reference"


def ends(status: str, found: dict) -> str:
    if found.get("wrong") or found.get("problems"):
        return "wrong"
    return "refused" if status != "OK" else "true time" if found["ms"] >= 0.95 * CALL_MS else "accepted"


def test_every_twin_has_a_row_and_every_row_a_twin():
    assert set(ROWS) == {file.stem for file in TWINS.glob("*.py")}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in ROWS])
def test_a_twin_ends_as_its_row_says(name):
    status, found = refereed((TWINS / f"{name}.py").read_text())
    assert ends(status, found) == ROWS[name]["ends"], found


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_found_out(name):
    status, found = refereed((ELSEWHERE / f"{name}.py").read_text())
    assert ends(status, found) in ("wrong", "refused"), found


WRONG = {  # what is changed: the words
    "x.mul_(1.001)": "changed its inputs",
    "self.ln.weight.data.mul_(1.0 + 1e-6)": "changed its state 'ln.weight'",
    "return self.ln(x).double()": "dtype torch.float64",
    "return (self.ln(x),)": "a tuple, not a tensor",
    "return torch.nn.functional.layer_norm(x, self.ln.normalized_shape)": "differs from the reference",
}


@pytest.mark.slow
@pytest.mark.parametrize("change", WRONG)
def test_what_is_wrong_is_said(change):
    status, found = refereed(HONEST.format(change=change))
    assert status == "OK" and any(WRONG[change] in problem for problem in found["problems"]), found


BETA_FIRST = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.beta = torch.nn.Parameter(torch.zeros(normalized_shape))
        self.gamma = torch.nn.Parameter(torch.ones(normalized_shape))
        self.shape = normalized_shape
    def forward(self, x):
        {change}
        return torch.nn.functional.layer_norm(x, self.shape, {used})
"""
OF_OTHER_NAMES = {
    ("pass", "self.gamma, self.beta"): "",
    ("pass", "None, None"): "differs from the reference",
    ("self.beta.data.add_(1e-6)", "self.gamma, self.beta"): "changed its state 'beta'",
}


@pytest.mark.slow
@pytest.mark.parametrize("which", OF_OTHER_NAMES)
def test_parameters_of_other_names_are_changed_and_watched_too(which):
    status, found = refereed(BETA_FIRST.format(change=which[0], used=which[1]))
    words = OF_OTHER_NAMES[which]
    assert status == "OK" and "notes" not in found, found
    assert any(words in problem for problem in found["problems"]) if words else not found["problems"], found


@pytest.mark.slow
def test_a_view_of_the_input_is_an_answer_like_any_other(tmp_path):
    task = tmp_path / "view.py"
    task.write_text(
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x.t()\n"
        "def get_inputs():\n    return [torch.rand(30, 40)]\ndef get_init_inputs():\n    return []\n"
    )
    candidate = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x.t()\n"
    status, found = refereed(candidate, task)
    assert status == "OK" and found["wrong"] == 0 and found["outputs"] > 30
    assert "notes" not in found and "parameters_changed" not in found


@pytest.mark.slow
@pytest.mark.parametrize(("lies", "held"), [(2, True), (10**6, False)])
def test_a_batch_whose_processes_seemed_to_run_is_drawn_anew_before_it_counts(monkeypatch, lies, held):
    """Twice is the machine's noise, always is somebody who wakes himself."""
    left = [lies]

    def seemed(pid, before):
        left[0] -= 1
        return left[0] < 0

    monkeypatch.setattr("kbsub.eval.remote.ring.stood_still", seemed)
    status, found = refereed(HONEST.format(change="pass"))
    assert status == "OK" and not found["wrong"] and found["held"] is held, found
