"""What one `baton up` owns: a private directory, and every process that carries its mark. Both are gone when
it is, however it ended."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "BATON_RUN_ID"
TERM_WAIT_S = 1.0
SWEEP_LIMIT_S = 8.0
_BASE = Path("/tmp")
"""Not TMPDIR: Ray's and Redis's sockets lie below, and the path of a socket may have 107 characters at
most."""


class RunDir:
    """A directory that only we can read, and the reaper that removes it and our processes if we are killed.

    Every process started while the mark is in `os.environ` inherits it, Ray's own and their children too.
    """

    def __init__(self) -> None:
        self.run_id = secrets.token_hex(8)
        self.path = Path(tempfile.mkdtemp(prefix="baton-", dir=_BASE if _BASE.is_dir() else None))
        os.environ |= {
            MARK: self.run_id,
            "SPT_NOENV": "1",
        }  # the titles that Ray's processes give themselves would overwrite the mark
        unmarked = {name: value for name, value in os.environ.items() if name != MARK}
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "baton.fleet.processes.reaper", self.run_id, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=unmarked,
            start_new_session=True,
        )

    def close(self) -> None:
        """End what still carries our mark, and remove the directory. Safe to call twice."""
        os.environ.pop(MARK, None)
        assert self._reaper.stdin is not None
        with suppress(OSError):
            self._reaper.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._reaper.wait(SWEEP_LIMIT_S + TERM_WAIT_S)


def sweep(run_id: str, path: Path) -> list[int]:
    """End all processes marked with `run_id` and remove `path`. Returns pids that would not end within
    `SWEEP_LIMIT_S`."""
    deadline_s = time.monotonic() + SWEEP_LIMIT_S
    left = marked(run_id)
    for process in left:
        with suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(left, timeout=TERM_WAIT_S)
    while (
        left := marked(run_id)
    ) and time.monotonic() < deadline_s:  # a process that was just being started shows only now
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.2)
    shutil.rmtree(path, ignore_errors=True)
    return [process.pid for process in left]


def marked(run_id: str) -> list[psutil.Process]:
    """Living processes, ours aside, that carry the mark of `run_id`."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == run_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
