"""Log directories of runs: one per run, and only the newest are kept."""

import os
from datetime import datetime
from pathlib import Path

from baton.fleet.log_directories import KEPT_RUNS, new_log_directory

ENDED = 2**22 + 1
"""More than the largest process id of Linux."""


def test_directories_of_old_runs_are_removed(tmp_path: Path) -> None:
    runs = [tmp_path / f"20260101-0000{second:02}-{ENDED}" for second in range(KEPT_RUNS + 3)]
    running = tmp_path / f"20250101-000000-{os.getpid()}"
    others = [tmp_path / name for name in ("notes", "1126-020019", f"20250101-000000-{ENDED}x")]
    for path in (*runs, running, *others):
        path.mkdir()
        (path / "up.log").touch()
    found = new_log_directory(tmp_path, datetime(2026, 11, 26, 3, 4, 5))
    assert found == tmp_path / f"20261126-030405-{os.getpid()}"
    assert set(tmp_path.iterdir()) == {*runs[3:], running, *others}


def test_directory_of_logs_need_not_exist(tmp_path: Path) -> None:
    assert new_log_directory(tmp_path / "new", datetime(2026, 1, 2)).parent == tmp_path / "new"
