"""Gate the kernels that a branch changed: python examples/gate_pull_request.py origin/main kernels level1_36

Asks git which files of the folder differ from the base, and requires of each all that this machine can check. Prints an
annotation a failure (GitHub shows it on the line) and exits with 0 or 1. `kbsub ci github` has the same as a workflow.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kbsub.eval import gate
from kbsub.eval.report.annotations import github


def changed(base: str, folder: str) -> list[str]:
    """The candidate files of `folder` that were added or edited since the branch left `base`."""
    command = ["git", "diff", "-z", "--name-only", "--diff-filter=d", f"{base}...HEAD", "--", folder]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in names if Path(name).suffix == ".py"]


def main(base: str, folder: str, task: str) -> int:
    files = changed(base, folder)
    if not files:
        print(f"no candidate in {folder} differs from {base}")
        return 0
    found = gate(files, task, require=("correct-here",))
    print(found)
    for line in github(list(found.judged.values())):
        print(line)
    return found.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
