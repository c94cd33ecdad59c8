"""The order in which `baton up` ends its processes, also if some of them do not end."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.fleet.processes.supervisor import ServiceFailed
from baton.fleet.up import Cluster, describe_end, run_until_stopped
from baton.runtime.config.settings import ClusterConfig
from baton.runtime.process.process import Stop


class Part:
    """A child process or the fleet. It records that it was ended."""

    def __init__(self, name: str, ended: list[str], error: Exception | None = None) -> None:
        self.spec = SimpleNamespace(name=name)
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


async def test_death_of_a_worker_is_reported_with_its_reason_once_the_cluster_serves(tmp_path: Path) -> None:
    lines: list[str] = []
    made = cluster(tmp_path, lines, [])
    made._report_death("w1", "killed by SIGKILL")
    assert lines == []
    made._serving = True
    made._report_death("w1", "killed by SIGKILL")
    assert lines == ["worker w1 died: killed by SIGKILL; restarting it"]


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
