"""What every test may count on: no network, one CPU thread, and commands as subprocesses."""

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from stand_in_server import StandIn

# Their assertions show the values that they compare, as those of the tests do
pytest.register_assert_rewrite("checks_of_heads", "runs", "stubs")
# Before torch or transformers are imported, and inherited by every subprocess.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ["HF_HUB_OFFLINE"] = "1"
# An example may take long on a busy machine
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

# No test ends in a power cut, and waiting for the disk is a tenth of a small run
os.fsync = lambda _: None

Door = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def door(tmp_path: Path) -> Door:
    """Runs `python -m harness.<name> <overrides>` in an empty folder, away from the checkout."""

    def run(
        name: str, *overrides: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", f"harness.{name}", *overrides],
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


@pytest.fixture
def stand_in() -> Iterator[Callable[[Mapping[str, Any]], StandIn]]:
    """Starts servers that answer by path what a test wants; they end with it."""
    opened: list[StandIn] = []

    def start(answers: Mapping[str, Any]) -> StandIn:
        opened.append(StandIn(answers))
        return opened[-1]

    yield start
    for server in opened:
        server.close()


@pytest.fixture(scope="module")
def no_plots() -> Iterator[None]:
    """For tests that run commands and look at no picture."""
    from runs import without_plots

    with without_plots():
        yield


@pytest.fixture(scope="module")
def few_samples() -> Iterator[None]:
    """For tests that run commands and are not about times or intervals either."""
    from runs import timed_little, without_plots

    with without_plots(), timed_little():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --renew-golden, which writes the golden files anew instead of comparing with them."""
    parser.addoption(
        "--renew-golden", action="store_true", help="write tests/golden and tests/numbers anew"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An hour for full counts; tests marked gpu are skipped on machines without one."""
    for item in items:
        if item.get_closest_marker("exhaustive") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))
    # torch is only imported if a test asks for a GPU
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session", autouse=True)
def composed_quickly() -> Iterator[None]:
    """Commands that run in this process are configured by `compositions`."""
    from compositions import composed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.cli._composed", composed)
        yield


@pytest.fixture(scope="session", autouse=True)
def analyses_shared(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Processes of one run of tests analyse each stored run once."""
    import runs

    if "PYTEST_XDIST_WORKER" in os.environ:
        runs.SHARED = tmp_path_factory.getbasetemp().parent


@pytest.fixture(scope="module", autouse=True)
def imports_set_aside() -> None:
    """Garbage collections look at what tests made, not at every imported module."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line of a run says how many tests were skipped, and why."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if hasattr(config, "workerinput") or reporter is None:
        return
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", [])
    )
    said = "; ".join(f"{count} because {reason}" for reason, count in reasons.items())
    sys.stdout.write(f"skipped: {said or 'nothing'}\n")
