"""Start, restart and stop of a supervised child process."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from baton.fleet.processes.supervisor import Child, ChildSpec, RestartBudget, RestartLimit, ServiceFailed

QUICK = RestartLimit(deaths=2, window_s=60.0, first_wait_s=0.01, max_wait_s=0.02)
SERVES = "print('hello'); print('ready 127.0.0.1:5', flush=True); import time; time.sleep(60)"


def spec(tmp_path: Path, code: str, **changes: float) -> ChildSpec:
    argv = [sys.executable, "-c", code]
    return ChildSpec(name="child", argv=argv, output=tmp_path / "child.out", **changes)  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_child_reports_its_address_and_stops(tmp_path: Path) -> None:
    child = Child(spec(tmp_path, SERVES))
    assert await child.start() == "127.0.0.1:5"
    assert (tmp_path / "child.out").read_text() == "hello\n"
    await child.stop(grace_s=5)
    assert not is_alive(child.pid)


async def test_error_of_a_child_that_ends_before_it_is_ready_contains_its_output(tmp_path: Path) -> None:
    with pytest.raises(ServiceFailed, match="exited with code 3 before it was ready: no such model"):
        await Child(spec(tmp_path, "import sys; print('no such model', file=sys.stderr); sys.exit(3)")).start()


async def test_child_that_never_becomes_ready_is_killed(tmp_path: Path) -> None:
    child = Child(spec(tmp_path, "import time; time.sleep(60)", start_timeout_s=0.2))
    with pytest.raises(ServiceFailed, match="not ready within"):
        await child.start()
    assert not is_alive(child.pid)


async def test_dead_child_is_restarted_as_a_new_process(tmp_path: Path) -> None:
    restarted = asyncio.Event()
    child = Child(spec(tmp_path, SERVES), limit=QUICK, on_restart=lambda *_: restarted.set())
    await child.start()
    first = child.pid
    watch = asyncio.create_task(child.supervise())
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(10):
        await restarted.wait()
    assert child.pid != first
    assert child.restarts == 1
    await child.stop(grace_s=5)
    await watch


async def test_supervision_fails_after_too_many_deaths(tmp_path: Path) -> None:
    child = Child(spec(tmp_path, "print('ready x:1', flush=True)"), limit=QUICK)
    await child.start()
    with pytest.raises(ServiceFailed, match="keeps dying"):
        await child.supervise()


async def test_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    child = Child(spec(tmp_path, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVES))
    await child.start()
    await child.stop(grace_s=0.2)
    assert not is_alive(child.pid)


def test_restart_delay_doubles_and_old_deaths_expire() -> None:
    budget = RestartBudget(RestartLimit(deaths=3, window_s=10.0, first_wait_s=1.0, max_wait_s=3.0))
    assert [budget.wait_s(t) for t in (0.0, 1.0, 2.0)] == [1.0, 2.0, 3.0]
    assert budget.wait_s(3.0) is None
    assert budget.wait_s(30.0) == 1.0
