"""The secret cases of the suite: its kinds of question with numbers that nobody knew before the judge drew their seed.

Data, as the cases that everybody knows; nothing here computes.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kbsub.eval.tasks.cases import EPS, INPUT, INPUTS, LAYOUTS, OWN_EPS, PARAMETERS, SECRET, Case, Input, Parameters

# What has no number to be drawn anew needs no secret case; parameters elsewhere are a layout that nobody can know.
_OF_NO_NUMBER = ("zero", "ramp")
_LAYOUTS = tuple(each for each in LAYOUTS if each != "misaligned_parameters")
_SPARSE = (Input("one_larger", "sparse", seed=200, scale=8.0), Input("one_negative", "sparse", seed=201, scale=-8.0))
SECRET_BITS = 48
_PLACED = ("outlier", "special")


def secret_seed(payload: Mapping[str, Any]) -> int | None:
    """The seed of a judge's secret cases: the payload's "secret_seed" (None: none are asked), else a drawn one."""
    seed: int | None = payload.get("secret_seed", secrets.randbits(SECRET_BITS))
    return seed


def secret_cases(seed: int) -> list[Case]:
    """Cases of every kind that is drawn, from `seed`; the same seed, the same cases. The first one's seed is `seed`.

    Values, places and parameters are drawn; scales, offsets and constants are those of the known case of that name, or
    down to half of them, so that none is harder, and an eps is up to four times as large. Beside them, which have no
    known case: the task's own inputs, and its own parameters, of which one element is unlike the others. Who looks at
    some of them and takes the rest for such as these is wrong there, unless he happens to look at that one.
    """
    chance = random.Random(seed)
    initial, large = PARAMETERS["initial"], PARAMETERS["large"]
    drawn = replace(PARAMETERS["random"], seed=seed + 1)
    official, normal = INPUT["official"], INPUT["normal"]
    cases = [_case(replace(official, seed=seed), initial, oracle=True)]
    cases += [_case(_anew(entry, seed, chance), initial, oracle=True) for entry in _SPARSE]
    cases += [_case(_anew(official, seed, chance), Parameters("sparse", "sparse", seed=seed + 2), oracle=True)]
    for entry in INPUTS:
        if entry.name != official.name and entry.name not in _OF_NO_NUMBER:
            cases.append(_case(_anew(entry, seed, chance), drawn, oracle=entry.oracle))
    for number, layout in enumerate(_LAYOUTS):
        entry = replace(normal, seed=seed + 300 + number)
        named = f"layout_{layout}/{normal.name}/{drawn.name}"
        cases.append(Case(SECRET + named, entry, drawn, layout=layout, may_refuse=True))
    larger = replace(large, seed=seed + 3, scale=large.scale * _half_or_more(chance))
    cases += [_case(replace(normal, seed=seed + 400), larger)]
    largest = _case(replace(normal, seed=seed + 500), drawn, EPS[-1])
    return [*cases, replace(largest, eps=EPS[-1] * (1 + 3 * chance.random()))]


def _case(entry: Input, parameters: Parameters, eps: float = OWN_EPS, oracle: bool = False) -> Case:
    return Case(f"{SECRET}{entry.name}/{parameters.name}/eps{eps:g}", entry, parameters, eps, oracle=oracle)


def _anew(entry: Input, seed: int, chance: random.Random) -> Input:
    """The same kind with a seed, numbers and a place of its own. No two cases are made of the same draw: who has seen
    one would know the other."""
    share = _half_or_more(chance)
    at = "drawn" if entry.kind in _PLACED else entry.at
    scale = entry.scale if entry.scale == 1.0 else entry.scale * share
    own = replace(entry, seed=seed + entry.seed, scale=scale, offset=entry.offset * share, at=at)
    return own if entry.kind == "special" else replace(own, value=entry.value * share)


def _half_or_more(chance: random.Random) -> float:
    return chance.uniform(0.5, 1.0)
