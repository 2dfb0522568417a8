"""What import-linter is told about this tree: no room can be added beside its contracts. `make lint` runs them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]


def layers() -> list[set[str]]:
    """From the highest to the lowest: the rooms of each."""
    (contract,) = [each for each in CONTRACTS if each["type"] == "layers"]
    return [{room.strip().strip("()") for room in line.split("|")} for line in contract["layers"]]


def test_every_room_has_its_layer():
    rooms = {f"kbsub.eval.{folder.parent.name}" for folder in (ROOT / "eval").glob("*/__init__.py")}
    placed = set().union(*layers())
    assert len(rooms) > 8 and rooms <= placed, f"rooms without a layer in pyproject.toml: {sorted(rooms - placed)}"


@pytest.mark.parametrize(
    ("above", "below"),
    [("commands", "run"), ("report", "run"), ("measure", "run"), ("verdicts", "bench"), ("bench", "operators"),
     ("operators", "tasks"), ("tasks", "results"), ("results", "process")],
)  # fmt: skip
def test_the_layers_are_in_the_order_of_the_house(above, below):
    at = {room.removeprefix("kbsub.eval."): depth for depth, rooms in enumerate(layers()) for room in rooms}
    assert at[above] < at[below]


# Everything that the parent's half imports before it knows what is asked: reports, registers, the verbs themselves.
WITHOUT_TORCH = """
import importlib, pkgutil, sys
sys.modules["torch"] = None  # importing it raises
for room in ("report", "commands", "results", "tasks"):
    package = importlib.import_module(f"kbsub.eval.{room}")
    modules = [module.name for module in pkgutil.iter_modules(package.__path__)]
    assert modules, room
    for name in modules:
        importlib.import_module(f"{package.__name__}.{name}")
from kbsub.eval.verdicts.register import KINDS
print(len(KINDS))
"""


def test_reports_and_registers_are_imported_without_torch():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and int(done.stdout) >= 5, done.stderr
