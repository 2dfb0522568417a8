"""Where a program of eval/measure finds files of the project: candidates, and the twins and tables of tests/.

Candidates travel inside the wheel; tests/ is in a checkout only.
"""

from __future__ import annotations

from pathlib import Path

from kbsub.eval.tasks.folder import submissions_roots

SUBMISSIONS = next(iter(submissions_roots()), Path("submissions")).resolve()


def project_path(relative: str, option: str) -> Path:
    """`relative` below the checkout that this code lies in, else below the working folder.

    FileNotFoundError, in words for the person who runs the program, when neither has it; `option` names the way out.
    """
    for root in (SUBMISSIONS.parent, Path.cwd()):
        if (root / relative).exists():
            return root / relative
    raise FileNotFoundError(
        f"{relative}: not found; it is part of a checkout of kb-submissions and in no wheel: "
        f"run this from a checkout, or name it with {option}"
    )
