"""Selftest results apply to this machine only, and plans above them give a warning."""

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


CALIBRATION = new_calibration(400.0, 32, "high", "2026-01-01T00:00:00+00:00")


def test_calibration_loads_only_on_the_same_machine() -> None:
    assert calibration.load(Priority.HIGH) is None
    calibration.save(CALIBRATION)
    assert calibration.load(Priority.HIGH) == CALIBRATION
    calibration.save(replace(CALIBRATION, cpu="another"))
    assert calibration.load(Priority.HIGH) is None
    calibration.path().write_text("{")
    assert calibration.load(Priority.HIGH) is None


def test_calibration_of_a_higher_priority_is_ignored() -> None:
    calibration.save(CALIBRATION)
    assert [calibration.load(priority) for priority in (Priority.NORMAL, Priority.HIGH, Priority.REALTIME)] == [
        None,
        CALIBRATION,
        CALIBRATION,
    ]


def test_plan_above_the_calibrated_rate_gives_a_warning() -> None:
    assert warning(400, 12_000, 1, CALIBRATION) == ""
    assert "401 requests/s" in warning(401, 100, 1, CALIBRATION)
    assert "loadgen selftest" in warning(10, 13_000, 1, CALIBRATION)
    assert warning(401, 100, 2, CALIBRATION) == ""
    assert "until `loadgen selftest` has run" in warning(300, 100, 1, None)
    assert warning(250, 8_000, 1, None) == ""


def test_number_of_processes_follows_from_the_rates() -> None:
    assert [processes_for(rate, 0, CALIBRATION) for rate in (1, 400, 401, 1201)] == [1, 1, 2, 4]
    assert processes_for(1, 30_000, CALIBRATION) == 3
    assert processes_for(500, 0, None) == 2
