"""The KernelBench commit this project is written against.

`KERNELBENCH_COMMIT` at the root of the repository is the one place that states it. A wheel carries a copy of that
file beside this module (setup.py puts it there); a checkout or an editable install reads the original.
"""

from __future__ import annotations

import re
from pathlib import Path

UPSTREAM_URL = "https://github.com/ScalingIntelligence/KernelBench.git"
PIN_FILE = "KERNELBENCH_COMMIT"


HERE = Path(__file__).resolve().parent


def read_pin(folders: tuple[Path, ...] = (HERE, HERE.parent)) -> str:
    """The pinned commit, 40 lower-case hex digits, from the first folder that holds `KERNELBENCH_COMMIT`.

    Raises FileNotFoundError when no folder holds it and ValueError when it is not one commit id.
    """
    for folder in folders:
        file = folder / PIN_FILE
        if file.is_file():
            commit = file.read_text(encoding="ascii").strip()
            if not re.fullmatch(r"[0-9a-f]{40}", commit):
                raise ValueError(f"{file}: expected one line of 40 hex digits, found {commit!r}")
            return commit
    raise FileNotFoundError(
        f"{PIN_FILE} is in none of {', '.join(map(str, folders))}: the installation is incomplete, "
        "mend it with: pip install --force-reinstall kb-submissions"
    )


PIN = read_pin()
