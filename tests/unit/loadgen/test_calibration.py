"""What a selftest proved is remembered for this machine only, and a plan that asks for more is told."""

from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.send.run.priority import Priority
from loadgen.send.selftest import calibration
from loadgen.send.selftest.calibration import new_calibration, processes_for, warning


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration.sys, "platform", "linux")


PROVED = new_calibration(400.0, 32, "high", "2026-01-01T00:00:00+00:00")


def test_it_is_found_again_unless_it_is_of_another_machine_or_broken() -> None:
    assert calibration.load(Priority.HIGH) is None
    calibration.save(PROVED)
    assert calibration.load(Priority.HIGH) == PROVED
    calibration.save(replace(PROVED, cpu="another"))
    assert calibration.load(Priority.HIGH) is None
    calibration.path().write_text("{")
    assert calibration.load(Priority.HIGH) is None


def test_what_a_process_proved_that_is_woken_sooner_says_nothing_of_this_one() -> None:
    calibration.save(PROVED)
    assert [calibration.load(priority) for priority in (Priority.NORMAL, Priority.HIGH, Priority.REALTIME)] == [
        None,
        PROVED,
        PROVED,
    ]


def test_a_plan_that_asks_for_more_is_told() -> None:
    assert warning(400, 12_000, 1, PROVED) == ""
    assert "401 requests/s" in warning(401, 100, 1, PROVED)
    assert "loadgen selftest" in warning(10, 13_000, 1, PROVED)
    assert warning(401, 100, 2, PROVED) == ""
    assert "until `loadgen selftest` has run" in warning(300, 100, 1, None)
    assert warning(250, 8_000, 1, None) == ""


def test_as_many_processes_as_it_takes() -> None:
    assert [processes_for(rate, 0, PROVED) for rate in (1, 400, 401, 1201)] == [1, 1, 2, 4]
    assert processes_for(1, 30_000, PROVED) == 3
    assert processes_for(500, 0, None) == 2
