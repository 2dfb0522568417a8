"""Maps the top-level folders to the import packages kbsub.adapters, kbsub.eval and kbsub.submissions.

Everything else about the distribution is in pyproject.toml. Two things need code: every folder that holds a
packaged file is a package (so a new folder cannot be forgotten), and the pin and the CI files travel inside the wheel.
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


# Files outside the three folders -> where a wheel has them; an editable install reads those at the root.
CARRIED = {
    "KERNELBENCH_COMMIT": "kbsub/adapters/KERNELBENCH_COMMIT",
    "action.yml": "kbsub/eval/ci/action.yml",
    "docs/ci/github.yml": "kbsub/eval/ci/github.yml",
    "docs/ci/gitlab.yml": "kbsub/eval/ci/gitlab.yml",
}


class BuildWithCarried(build_py):
    """Puts the CARRIED files into a wheel."""

    def carried(self) -> dict[Path, Path]:
        return {} if self.editable_mode else {ROOT / f: Path(self.build_lib, to) for f, to in CARRIED.items()}

    def run(self) -> None:
        super().run()
        for source, target in self.carried().items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *map(str, self.carried().values())]


setup(
    packages=packages(),
    package_dir={f"kbsub.{top}": top for top in TOP_FOLDERS},
    package_data=dict.fromkeys(packages(), DATA),
    cmdclass={"build_py": BuildWithCarried},
)
