"""Break one operation of a bit-identical kernel, and the host run must show it: each mutant here has to be caught.

Mutants are made from the source itself: every barrier and wait left out, every merge with its sides swapped, every
multiply-add unfused, loads one element late. A mutant is caught when a run faults or differs from the NumPy model.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kbsub.eval.host_executor import H200_LIMITS, SMALL_LIMITS, HostFault, host_namespace
from kbsub.eval.host_executor.build import LAUNCH_BOUNDS
from kbsub.eval.operators.layer_norm import order as contract
from support.host_run import cuda_candidates, disagreement, source_of

BIT_IDENTICAL = sorted(cuda_candidates("bit-identical"))
# A device whose shared memory holds a middle row only once: such rows then take the path of long ones.
TIGHT_LIMITS = replace(H200_LIMITS, shared_bytes_per_multiprocessor=140_000)
# One on which the shortest row that registers do not hold takes that path.
CRAMPED_LIMITS = replace(H200_LIMITS, shared_bytes_per_multiprocessor=64_000)
# Short, middle and long rows. Each ends a little into the second warp, so that no two warps that meet count alike:
# between equal counts the sides of a merge may be swapped without changing a bit.
SHAPES = (
    (SMALL_LIMITS, "telling", 96, 512 + 160),
    (SMALL_LIMITS, "telling", 32, 4096 + 160),
    (SMALL_LIMITS, "telling", 24, 20_480 + 160),
    (SMALL_LIMITS, "telling", 32, 131_072 + 160),
    (TIGHT_LIMITS, "telling", 32, 20_480 + 160),
    # One rounding inside a vec4 reaches rstd in one or two of a hundred such rows.
    (CRAMPED_LIMITS, "almost constant", 256, 8192 + 160),
)
ORDERS = (0, 1, 2, 3)  # a missing barrier shows in some orders of the threads only

DROPPED = (
    (r"\b__syncthreads", "barrier"),
    (r"\b__syncwarp", "warp barrier"),
    (r"\bbarrier_wait", "wait"),
    (r"\bcopies_wait<\d+>", "wait"),
)
# Text of one load, per file: read one element late.
LATE = {
    "reference_order": (("row[i];", "row[i + 1];"), ("x[i], m)", "x[i + 1], m)")),
    "reference_order_pipelined": (
        ("v[k] = x[first + CHAINS * k];", "v[k] = x[first + CHAINS * k + 1];"),
        ("unpack(held[first + CHAINS * i])", "unpack(held[first + CHAINS * i + 1])"),
        ("from + i * CHAINS)", "from + i * CHAINS + 1)"),  # a stage's copies
        ("x + start + i * CHAINS)", "x + start + i * CHAINS + 1)"),  # those of a ragged stage
        ("? data[ahead * WARP]", "? data[ahead * WARP + 1]"),
        ("? reciprocals[ahead]", "? reciprocals[ahead + 1]"),
        ("unpack(data[(i + 2) * WARP])", "unpack(data[(i + 2) * WARP + 1])"),
        ("reciprocals[i + 3], end.z", "reciprocals[i + 4], end.z"),
        ("end = ends[i / 4 * WARP];", "end = ends[i / 4 * WARP + 1];"),
        ("x[start + (size_t)r * vectors]", "x[start + (size_t)r * vectors + 1]"),
    ),
}  # fmt: skip
# Mutants that change nothing, each with its reason; everything else has to be caught.
EQUIVALENT: dict[str, dict[str, str]] = {
    "reference_order_pipelined": {
        "drop wait in chain_squares: barrier_wait(ring.full": (
            "the wait for `chained` that follows implies it here; on the device it acquires the copies"
        )
    }
}


def closing(text: str, start: int) -> int:
    """Index just past the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    raise ValueError("unbalanced")


def arguments(text: str, start: int) -> list[str]:
    """The arguments of the call whose parenthesis opens at `start`."""
    inside, parts, depth, last = text[start + 1 : closing(text, start) - 1], [], 0, 0
    for i, c in enumerate(inside):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(c, 0)
        if c == "," and depth == 0:
            parts.append(inside[last:i].strip())
            last = i + 1
    return [*parts, inside[last:].strip()]


def calls(source: str, pattern: str) -> list[tuple[int, int]]:
    """(start, end) of each call outside the device-only functions and outside definitions and comments."""
    skipped = [m.span() for m in re.finditer(r"#ifndef KBSUB_HOST.*?#endif|//[^\n]*", source, re.DOTALL)]
    found = []
    for match in re.finditer(pattern + r"\(", source):
        at = match.start()
        end = closing(source, match.end() - 1)
        defines = source[end : end + 2].lstrip()[:1] == "{" and re.search(r"\w\s+$", source[:at])
        if not defines and not any(a <= at < b for a, b in skipped):
            found.append((at, end))
    return found


def mutants(stem: str, source: str) -> Iterator[tuple[str, str]]:
    """(name, changed source) for each mutant of a file."""

    def place(at: int) -> str:
        """The function around `at`, to recognise a mutant by when lines move."""
        names = re.findall(r"[\w>*&)]\s+(\w+)\([^;{}]*?\)\s*\{", LAUNCH_BOUNDS.sub(" ", source[:at]))
        return next(name for name in reversed(names) if name not in ("for", "if", "while", "switch"))

    for pattern, kind in DROPPED:
        for at, end in calls(source, pattern):
            yield f"drop {kind} in {place(at)}: {source[at:end]}", source[:at] + "(void)0" + source[end:]
    for at, end in calls(source, r"\bcombine"):
        opening = source.index("(", at)
        a, b = arguments(source, opening)
        yield f"swap merge in {place(at)}: {source[at:end]}", f"{source[:at]}combine({b}, {a}){source[end:]}"
    for at, end in calls(source, r"\b__fmaf_rn"):
        a, b, c = arguments(source, source.index("(", at))
        changed = f"__fadd_rn(__fmul_rn({a}, {b}), {c})"
        yield f"unfuse in {place(at)}: {source[at:end]}", source[:at] + changed + source[end:]
    for old, new in LATE[stem]:
        assert old in source, f"{stem}: {old!r} is gone; name another load in LATE"
        yield f"read late: {new}", source.replace(old, new, 1)


def almost_constant_rows(rows: int, n: int) -> torch.Tensor:
    """Ones, but for the first two vec4 of one chain: M2 is small, and the last bits of what these add to it remain."""
    torch.manual_seed(n)
    x = torch.ones(rows, n)
    for row in range(rows):
        chain = int(torch.randint(128, ()))
        for start in (4 * chain, 4 * chain + 512):
            x[row, start : start + 4] += torch.randn(4)
    return x


def telling_rows(rows: int, n: int) -> torch.Tensor:
    """Rows in which a changed bit reaches the result; among 128 random chains the last bit of one hardly ever does.

    Eight kinds in turn: everything random; numbers in one chain (twice), in two warps and zeros elsewhere; a constant
    in each chain (all of M2 then comes from the merges), everywhere and in two warps; numbers in a few vec4 of one
    chain (each rounding then counts), in two rows of eight.
    """
    torch.manual_seed(n)
    chain = torch.arange(n) // 4 % 128
    x = torch.randn(rows, n) * 3 + 1
    for row in range(rows):
        kind = row % 8
        used = torch.randperm(min(128, n // 4))[: {1: 1, 2: 1, 6: 1, 7: 1}.get(kind, 128)]
        warps = torch.randperm(4)[: 2 if kind in (4, 5) else 4]
        if kind in (3, 5):
            x[row] = (torch.randn(128) + 100 * torch.randn(4).repeat_interleave(32))[chain]
        if kind >= 6:
            keep = torch.randperm(n // 512 + 1)[:3]  # of the places of a chain, the last one too
            x[row, ~torch.isin(torch.arange(n) // 512, keep)] = 0
        x[row, ~(torch.isin(chain, used) & torch.isin(chain // 32, warps))] = 0
    return x


@functools.cache
def problem(kind: str, rows: int, n: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    """(x, state dict, what the model makes of them)."""
    x = {"telling": telling_rows, "almost constant": almost_constant_rows}[kind](rows, n)
    state = {"ln.weight": torch.randn(n), "ln.bias": torch.randn(n)}
    arrays = (x.numpy(), state["ln.weight"].numpy(), state["ln.bias"].numpy())
    return x, state, contract.layer_norm(*arrays, 1e-5)


def caught(candidate: str, kernels: str) -> str | None:
    """What shows that `kernels` are not the reference order, or None when nothing does."""
    for order in ORDERS:
        for limits, kind, rows, n in SHAPES:
            space: dict[str, Any] = host_namespace(candidate, limits, seed=order, workers=1, timeout_s=20)
            space["CUDA_SOURCE"] = kernels
            x, state, expected = problem(kind, rows, n)
            model = space["ModelNew"]((n,))
            model.load_state_dict(state)
            try:
                wrong = disagreement(model, x, expected=expected)
            except HostFault as fault:
                return str(fault)
            if wrong:
                return wrong[0]
    return None


def cases() -> list[Any]:
    """Every mutant. `make test` runs those of the smaller file, and of the other the first of a kind in a function."""
    rows: list[Any] = []
    seen: set[tuple[str, str]] = set()
    for stem in BIT_IDENTICAL:
        space: dict[str, Any] = {"__name__": "candidate"}
        exec(compile(source_of(stem), stem, "exec"), space)
        found = mutants(stem, space["CUDA_SOURCE"])
        for name, changed in found:
            kind = (stem, name.split(":")[0])
            often = stem == "reference_order" or kind not in seen
            seen.add(kind)
            marks = [] if often else [pytest.mark.slow]
            rows.append(pytest.param(stem, changed, id=f"{stem}: {name}", marks=marks))
    return rows


@pytest.mark.parametrize("stem", BIT_IDENTICAL)
def test_the_kernel_itself_is_not_caught(stem: str) -> None:
    source = source_of(stem)
    space: dict[str, Any] = {"__name__": "candidate"}
    exec(compile(source, stem, "exec"), space)
    assert caught(source, space["CUDA_SOURCE"]) is None


@pytest.mark.parametrize("stem,kernels", cases())
def test_mutant_is_caught(stem: str, kernels: str, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id.split(": ", 1)[1]
    reason = next((why for text, why in EQUIVALENT.get(stem, {}).items() if text in name), None)
    found = caught(source_of(stem), kernels)
    assert (found is None) == (reason is not None), reason or "no shape and no thread order shows this mutant"
