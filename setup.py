"""Maps the top-level folders to the import packages kbsub.adapters, kbsub.eval and kbsub.submissions.

Everything else about the distribution is in pyproject.toml. Two things need code: every folder that holds a
packaged file is a package (so a new folder cannot be forgotten), and the pin travels inside the wheel.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
TOP_FOLDERS = ("adapters", "eval", "submissions")
DATA = ["*.toml", "*.json", "*.md", "*.hpp", "*.h", "*.cpp", "*.cu", "*.typed", "*.html"]


def packages() -> list[str]:
    """Dotted names of every folder under the three top-level ones that holds a packaged file."""
    patterns = ("*.py", *DATA)
    folders = {file.parent for top in TOP_FOLDERS for glob in patterns for file in (ROOT / top).rglob(glob)}
    names = (folder.relative_to(ROOT).parts for folder in folders if "__pycache__" not in folder.parts)
    return sorted(".".join(("kbsub", *parts)) for parts in names)


class BuildWithPin(build_py):
    """Puts KERNELBENCH_COMMIT beside adapters/ in a wheel; an editable install reads the one at the root."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "kbsub", "adapters", "KERNELBENCH_COMMIT")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / "KERNELBENCH_COMMIT", target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        pin = [] if self.editable_mode else [str(Path(self.build_lib, "kbsub", "adapters", "KERNELBENCH_COMMIT"))]
        return [*super().get_outputs(include_bytecode), *pin]


setup(
    packages=packages(),
    package_dir={f"kbsub.{top}": top for top in TOP_FOLDERS},
    package_data=dict.fromkeys(packages(), DATA),
    cmdclass={"build_py": BuildWithPin},
)
