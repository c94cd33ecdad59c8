"""The order in which a cluster is ended, whatever of it does not end, and the first answer's time."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.fleet import up as module
from baton.fleet.processes.supervisor import ServiceFailed
from baton.fleet.up import Cluster, up
from baton.runtime.config.settings import ClusterConfig
from baton.runtime.process.process import Stop


class Part:
    """A child or the fleet: notes that it was ended."""

    def __init__(self, name: str, ended: list[str], error: Exception | None = None) -> None:
        self.spec = SimpleNamespace(name=name)
        self.pid = 7
        self._name, self._ended, self._error = name, ended, error

    async def stop(self, grace_s: float) -> None:
        self._ended.append(self._name)
        if self._error is not None:
            raise self._error

    close = stop


def cluster(tmp_path: Path, said: list[str], ended: list[str], **errors: Exception) -> Cluster:
    made: Any = Cluster(ClusterConfig(), SimpleNamespace(path=tmp_path), None, said.append)  # type: ignore[arg-type]
    made._children = [Part(name, ended, errors.get(name)) for name in ("redis", "scheduler", "gateway")]
    made._fleet = Part("ray", ended, errors.get("ray"))
    return made  # type: ignore[no-any-return]


async def test_what_does_not_end_is_told_and_the_others_are_ended(tmp_path: Path) -> None:
    said: list[str] = []
    ended: list[str] = []
    errors = {"gateway": ServiceFailed("gateway (pid 7) did not end"), "ray": TimeoutError()}
    await cluster(tmp_path, said, ended, **errors).close()
    assert ended == ["gateway", "scheduler", "redis", "ray"]
    assert said == ["while ending: gateway (pid 7) did not end", "while ending: TimeoutError"]


async def test_any_restart_is_announced(tmp_path: Path) -> None:
    said: list[str] = []
    cluster(tmp_path, said, [])._child_is_back("redis")
    assert said == ["redis died and is back, pid 7"]


@pytest.mark.parametrize("fails", [False, True])
async def test_the_directory_goes_when_closing_fails_or_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    closed: list[bool] = []

    class CutOff:
        def __init__(self, *_: object) -> None: ...

        async def start(self) -> None:
            await asyncio.Event().wait()

        async def close(self) -> None:
            if fails:
                raise asyncio.CancelledError

    monkeypatch.setattr(module, "Cluster", CutOff)
    monkeypatch.setattr(module, "RunDir", lambda: SimpleNamespace(path=tmp_path, close=lambda: closed.append(True)))
    monkeypatch.setattr(module.logging, "configure", lambda *_, **__: None)
    monkeypatch.setattr(module, "set_batch_scheduling", lambda: None)  # this process is pytest's
    stop = Stop()
    stop.request()
    try:
        await up(ClusterConfig(), stop, lambda _: None)
    except asyncio.CancelledError:
        assert fails
    assert closed == [True]
