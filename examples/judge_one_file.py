"""Judge one candidate and say what was found: python examples/judge_one_file.py my_kernel.py level1_36

Exit code 0 when no verdict failed. Any machine will do: without a GPU nothing is official, and the last line says so.
"""

from __future__ import annotations

import sys

from kbsub.eval import judge


def main(candidate: str, task: str) -> int:
    verdict = judge(candidate, task, only=("official", "stress"))
    (row,) = verdict.rows.values()
    print(verdict)
    for name, end in (row.stages or {}).items():
        print(f"  {name}: {end.status} in {end.seconds:.1f} s {end.message or ''}".rstrip())
    if row.official is not None and row.official.speedup:
        print(f"upstream: {row.official.ms} ms, {row.official.speedup:.2f} times eager")
    print("certified by KernelBench's evaluator" if verdict.certified else "no official verdict on this machine")
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
