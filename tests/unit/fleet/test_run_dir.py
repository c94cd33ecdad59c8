"""The directory and the processes of a run are removed however it ends, and no other process is."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from baton.fleet.processes.run_dir import RUN_ID_VARIABLE, SWEEP_TIMEOUT_S, TERM_WAIT_S, RunDir, processes_of

OWNER = """
import subprocess, sys, time
from baton.fleet.processes.run_dir import RunDir
run = RunDir()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print(run.run_id, run.path, child.pid, flush=True)
time.sleep(300)
"""


def wait_until_gone(pid: int, path: Path, limit_s: float = 60.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if not psutil.pid_exists(pid) and not path.exists():
            return True
        time.sleep(0.05)
    return False


def test_processes_of_a_killed_owner_end_within_ten_seconds() -> None:
    assert TERM_WAIT_S + SWEEP_TIMEOUT_S < 10.0
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    _, path, child = owner.stdout.readline().split()
    assert psutil.pid_exists(int(child))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert wait_until_gone(int(child), Path(path))


def test_close_ends_only_processes_of_the_run() -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    run = RunDir()
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(300)"],
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()  # its environment is empty for a moment after Popen returned
    child.stdout.close()
    try:
        assert [process.pid for process in processes_of(run.run_id)] == [child.pid]
        assert run.path.stat().st_mode & 0o077 == 0, "only the owner can read it"
        run.close()
        child.wait(timeout=60)
        assert stranger.poll() is None
        assert wait_until_gone(child.pid, run.path)
        assert RUN_ID_VARIABLE not in os.environ
    finally:
        stranger.kill()
        stranger.wait()
