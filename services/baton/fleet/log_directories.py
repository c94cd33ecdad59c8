"""Names the log directory of a run, and removes those of old runs."""

import re
import shutil
from datetime import datetime
from os import getpid
from pathlib import Path

import psutil

KEPT_RUNS = 20
_NAME = re.compile(r"\d{8}-\d{6}-(?P<pid>\d+)")


def new_log_directory(parent: Path, now: datetime) -> Path:
    """Return the directory for the logs of this process, and remove all but the newest `KEPT_RUNS` others.

    A directory of a running process is kept. What cannot be removed is left there.
    """
    runs = sorted((path for path in parent.glob("*") if _NAME.fullmatch(path.name)), reverse=True)
    for path in runs[KEPT_RUNS:]:
        if not path.is_symlink() and not _is_running(path.name):
            shutil.rmtree(path, ignore_errors=True)
    return parent / f"{now:%Y%m%d-%H%M%S}-{getpid()}"


def _is_running(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and psutil.pid_exists(int(match["pid"]))
