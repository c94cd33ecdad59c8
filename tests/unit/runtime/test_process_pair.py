"""Two processes of which one reads what the other owns, and how they end."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from baton.runtime.child import process_pair
from baton.runtime.child.process_pair import ProcessPairFailed, run_pair

OWNER = """
import sys
print("the address", flush=True)
sys.stdin.read()
"""
READER = """
import sys
print(sys.stdin.readline().strip().upper())
"""
HANGING = "import time; time.sleep(600)"
FAILING = "raise SystemExit('no such device')"
SILENT = ""
ENOUGH_S = 60.0
SHORT_S = 2.0
"""Enough to start a process on a busy machine."""

Started = list[subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Write the modules, and record the processes that are started."""
    for name, text in (
        ("owner_main", OWNER), ("reader_main", READER), ("hanging", HANGING), ("failing", FAILING), ("silent", SILENT)
    ):  # fmt: skip
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(process_pair, "EXIT_TIMEOUT_S", 1.0)
    found: Started = []
    start = subprocess.Popen

    def recorded(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        found.append(start(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    return found


def test_the_reader_gets_the_owners_line(started: Started) -> None:
    assert run_pair(["owner_main"], ["reader_main"], ENOUGH_S) == "THE ADDRESS\n"
    assert [process.returncode is not None for process in started] == [True, True]


@pytest.mark.parametrize(
    ("owner", "reader", "timeout_s", "named"),
    [
        ("owner_main", "hanging", SHORT_S, "no answer within 2 s"),
        ("owner_main", "failing", ENOUGH_S, "no such device"),
        ("failing", "reader_main", ENOUGH_S, "no such device"),
        ("silent", "reader_main", ENOUGH_S, "printed nothing"),
        ("hanging", "reader_main", 1.0, "printed nothing"),
    ],
)
def test_a_process_that_fails_or_hangs_is_named_and_both_end(
    owner: str, reader: str, timeout_s: float, named: str, started: Started
) -> None:
    with pytest.raises(ProcessPairFailed, match=named):
        run_pair([owner], [reader], timeout_s)
    assert len(started) == 2
    assert [process.returncode is not None for process in started] == [True, True]


def test_an_owner_ends_if_its_reader_cannot_be_started(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    start: Any = subprocess.Popen

    def only_one(*arguments: Any, **options: Any) -> Any:
        if started:
            raise OSError("cannot allocate memory")
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", only_one)
    with pytest.raises(ProcessPairFailed, match="cannot allocate memory"):
        run_pair(["owner_main"], ["reader_main"], ENOUGH_S)
    assert started[0].returncode is not None
