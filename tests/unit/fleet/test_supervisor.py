"""Start, restart and stop of a supervised child process."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from baton.fleet.model_files import DOWNLOAD_COMMAND
from baton.fleet.processes import supervisor
from baton.fleet.processes.restart_policy import CrashLoop, RestartBudget, RestartLimit
from baton.fleet.processes.run_dir import RunDir
from baton.fleet.processes.supervisor import Child, ChildSpec, ServiceFailed, baton_command

QUICK = RestartLimit(deaths=2, window_s=60.0, first_wait_s=0.01, max_wait_s=0.02)
SERVES = "print('hello'); print('ready 127.0.0.1:5', flush=True); import time; time.sleep(60)"


@pytest.fixture(autouse=True)
def long_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read all output of a child that has ended, also if this process is stalled for a second."""
    monkeypatch.setattr(supervisor, "LAST_OUTPUT_S", 60.0)


def spec(tmp_path: Path, code: str, **changes: float) -> ChildSpec:
    argv = [sys.executable, "-c", code]
    return ChildSpec(name="child", argv=argv, output=tmp_path / "child.out", **changes)  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    until_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.02)
    return condition()


async def test_child_reports_its_address_and_stops(tmp_path: Path) -> None:
    child = Child(spec(tmp_path, SERVES))
    assert await child.start() == "127.0.0.1:5"
    assert (tmp_path / "child.out").read_text() == "hello\n"
    await child.stop(grace_s=5)
    assert not is_alive(child.pid)


async def test_long_lines_do_not_block_a_child(tmp_path: Path) -> None:
    done, output = tmp_path / "done", tmp_path / "child.out"
    ready = SERVES.partition("import")[0]
    code = f"print('x' * 200_000); {ready}print('y' * 300_000, flush=True); open({str(done)!r}, 'w')"
    child = Child(spec(tmp_path, f"{code}; import time; time.sleep(60)"))
    assert await child.start() == "127.0.0.1:5"
    async with asyncio.timeout(60):  # the last part may still be in the pipe when the child has written it
        while not done.exists() or output.read_text().count("y") < 300_000:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await child.stop(grace_s=5)
    assert output.read_text().count("y") == 300_000


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("is_writable", [True, False])
async def test_output_that_cannot_be_kept_does_not_block_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_writable: bool, stream: str
) -> None:
    monkeypatch.setattr(supervisor, "MAX_OUTPUT_BYTES", 10_000)
    done, output = tmp_path / "done", tmp_path / "child.out"
    wait = f"import os, sys, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    write = f"for i in range(2_000): print('z' * 100, flush=True, file=sys.{stream})"
    end = f"open({str(done)!r}, 'w')\ntime.sleep(60)"
    child = Child(spec(tmp_path, f"print('ready 127.0.0.1:5', flush=True)\n{wait}\n{write}\n{end}"))
    await child.start()
    if not is_writable:
        output.unlink()
        output.mkdir()
    (tmp_path / "go").touch()
    async with asyncio.timeout(60):
        while not done.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await child.stop(grace_s=5)
    assert not is_writable or output.stat().st_size < 20_000


async def test_error_of_a_child_that_ends_before_it_is_ready_contains_its_output(tmp_path: Path) -> None:
    with pytest.raises(ServiceFailed, match="exited with code 3 before it was ready: no such model"):
        await Child(spec(tmp_path, "import sys; print('no such model', file=sys.stderr); sys.exit(3)")).start()


async def test_child_that_never_becomes_ready_is_killed(tmp_path: Path) -> None:
    argv = ["/bin/sh", "-c", "echo no answer from the peer; exec sleep 60"]
    for limit_s in (1, 5, 20):  # the shell must have started in this time
        child = Child(replace(spec(tmp_path, "", start_timeout_s=limit_s), argv=argv))
        with pytest.raises(ServiceFailed, match=f"not ready within {limit_s} s: ") as failed:
            await child.start()
        assert not is_alive(child.pid)
        if "it printed nothing" not in str(failed.value):
            break
    assert str(failed.value).endswith(f"not ready within {limit_s} s: no answer from the peer")


async def test_dead_child_is_restarted_as_a_new_process(tmp_path: Path) -> None:
    restarted = asyncio.Event()
    child = Child(spec(tmp_path, SERVES), limit=QUICK, on_restart=lambda *_: restarted.set())
    await child.start()
    first = child.pid
    watch = asyncio.create_task(child.supervise())
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(60):
        await restarted.wait()
    assert child.pid != first
    assert child.restarts == 1
    await child.stop(grace_s=5)
    await watch


@pytest.mark.parametrize("give_up_s", [0.0, 0.5])
async def test_supervision_fails_after_too_many_deaths_for_too_long(tmp_path: Path, give_up_s: float) -> None:
    code = "print('ready x:1', flush=True); print('out of memory')"
    child = Child(spec(tmp_path, code), limit=QUICK, give_up_s=lambda: give_up_s)
    await child.start()
    began_s = time.monotonic()
    with pytest.raises(ServiceFailed, match=r"keeps dying \(last: exited with code 0\): out of memory"):
        await child.supervise()
    assert time.monotonic() - began_s >= give_up_s
    assert child.restarts >= QUICK.deaths


async def test_process_that_keeps_dying_is_reported_once_and_tried_again_until_it_serves(tmp_path: Path) -> None:
    """It serves at its first start, cannot start for some time, and then serves again."""
    starts = tmp_path / "starts"
    code = f"""
import pathlib, sys, time
starts = pathlib.Path({str(starts)!r})
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))
if 0 < number < 5:
    sys.exit("the disk is full")
print("ready x:1", flush=True)
time.sleep(60 if number else 0)
"""
    failing: list[tuple[str, str, str]] = []
    recovered = asyncio.Event()
    child = Child(
        spec(tmp_path, code),
        limit=replace(QUICK, window_s=1.0),
        on_failing=lambda *args: failing.append(args),
        on_recovered=lambda name: recovered.set(),
        give_up_s=lambda: math.inf,
    )
    await child.start()
    watch = asyncio.create_task(child.supervise())
    async with asyncio.timeout(60):
        await asyncio.wait((watch, asyncio.create_task(recovered.wait())), return_when=asyncio.FIRST_COMPLETED)
    assert recovered.is_set()
    assert [args[:2] for args in failing] == [("child", "exited with code 1 before it was ready")]
    assert failing[0][2].endswith("the disk is full")
    assert len(starts.read_text()) == 6
    assert is_alive(child.pid)
    await child.stop(grace_s=5)
    await watch


def test_process_that_keeps_dying_has_bounded_delays_and_a_stable_run_ends_its_failures() -> None:
    loop = CrashLoop(RestartLimit(deaths=2, window_s=10.0, first_wait_s=1.0, max_wait_s=5.0))
    assert [(loop.fail(100.0 + i), loop.keeps_dying) for i in range(4)] == [
        (1.0, False),
        (2.0, False),
        (4.0, True),
        (5.0, True),
    ]
    assert loop.fail(1e6) == 5.0
    assert loop.duration_s(160.0) == 60.0
    assert loop.end()
    assert not loop.end()
    assert (loop.fail(500.0), loop.keeps_dying, loop.duration_s(500.0)) == (1.0, False, 0.0)


async def test_stop_leaves_the_exit_code_of_a_child_that_has_just_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the event loop may collect it: a second collector makes the event loop report 255."""
    child = Child(spec(tmp_path, SERVES))
    await child.start()
    monkeypatch.setattr(subprocess.Popen, "poll", Mock(side_effect=AssertionError))
    os.kill(child.pid, signal.SIGKILL)
    await child.stop(grace_s=5)
    assert child.exit_code == -signal.SIGKILL


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


def test_children_do_not_import_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may have put a module there, such as in /tmp."""
    for name in ("click", "psutil", "json"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w').close()\nraise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    *command, _, _, _ = baton_command("gateway", tmp_path / "gateway.yaml")
    assert subprocess.run([*command, "--version"], capture_output=True, check=True).stdout.startswith(b"baton ")
    assert b"directory" in subprocess.run([*DOWNLOAD_COMMAND, "demo"], capture_output=True, check=True).stdout
    run = RunDir()
    assert run.close() == []
    assert wait_until(lambda: not run.path.exists())
    assert not (tmp_path / "imported").exists()
