"""What every test shares: the markers' conditions, and the end-of-run list of what was skipped and why."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

import pytest

if os.environ.get("PYTEST_XDIST_WORKER"):
    # One worker a core: the OpenMP pools of several workers would fight over the same cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@lru_cache(maxsize=None)
def missing_gpu() -> str | None:
    """Why `gpu` tests cannot run here, or None."""
    import torch

    if torch.cuda.is_available():
        return None
    return "gpu: torch sees no NVIDIA GPU (run `make test` on a machine with one)"


@lru_cache(maxsize=None)
def missing_checkout() -> str | None:
    """Why `kernelbench` tests cannot run here, or None."""
    from kbsub.adapters.checkout import CheckoutError, find_checkout

    try:
        find_checkout()
    except CheckoutError as error:
        return f"kernelbench: {str(error).splitlines()[0]}"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too (make test-all)")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("slow: make test-all")
    for marker, reason in (("gpu", missing_gpu), ("kernelbench", missing_checkout)):
        if item.get_closest_marker(marker) and (why := reason()):
            pytest.skip(why)


@pytest.fixture(scope="session")
def kernelbench():
    """The verified KernelBench checkout (`.path`, `.commit`); skips, with the mending command, where there is none."""
    if why := missing_checkout():
        pytest.skip(why)
    from kbsub.adapters.checkout import find_checkout

    return find_checkout()


@pytest.fixture(scope="module")
def warm_children() -> Iterator[None]:
    """Judges' and candidates' processes are forked from a server, outside any cell: see support/warm.py."""
    from support import warm

    with pytest.MonkeyPatch.context() as patch:
        warm.install(patch)
        yield


@pytest.fixture(scope="module")
def kept_compiles() -> Iterator[None]:
    """NVRTC's answers (compile_gate.compile_source) are kept from run to run: see support/compiled.py."""
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC: pip install 'kb-submissions[cuda13]'")
    from support import compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled.compile_gate, "compile_source", compiled.compile_source)
        yield


@pytest.fixture
def cold_children(warm_children: None) -> Iterator[None]:
    """For one test of a module whose children are forked: processes as the product starts them, in their cells."""
    from support import warm

    with pytest.MonkeyPatch.context() as patch:
        warm.uninstall(patch)
        yield


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ").strip()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = Counter(skip_reason(report) for report in terminalreporter.stats.get("skipped", []))
    terminalreporter.section("not certified by this run")
    if not reasons:
        terminalreporter.write_line("nothing was skipped")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count:4d} skipped  {reason}")
