"""The wheel and the editable install, as a user gets them: built here, imported by a child that sees nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib import metadata, util
from pathlib import Path

import pytest

from kbsub.adapters.pin import PIN
from support.paths import ROOT
from support.wheel import build_wheel, copy_sources, pip

# What an installation is asked, from an empty folder. torch must not be imported by any of it.
QUESTIONS = """
import json, sys
from pathlib import Path
import kbsub.adapters.pin, kbsub.adapters.checkout, kbsub.eval, kbsub.submissions
import kbsub.eval.cli
print(json.dumps({
    "pin": kbsub.adapters.pin.PIN,
    "builtin_eval": eval("1 + 1"),
    "adapters": str(Path(kbsub.adapters.__file__).resolve().parent),
    "torch": "torch" in sys.modules,
}))
"""


def answers(code: str, site: Path, folder: Path) -> dict:
    """What `code` prints, run in `folder` with `site` installed and this interpreter's other packages importable.

    -S: the .pth files of this interpreter are not read, so its own editable install of the repository is not seen.
    """
    others = [entry for entry in sys.path if entry.endswith("site-packages")]
    head = f"import site, sys; site.addsitedir({str(site)!r}); sys.path += {others!r}\n"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", head + code]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def cannot_build() -> bool:
    if util.find_spec("pip") is None or util.find_spec("setuptools") is None:
        return True
    return int(metadata.version("setuptools").split(".")[0]) < 77  # as [build-system] says


needs_pip = pytest.mark.skipif(
    cannot_build(), reason="this interpreter cannot build a wheel: pip install pip 'setuptools>=77'"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel"))


@needs_pip
def test_the_wheel_works_from_an_empty_folder(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    got = answers(QUESTIONS, site, tmp_path)
    want = {"pin": PIN, "builtin_eval": 2, "adapters": str(site / "kbsub" / "adapters"), "torch": False}
    assert got == want


@needs_pip
def test_the_wheel_holds_every_packaged_file_and_nothing_else(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("kbsub/")}
    suffixes = {".py", ".toml", ".json", ".md", ".hpp", ".h", ".cpp", ".cu", ".typed", ".html"}
    expected = {
        f"kbsub/{file.relative_to(ROOT).as_posix()}"
        for top in ("adapters", "eval", "submissions")
        for file in (ROOT / top).rglob("*")
        if file.suffix in suffixes and "__pycache__" not in file.parts
    }
    expected |= {"kbsub/adapters/KERNELBENCH_COMMIT"}
    expected |= {f"kbsub/eval/ci/{name}.yml" for name in ("action", "github", "gitlab")}
    assert inside == expected, f"missing {sorted(expected - inside)}, unexpected {sorted(inside - expected)}"


@needs_pip
def test_the_wheel_carries_the_licences_and_the_command(wheel):
    archive = zipfile.ZipFile(wheel)
    info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA")).rsplit("/", 1)[0]
    names = set(archive.namelist())
    for licence in ("LICENSE", "NOTICE", "licenses/PYTORCH_251_LICENSE.txt"):
        assert f"{info}/licenses/{licence}" in names, sorted(names)
    shipped = archive.read(f"{info}/licenses/licenses/PYTORCH_251_LICENSE.txt")
    assert shipped == (ROOT / "licenses/PYTORCH_251_LICENSE.txt").read_bytes()
    assert "kbsub = kbsub.eval.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    meta = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    extras = {"cuda12", "cuda13", "kernelbench", "plots", "cluster", "pandas", "docs", "test", "dev"}
    assert (meta["Name"], meta["Requires-Python"], set(meta.get_all("Provides-Extra"))) == (
        "kb-submissions",
        ">=3.10",
        extras,
    )


@needs_pip
def test_an_editable_install_sees_the_source_folders(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    copy_sources(source)
    pip("install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site), "--editable", str(source))
    got = answers(QUESTIONS, site, tmp_path)
    want = {"pin": PIN, "builtin_eval": 2, "adapters": str((source / "adapters").resolve()), "torch": False}
    assert got == want
    (source / "eval" / "added_later.py").write_text("VALUE = 7\n")
    code = "import json, kbsub.eval.added_later as m; print(json.dumps({'value': m.VALUE}))"
    assert answers(code, site, tmp_path) == {"value": 7}


def test_the_running_installation_is_this_repository():
    """Otherwise every other test would judge somebody else's files."""
    import kbsub.eval

    assert Path(kbsub.eval.__file__).resolve().parent == ROOT / "eval"


def test_help_needs_no_torch_and_is_fast():
    code = "import sys; sys.modules['torch'] = None; from kbsub.eval.cli import main; sys.argv[1:] = ['--help']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "fetch" in done.stdout, done.stderr


@pytest.mark.skipif(sys.version_info < (3, 10), reason="needs Python 3.10")
def test_runtime_requirements_are_importable_here():
    """A package that the code needs but pyproject.toml forgot would be missing on a fresh machine."""
    requires = metadata.metadata("kb-submissions").get_all("Requires-Dist") if _installed() else []
    runtime = [line.split(";")[0] for line in requires or [] if "extra ==" not in line]
    missing = [name for name in runtime if not _has(name)]
    assert not missing


def _installed() -> bool:
    try:
        metadata.version("kb-submissions")
    except metadata.PackageNotFoundError:
        return False
    return True


def _has(requirement: str) -> bool:
    name = requirement.split(">")[0].split("=")[0].split("[")[0].strip()
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return name == "tomli" and sys.version_info >= (3, 11)
    return True
