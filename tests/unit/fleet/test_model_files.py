"""A model's files are looked up or fetched once; a download ends when nobody waits for it any more."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from baton.core.errors import ModelError
from baton.fleet import fleet_main, model_files
from baton.fleet.model_files import model_directory
from baton.fleet.worker_plan import Wanted, WorkerSpec
from baton.model.loading.model_source import DEMO_DIR
from baton.runtime.config.settings import FleetConfig, WorkerConfig
from baton.runtime.process.process import Stop


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], object]:
    """Sets the shell script that stands in for the process that fetches; it gets the model's name."""
    script = tmp_path / "fetch"
    monkeypatch.setattr(model_files, "with_parent_death_signal", lambda argv: ["/bin/sh", str(script), argv[-1]])
    return script.write_text


async def test_what_lies_here_is_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_files, "with_parent_death_signal", lambda argv: pytest.fail("a process was started"))
    assert await model_directory("demo") == str(DEMO_DIR)
    assert await model_directory(str(tmp_path)) == str(tmp_path)


async def test_a_name_that_cannot_be_fetched_is_said_in_the_hubs_words() -> None:
    with pytest.raises(ModelError, match=r"no such directory, and it is not a hub id"):
        await model_directory("./nothing")


async def test_the_last_line_is_the_directory(hub: Callable[[str], object]) -> None:
    hub("""echo 'noise'; printf '{"directory": "/cache/%s"}\\n' "$1" """)
    assert await model_directory("owner/name") == "/cache/owner/name"


async def test_a_download_that_is_killed_is_an_error(hub: Callable[[str], object]) -> None:
    hub("kill -9 $$")
    with pytest.raises(ModelError, match=r"owner/name cannot be downloaded.*-9"):
        await model_directory("owner/name")


async def test_a_download_ends_when_nobody_waits_for_it(hub: Callable[[str], object], tmp_path: Path) -> None:
    hub(f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 60")
    fetching = asyncio.create_task(model_directory("owner/name"))
    async with asyncio.timeout(10):
        while not os.path.exists(tmp_path / "pid"):  # noqa: ASYNC110, ASYNC240 - another process makes it
            await asyncio.sleep(0.01)
        pid = int((tmp_path / "pid").read_text())
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("ray_address", "fetches", "loaded"), [(None, ["owner/name"], "/cache/x"), ("ray:1", [], "owner/name")]
)
async def test_a_fleet_of_one_machine_fetches_once_before_it_starts_any_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ray_address: str | None, fetches: list[str], loaded: str
) -> None:
    fetched: list[str] = []
    started: list[WorkerConfig] = []

    async def fetch(model: str) -> str:
        assert not started
        fetched.append(model)
        return "/cache/x"

    class Fleet:
        def __init__(self, **_: Any) -> None: ...

        async def connect(self) -> None: ...

        async def start(self, spec: WorkerSpec, config: WorkerConfig) -> None:
            started.append(config)

        async def keep(self, wanted: Wanted) -> None:
            for role, number in wanted.least.items():
                started.extend(
                    wanted.config_of(WorkerSpec(worker_id=f"{role.value}-{i}", role=role)) for i in range(number)
                )
            await asyncio.Event().wait()

        async def supervise(self) -> None:
            await asyncio.Event().wait()

        async def close(self, grace_s: float) -> None: ...

    monkeypatch.setattr(fleet_main, "model_directory", fetch)
    monkeypatch.setattr(fleet_main, "RayFleet", Fleet)
    monkeypatch.setattr(fleet_main, "RunDir", lambda: SimpleNamespace(path=tmp_path, close=lambda: None))
    stop = Stop()
    await fleet_main.serve(
        FleetConfig(model="owner/name", prefill=2, ray_address=ray_address), stop, lambda _: stop.request()
    )
    assert fetched == fetches
    assert [(config.worker_id, config.model, config.model_name) for config in started] == [
        (name, loaded, "owner/name")
        for name in (("w0", "w1", "w2") if ray_address is None else ("prefill-0", "prefill-1", "decode-0"))
    ]
