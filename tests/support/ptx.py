"""The PTX of a small kernel, and what each of its stores holds: how nvcc contracts an expression."""

from __future__ import annotations

import re
from typing import Any

import pytest


def expressions(ptx: str) -> dict[str, Any]:
    """What each store of a straight-line kernel holds, as nested tuples over the loads; products commute."""
    value: dict[str, Any] = {}
    stored: dict[str, Any] = {}
    for line in ptx.split(";"):
        match = re.match(r"\s*([a-z0-9.]+)\s+(.*)", line.strip().split("\n")[-1])
        if not match:
            continue
        opcode, operands = match[1].replace(".rn", ""), [o.strip() for o in match[2].split(",")]
        if opcode == "ld.global.f32":
            value[operands[0]] = operands[1].partition("+")[2]
        elif opcode == "st.global.f32":
            stored[operands[0].partition("+")[2]] = value[operands[1]]
        elif re.fullmatch(r"(add|sub|mul|fma|rcp)\.f32", opcode):
            inputs = [value[o] for o in operands[1:]]
            factors = sorted(inputs[:2], key=repr) if opcode[:3] in ("add", "mul", "fma") else inputs[:2]
            value[operands[0]] = (opcode[:3], *factors, *inputs[2:])
    return stored


def ptx_of(source: str) -> str:
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC: pip install 'kb-submissions[cuda13]'")
    program = nvrtc.createProgram(source, "k.cu", (), ())
    nvrtc.compileProgram(program, ("--gpu-architecture=compute_90", "--fmad=true", "--ftz=false"))
    return str(nvrtc.getPTX(program).decode())
