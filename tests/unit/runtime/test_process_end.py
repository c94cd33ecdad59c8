"""How a process has ended, seen from a process that is not its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.runtime.process.process_end import ProcessEnd, describe_exit, describe_unknown_exit

GRANDCHILD = (
    "import os, sys\n"
    "pid = os.fork()\n"
    "if pid == 0:\n"
    "    sys.stdin.read(1); os._exit(7)\n"
    "print(pid, flush=True); os.waitpid(pid, 0); print('reaped', flush=True)\n"
)
KERNEL_TELLS = tuple(int(part) for part in os.uname().release.split(".")[:2] if part.isdecimal()) >= (6, 15)


@pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, 0])
def test_exit_of_a_grandchild_is_known_after_it_was_reaped(number: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", GRANDCHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    end = ProcessEnd(int(parent.stdout.readline()))
    assert end.exit_code is None
    if number:
        os.kill(end.pid, number)
    else:
        parent.stdin.write("x")
        parent.stdin.flush()
    assert parent.stdout.readline() == "reaped\n"
    assert end.exit_code == ((-number if number else 7) if KERNEL_TELLS else None)
    end.close()
    end.close()
    assert end.exit_code is None
    parent.communicate()


def test_process_that_does_not_exist_has_no_exit_code() -> None:
    assert ProcessEnd(2**22 + 1).exit_code is None


def test_kernel_kills_are_counted_from_the_start_of_the_watch(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 1\noom_kill 3\n")
    end = ProcessEnd(os.getpid(), vmstat=vmstat)
    assert end.num_kernel_kills == 0
    vmstat.write_text("oom_kill 5\n")
    assert end.num_kernel_kills == 2
    vmstat.unlink()
    assert end.num_kernel_kills == 0
    end.close()


@pytest.mark.parametrize(
    ("code", "kills", "text"),
    [
        (0, 0, "exited with code 0"),
        (3, 0, "exited with code 3"),
        (-9, 0, "killed by SIGKILL"),
        (-11, 1, "killed by SIGSEGV"),
        (-40, 0, "killed by signal 40"),
        (-9, 2, "killed by SIGKILL, and the kernel has ended 2 process(es) for lack of memory (dmesg)"),
    ],
)
def test_exit_is_described(code: int, kills: int, text: str) -> None:
    assert describe_exit(code, kills) == text


@pytest.mark.parametrize(
    ("kills", "text"),
    [
        (0, "its actor died; its log: w0.log"),
        (1, "its actor died, and the kernel has ended 1 process(es) for lack of memory (dmesg); its log: w0.log"),
    ],
)
def test_unknown_exit_is_described_by_what_is_known(kills: int, text: str) -> None:
    """Linux before 6.15 does not tell how a process ended that is not a child."""
    assert describe_unknown_exit("its actor died", kills, "w0.log") == text
