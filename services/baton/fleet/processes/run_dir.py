"""The private directory and the processes of one `baton up`, which are removed however it ends.

Processes are recognized by an environment variable that they inherit.
"""

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from baton.runtime.process.process import python_module

RUN_ID_VARIABLE = "BATON_RUN_ID"
TERM_WAIT_S = 1.0
SWEEP_TIMEOUT_S = 8.0
_BASE = Path("/tmp")
"""Not TMPDIR, because the directory holds sockets of Ray and Redis. A socket path has at most 107
characters."""


class RunDir:
    """A private directory, and a reaper process that cleans up if this process is killed.

    run_id: value of the environment variable BATON_RUN_ID. Every process that is started from now on inherits
        it, also Ray's processes and their children.
    path: the directory.
    """

    def __init__(self) -> None:
        self.run_id = secrets.token_hex(8)
        self.path = Path(tempfile.mkdtemp(prefix="baton-", dir=_BASE if _BASE.is_dir() else None))
        os.environ |= {
            RUN_ID_VARIABLE: self.run_id,
            "SPT_NOENV": "1",  # else the process titles that Ray sets would overwrite the variable
        }
        reaper_environ = {name: value for name, value in os.environ.items() if name != RUN_ID_VARIABLE}
        self._reaper = subprocess.Popen(
            [*python_module("baton.fleet.processes.reaper"), self.run_id, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=reaper_environ,
            start_new_session=True,
        )

    def close(self) -> list[int]:
        """End all processes of this run and remove the directory. Return the pids that are left.

        Can be called twice.
        """
        os.environ.pop(RUN_ID_VARIABLE, None)
        assert self._reaper.stdin is not None
        with suppress(OSError):
            self._reaper.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._reaper.wait(SWEEP_TIMEOUT_S + TERM_WAIT_S)
        return [process.pid for process in processes_of(self.run_id)]


def sweep(run_id: str, path: Path) -> list[int]:
    """End all processes of a run with SIGTERM, then SIGKILL, and remove its directory.

    Returns the pids of processes that did not end within `SWEEP_TIMEOUT_S`.
    """
    deadline_s = time.monotonic() + SWEEP_TIMEOUT_S
    left = processes_of(run_id)
    for process in left:
        with suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(left, timeout=TERM_WAIT_S)
    # A loop, because a process that was just being started may appear only now.
    while (left := processes_of(run_id)) and time.monotonic() < deadline_s:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.2)
    shutil.rmtree(path, ignore_errors=True)
    return [process.pid for process in left]


def processes_of(run_id: str) -> list[psutil.Process]:
    """Return the living processes of a run, without this process."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with suppress(psutil.Error, OSError):
            if process.environ().get(RUN_ID_VARIABLE) == run_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
