"""Configuration and fixtures of all tests. Fixtures of one directory are in its own conftest."""

import gc
import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

import baton.rpc  # noqa: F401 - before anything loads grpc, whose fork handlers would break the child processes of tests
from tests.scale import IS_LONG

LONG_TIMEOUT_S = 3600

# Properties have no deadline, because a slow machine does not make them wrong.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove `BATON_` variables of the shell, so that they do not change test results."""
    for name in [name for name in os.environ if name.startswith("BATON_") and name != "BATON_TEST_LONG"]:
        monkeypatch.delenv(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give full-size tests an hour unless they set a timeout, and skip GPU tests without a GPU."""
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    has_gpu = any(item.get_closest_marker("gpu") for item in items) and _has_gpu()
    for item in items:
        is_long = IS_LONG or item.get_closest_marker("long")
        if is_long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
        may_run = has_gpu or (item.get_closest_marker("interpreted") and os.environ.get("TRITON_INTERPRET") == "1")
        if item.get_closest_marker("gpu") and not may_run:
            item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    """Exclude collected tests and imported modules from garbage collection, which took as long as a test."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which tests did not run, and why."""
    skips = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    terminalreporter.section("not run")
    for reason, count in skips.most_common():
        terminalreporter.line(f"{count:5} skipped: {reason}")
    if not IS_LONG:
        terminalreporter.line("      full sizes, and what is marked `long`: `make test-long`")


def _reason(report: pytest.TestReport) -> str:
    """The reason of a skip, which pytest reports as (file, line, text)."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
