"""The order in which `baton up` ends its processes, also if some of them do not end."""

import asyncio
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.fleet.cluster import GIVE_UP_S, Cluster
from baton.fleet.processes.restart_policy import RestartLimit
from baton.fleet.processes.supervisor import ServiceFailed
from baton.fleet.up import describe_end, run_until_stopped
from baton.runtime.config.settings import ClusterConfig
from baton.runtime.process.process import Stop

QUICK = RestartLimit(deaths=1, first_wait_s=0.01, max_wait_s=0.02)


class Part:
    """A child process or the fleet. It records that it was ended."""

    def __init__(self, name: str, ended: list[str], error: Exception | None = None) -> None:
        self.spec = SimpleNamespace(name=name, output=f"{name}.out")
        self.pid = 7
        self._name, self._ended, self._error = name, ended, error

    async def stop(self, grace_s: float) -> None:
        self._ended.append(self._name)
        if self._error is not None:
            raise self._error

    close = stop


def cluster(tmp_path: Path, lines: list[str], ended: list[str], **errors: Exception) -> Cluster:
    made: Any = Cluster(ClusterConfig(), SimpleNamespace(path=tmp_path), None, lines.append)  # type: ignore[arg-type]
    made._children = [Part(name, ended, errors.get(name)) for name in ("redis", "scheduler", "gateway")]
    made._fleet = Part("ray", ended, errors.get("ray"))
    return made  # type: ignore[no-any-return]


async def test_close_reports_a_failure_and_ends_the_other_parts(tmp_path: Path) -> None:
    lines: list[str] = []
    ended: list[str] = []
    errors = {"gateway": ServiceFailed("gateway (pid 7) did not end"), "ray": TimeoutError()}
    await cluster(tmp_path, lines, ended, **errors).close()
    assert ended == ["gateway", "scheduler", "redis", "ray"]
    assert lines == ["while stopping: gateway (pid 7) did not end", "while stopping: TimeoutError"]


async def test_restart_of_a_service_is_reported(tmp_path: Path) -> None:
    lines: list[str] = []
    cluster(tmp_path, lines, [])._report_restart("redis", -9)
    assert lines == ["redis died (killed by SIGKILL) and was restarted, pid 7"]


async def test_service_that_keeps_dying_ends_a_cluster_that_cannot_serve_without_it(tmp_path: Path) -> None:
    """A start ends at once. Later the scheduler and the gateway get some minutes, and Redis any time."""
    made: Any = cluster(tmp_path, [], [])
    assert [made._give_up_s(name) for name in ("redis", "scheduler", "gateway")] == [0.0] * 3
    made._has_served = True
    assert [made._give_up_s(name) for name in ("redis", "scheduler", "gateway")] == [math.inf, GIVE_UP_S, GIVE_UP_S]


async def test_service_that_keeps_dying_is_shown_with_its_cause(tmp_path: Path) -> None:
    lines: list[str] = []
    made: Any = cluster(tmp_path, lines, [])
    made._has_served = True
    for name in ("redis", "gateway"):
        made._report_failing(name, "killed by SIGSEGV", "it started\nthe last line")
    made._report_recovery("gateway")
    assert lines == [
        "redis keeps dying: killed by SIGSEGV; it is tried again at most 30 s later, the rest goes on. "
        "The end of redis.out: the last line",
        "gateway keeps dying: killed by SIGSEGV; it is tried again at most 30 s later, the rest goes on; "
        "`baton up` ends if that lasts 5 minutes. The end of gateway.out: the last line",
        "gateway serves again, pid 7",
    ]


async def test_service_that_keeps_dying_does_not_end_a_cluster_that_has_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis serves at its first start, and cannot start again."""
    lines: list[str] = []
    made: Any = cluster(tmp_path, lines, [])
    made._children = []
    monkeypatch.setattr("baton.fleet.cluster.SERVICE_LIMIT", QUICK)
    code = f"open({str(tmp_path / 'started')!r}, 'x'); print('ready x:1', flush=True)"  # fails at the second start
    child = made._add_child("redis", [sys.executable, "-c", code], 60.0)
    made._fleet.supervise = asyncio.Event().wait
    made._has_served = True
    await child.start()
    supervision = asyncio.create_task(made._supervise())
    async with asyncio.timeout(60):
        while not lines and not supervision.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [line.partition(";")[0] for line in lines] == ["redis keeps dying: exited with code 1 before it was ready"]
    await asyncio.sleep(0.1)
    assert not supervision.done()
    supervision.cancel()
    await asyncio.gather(supervision, return_exceptions=True)
    await child.stop(1.0)


@pytest.mark.parametrize("phase", ["_wait_until_ready", "warm_up"])
async def test_death_after_the_start_is_reported_and_ends_a_start_that_cannot_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Before any request: while workers connect, and during the first one."""
    lines: list[str] = []
    made: Any = cluster(tmp_path, lines, [])

    async def returns(*_: object) -> str:
        return "w0 -> w1"

    async def waits(*_: object) -> str:
        await asyncio.Event().wait()
        return ""

    async def fails() -> None:
        made._report_death("w1", "killed by SIGKILL")
        await asyncio.sleep(0.01)
        raise ServiceFailed("no worker is left that can decode")

    monkeypatch.setattr(made, "_start_processes", returns)
    monkeypatch.setattr(made, "_supervise", fails)
    monkeypatch.setattr(made, "_wait_until_ready", waits if phase == "_wait_until_ready" else returns)
    monkeypatch.setattr("baton.fleet.cluster.warm_up", waits)
    made._report_death("w1", "before supervision, the start itself raises")
    with pytest.raises(ServiceFailed, match="no worker is left"):
        await asyncio.wait_for(made.start(), 60.0)
    assert [line for line in lines if "died" in line] == ["worker w1 died: killed by SIGKILL; restarting it"]
    await made.close()


async def test_gateway_that_keeps_dying_after_the_start_ends_the_cluster_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    made: Any = cluster(tmp_path, lines, [])
    made._children = []
    code = f"open({str(tmp_path / 'started')!r}, 'x'); print('ready x:1', flush=True)"  # fails at the second start

    def notify(line: str) -> None:
        lines.append(line)
        if "keeps dying" in line:  # the time is over only now, however long the second start takes
            monkeypatch.setattr("baton.fleet.cluster.GIVE_UP_S", 0.0)

    async def start_processes() -> None:
        await made._add_child("gateway", [sys.executable, "-c", code], 60.0).start()

    async def returns(*_: object) -> str:
        return "w0 -> w1"

    monkeypatch.setattr("baton.fleet.cluster.SERVICE_LIMIT", QUICK)
    monkeypatch.setattr(made, "_notify", notify)
    monkeypatch.setattr(made, "_start_processes", start_processes)
    monkeypatch.setattr(made, "_wait_until_ready", returns)
    monkeypatch.setattr("baton.fleet.cluster.warm_up", returns)
    made._fleet.supervise = asyncio.Event().wait
    await made.start()
    async with asyncio.timeout(60):
        with pytest.raises(ExceptionGroup) as ended:
            await made.supervise()
    assert str(ended.value.exceptions[0]).startswith("gateway keeps dying")
    assert any(line.startswith("gateway keeps dying") for line in lines), "it was reported before"
    await made.close()


def test_last_line_says_what_was_stopped_and_what_is_left(tmp_path: Path) -> None:
    stopped = describe_end(["gateway", "2 workers", "Ray"], [], Path("/logs"))
    assert stopped == "stopped gateway, 2 workers, Ray; nothing is left running; logs stay in /logs"
    assert describe_end(["redis"], [7, 8], None) == "stopped redis; still running: pid 7, 8"


@pytest.mark.parametrize("fails", [False, True])
async def test_cluster_and_run_directory_are_closed_after_a_stop_during_the_start(fails: bool) -> None:
    calls: list[str] = []

    class Starting:
        async def start(self) -> None:
            await asyncio.Event().wait()

        async def close(self) -> None:
            calls.append("close the cluster")
            if fails:
                raise asyncio.CancelledError

    async def serve() -> None:
        calls.append("serve")

    stop = Stop()
    stop.request()

    def close() -> list[int]:
        calls.append("close the run directory")
        return [7]

    run = SimpleNamespace(close=close)
    try:
        assert await run_until_stopped(Starting(), run, stop, serve) == [7]
    except asyncio.CancelledError:
        assert fails
    assert calls == ["close the cluster", "close the run directory"]
