"""Fixtures and hooks of all tests: environment, tiers, time limits and the list of tests that did not run."""

import faulthandler
import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import baton.rpc  # noqa: F401 - must be loaded before grpc, whose fork handlers would break child processes
from tests import shards
from tests.file_scheduling import FileScheduling
from tests.frozen_objects import nothing_unfrozen
from tests.scale import IS_LONG

LONG_TIMEOUT_S = 3600
EXIT_S = 120
"""Time that a test process gets to end after its last test."""

# The result of a property must not depend on the speed of the machine. Only long runs draw new examples each time.
settings.register_profile("baton", deadline=None, derandomize=not IS_LONG, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")


@pytest.fixture(scope="session", autouse=True)
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the run files of the tests in a directory of their own, apart from the user's."""
    directory = tmp_path_factory.mktemp("run-files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_RUN_DIR", str(directory))
        yield directory


@pytest.fixture(scope="session", autouse=True)
def frozen_objects() -> Iterator[None]:
    """Keep what `pytest_collection_finish` has frozen."""
    with nothing_unfrozen():
        yield


@pytest.fixture(autouse=True)
def remove_baton_variables(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
    """Remove the `BATON_` variables of the shell, so that results do not depend on them."""
    for name in [name for name in os.environ if name.startswith("BATON_") and name != "BATON_TEST_LONG"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATON_RUN_DIR", str(run_dir))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    """Distribute files as `tests/file_scheduling.py` says, if files are distributed at all."""
    if config.getvalue("dist") != "loadfile":
        return None
    return FileScheduling(config, log)


def pytest_collectstart() -> None:
    """Collect without garbage collections: what is imported and collected stays until the end.

    `pytest_collection_finish` allows them again. The process that distributes tests collects nothing.
    """
    gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its tier and time limit; skip GPU tests without a GPU; keep one shard; mix files."""
    _keep_shard(config, items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {path: at for at, path in enumerate(shards.mixed(list(dict.fromkeys(map(_file_of, items)))))}
        items.sort(key=lambda item: places[_file_of(item)])
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    has_gpu = any(item.get_closest_marker("gpu") for item in items) and _has_gpu()
    for item in items:
        for tier in _tiers(item):
            item.add_marker(tier)
        is_long = IS_LONG or item.get_closest_marker("long")
        if is_long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
        may_run = has_gpu or (item.get_closest_marker("interpreted") and os.environ.get("TRITON_INTERPRET") == "1")
        if item.get_closest_marker("gpu") and not may_run:
            item.add_marker(no_gpu)


def _file_of(item: pytest.Item) -> str:
    return item.path.as_posix()


def _keep_shard(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other shards, if a shard is asked for."""
    if not (text := os.environ.get(shards.VARIABLE, "")):
        return
    try:
        shard = shards.Shard.parse(text)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    count = Counter(map(_file_of, items))
    files = shard.files({path: shards.weight_of(path, number) for path, number in count.items()})
    config.hook.pytest_deselected(items=[item for item in items if _file_of(item) not in files])
    items[:] = [item for item in items if _file_of(item) in files]


_OF_MODELS = {"torch", "kernels", "decoder", "gloo", "auto", "staged", "demo", "llama"}
"""Implementations in contract suites that import torch."""


def _tiers(item: pytest.Item) -> list[str]:
    """Return the markers for a test's folder and, in contract suites, for its implementation."""
    path = item.path.as_posix()
    if "/tests/unit/model/" in path or "/tests/unit/bench/" in path or path.endswith("/test_demo_model.py"):
        return ["model"]
    if "/tests/contract/" not in path:
        return []
    words = set(re.findall(r"[a-z_]+", item.name.partition("[")[2]))
    found = ["integration"] if words & {"redis", "nixl", "auto"} else []
    return [*found, "model"] if words & _OF_MODELS else found


def pytest_collection_finish() -> None:
    """Prepare the process for its tests.

    Thousands of tests and what they import stay until the end, so garbage collection need not look at them.
    torch computes with one thread: the cores are shared with other test processes, and threads that wait for
    each other there cost several times the processor time.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that did not run, with the reason."""
    skips = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    terminalreporter.section("not run")
    for reason, count in skips.most_common():
        terminalreporter.line(f"{count:5} skipped: {reason}")
    if not IS_LONG:
        terminalreporter.line("      full sizes, and tests marked `long`: `make test-long`")


def pytest_unconfigure() -> None:
    """End the process if it does not end by itself, and show where each of its threads is.

    Otherwise a thread that a test has left behind would keep it for ever, after a summary without a failure.
    """
    faulthandler.dump_traceback_later(EXIT_S, exit=True, file=sys.__stderr__)


def _reason(report: pytest.TestReport) -> str:
    """Return the reason of a skip. Pytest reports it as (file, line, text)."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
