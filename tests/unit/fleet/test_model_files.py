"""A model is resolved or downloaded once, and a cancelled download is killed."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from baton.core.errors import ModelError
from baton.fleet import fleet_main
from baton.fleet.model_files import model_directory
from baton.fleet.worker_plan import DesiredWorkers, WorkerSpec
from baton.model.loading.model_source import DEMO_DIR
from baton.runtime.config.settings import FleetConfig, WorkerConfig
from baton.runtime.process.process import Stop


def downloading(script: str) -> list[str]:
    """A shell script in place of the download command. `$1` is the name of the model."""
    return ["/bin/sh", "-c", script, "download"]


async def test_local_model_is_not_downloaded(tmp_path: Path) -> None:
    command = downloading(f"touch {tmp_path}/was_run")
    assert await model_directory("demo", command) == str(DEMO_DIR)
    assert await model_directory(str(tmp_path), command) == str(tmp_path)
    assert not (tmp_path / "was_run").exists()


async def test_error_of_an_unknown_model_is_the_error_of_the_hub() -> None:
    with pytest.raises(ModelError, match=r"no such directory or GGUF file, and it is not a hub id"):
        await model_directory("./nothing")


async def test_last_line_of_the_download_is_the_directory() -> None:
    command = downloading("""echo 'noise'; printf '{"directory": "/cache/%s"}\\n' "$1" """)
    assert await model_directory("owner/name", command) == "/cache/owner/name"


async def test_killed_download_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"owner/name cannot be downloaded.*-9"):
        await model_directory("owner/name", downloading("kill -9 $$"))


async def test_cancelled_download_is_killed(tmp_path: Path) -> None:
    command = downloading(f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 60")
    download = asyncio.create_task(model_directory("owner/name", command))
    async with asyncio.timeout(60):
        while not os.path.exists(tmp_path / "pid"):  # noqa: ASYNC110, ASYNC240 - another process creates it
            await asyncio.sleep(0.01)
        pid = int((tmp_path / "pid").read_text())
        download.cancel()
        with pytest.raises(asyncio.CancelledError):
            await download
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("ray_address", "downloads", "loaded"), [(None, ["owner/name"], "/cache/x"), ("ray:1", [], "owner/name")]
)
async def test_private_ray_fleet_downloads_the_model_once_before_it_starts_workers(
    tmp_path: Path, ray_address: str | None, downloads: list[str], loaded: str
) -> None:
    downloaded: list[str] = []
    started: list[WorkerConfig] = []

    async def find_model(model: str) -> str:
        assert not started
        downloaded.append(model)
        return "/cache/x"

    class Fleet:
        def __init__(self, **_: Any) -> None: ...

        async def connect(self) -> None: ...

        async def start(self, spec: WorkerSpec, config: WorkerConfig) -> None:
            started.append(config)

        async def reconcile(self, desired: DesiredWorkers) -> None:
            for role, number in desired.minimum.items():
                started.extend(
                    desired.config_of(WorkerSpec(worker_id=f"{role.value}-{i}", role=role)) for i in range(number)
                )
            await asyncio.Event().wait()

        async def supervise(self) -> None:
            await asyncio.Event().wait()

        async def close(self, grace_s: float) -> None: ...

    stop = Stop()
    await fleet_main.serve(
        FleetConfig(model="owner/name", prefill=2, ray_address=ray_address),
        stop,
        lambda _: stop.request(),
        make_run_dir=lambda: SimpleNamespace(path=tmp_path, close=lambda: None),  # type: ignore[arg-type,return-value]
        make_fleet=Fleet,  # type: ignore[arg-type]
        find_model=find_model,
    )
    assert downloaded == downloads
    assert [(config.worker_id, config.model, config.model_name) for config in started] == [
        (name, loaded, "owner/name")
        for name in (("w0", "w1", "w2") if ray_address is None else ("prefill-0", "prefill-1", "decode-0"))
    ]
