import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from baton.runtime.process.process import (
    Background,
    ServiceThread,
    Stop,
    StoppedNow,
    process_age_s,
    unless_stopped,
    until_stopped,
    with_parent_death_signal,
)


@contextmanager
def program(code: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


DRAINING_SERVICE = """
import asyncio, sys
from baton.runtime.process.process import run

async def main(stop):
    print("ready", flush=True)
    await stop.drain.wait()
    print("draining", flush=True)
    try:
        await asyncio.sleep(DRAIN_S)
        print("drained", flush=True)
    finally:
        print("clean", flush=True)

sys.exit(run(main))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_drains_and_exits_with_0(number: signal.Signals) -> None:
    with program(DRAINING_SERVICE.replace("DRAIN_S", "0.01")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == "draining\ndrained\nclean\n"
        assert process.wait(60) == 0


def test_second_signal_stops_immediately_with_cleanup() -> None:
    with program(DRAINING_SERVICE.replace("DRAIN_S", "60")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "clean\n"
        assert process.wait(60) == 128 + signal.SIGINT


def test_exception_in_main_exits_with_1() -> None:
    code = "from baton.runtime.process.process import run\nasync def main(stop): raise OSError('no disk')\nrun(main)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False).returncode == 1


async def test_until_stopped_returns_raises_or_is_stopped_now() -> None:
    stop = Stop()

    async def returns(_stop: Stop) -> None:
        return

    async def fails(_stop: Stop) -> None:
        raise LookupError

    async def hangs(_stop: Stop) -> None:
        await asyncio.Event().wait()

    await until_stopped(returns, stop)
    with pytest.raises(LookupError):
        await until_stopped(fails, stop)
    asyncio.get_running_loop().call_soon(stop.request_now)
    with pytest.raises(StoppedNow):
        await until_stopped(hangs, stop)


async def test_cancelling_until_stopped_cancels_main_and_waits_for_it() -> None:
    ended = []

    async def main(_stop: Stop) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    task = asyncio.create_task(until_stopped(main, Stop()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


def test_service_thread_drains_on_request() -> None:
    events: list[str] = []

    async def main(stop: Stop) -> None:
        assert threading.current_thread() is not threading.main_thread()
        await stop.drain.wait()
        events.append("drained")

    service = ServiceThread(main, name="worker-w0")
    service.start()
    assert service.is_alive
    service.request_stop()
    assert service.join(60)
    assert (events, service.error) == (["drained"], None)
    service.request_stop()  # no effect after the end


def test_service_thread_can_be_stopped_now_and_stores_its_error() -> None:
    async def hangs(stop: Stop) -> None:
        await asyncio.Event().wait()

    async def fails(stop: Stop) -> None:
        raise LookupError("no model")

    hanging, failing = ServiceThread(hangs, name="a"), ServiceThread(fails, name="b")
    hanging.start()
    failing.start()
    hanging.request_stop_now()
    assert hanging.join(60)
    assert failing.join(60)
    assert isinstance(hanging.error, StoppedNow)
    assert isinstance(failing.error, LookupError)


async def test_background_tasks_are_cancelled_at_the_end_of_their_scope() -> None:
    events: list[str] = []

    async def wait_forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            events.append("ended")

    async def short() -> None:
        events.append("short")

    async with Background(wait_forever(), short()):
        await asyncio.sleep(0)
        events.append("body")
    assert events == ["short", "body", "ended"]


async def test_background_failure_cancels_the_body() -> None:
    async def fails() -> None:
        raise LookupError

    with pytest.raises(ExceptionGroup) as group:
        async with Background(fails()):
            await asyncio.Event().wait()
    assert group.group_contains(LookupError)


PARENT = """
import subprocess, sys, time
from baton.runtime.process.process import with_parent_death_signal
code = "print('up', flush=True); import time; time.sleep(60)"
child = subprocess.Popen(with_parent_death_signal([sys.executable, "-c", code]))
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_child_with_parent_death_signal_dies_with_its_parent() -> None:
    with program(PARENT) as parent:
        assert parent.stdout is not None
        lines = {parent.stdout.readline().strip() for _ in range(2)}
        assert "up" in lines
        child = int((lines - {"up"}).pop())
        parent.kill()
        parent.wait()
        assert has_ended(child, within_s=60)


def test_child_with_parent_death_signal_exits_if_its_parent_is_already_dead() -> None:
    command = with_parent_death_signal([sys.executable, "-c", "print('runs')"])
    orphan = [*command[:5], str(1 << 22), *command[6:]]
    done = subprocess.run(orphan, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def has_ended(pid: int, *, within_s: float) -> bool:
    """Return whether the process ends within `within_s`. A zombie counts as ended."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


async def test_unless_stopped_cancels_the_work_on_stop_and_raises_its_error() -> None:
    stop, cleaned = Stop(), asyncio.Event()

    async def work() -> None:
        try:
            stop.request()
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    async with asyncio.timeout(60):
        await unless_stopped(stop, work())
    assert cleaned.is_set()

    async def fail() -> None:
        raise ValueError("work failed")

    with pytest.raises(ValueError, match="work failed"):
        await unless_stopped(Stop(), fail())


def test_process_age_counts_from_the_start_of_the_process() -> None:
    with program(
        "from baton.runtime.process.process import process_age_s; print(process_age_s(), flush=True); input()"
    ) as process:
        assert process.stdout is not None
        age = float(process.stdout.readline())
    assert 0.0 < age < process_age_s()


SCHEDULED = """
import os, subprocess, sys
from baton.model.device.compute_thread import compute_thread
from baton.runtime.process.process import set_batch_scheduling
given = getattr(os, sys.argv[1])
os.sched_setscheduler(0, given, os.sched_param(0))
set_batch_scheduling()
child = "import os; print(os.sched_getscheduler(0))"
with compute_thread(1) as computing:
    print(os.sched_getscheduler(0), computing.submit(os.sched_getscheduler, 0).result(), end=" ", flush=True)
subprocess.run([sys.executable, "-I", "-S", "-c", child])
os._exit(0)
"""
"""It does little after the change: beside busy processes, SCHED_IDLE gives it a thousandth of a core."""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs SCHED_BATCH")
@pytest.mark.parametrize("given", ["SCHED_OTHER", "SCHED_IDLE"])
def test_batch_scheduling_applies_to_children_but_not_to_the_compute_thread(given: str) -> None:
    """A scheduling policy that was set before is kept."""
    output = subprocess.run(
        [sys.executable, "-c", SCHEDULED, given], capture_output=True, text=True, check=True
    ).stdout.split()
    batch, computes = (os.SCHED_BATCH, os.SCHED_OTHER) if given == "SCHED_OTHER" else (os.SCHED_IDLE, os.SCHED_IDLE)
    assert list(map(int, output)) == [batch, computes, batch]
