"""Starts Baton clusters for benchmarks, with `baton up` or process by process without Ray.

Also describes the machine and formats tables.
"""

import asyncio
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from baton.fleet.processes.supervisor import baton_command
from baton.runtime.config.config_base import settings_of
from baton.runtime.config.settings import SERVICES
from baton.runtime.network.addresses import choose_port
from baton.store.redis.private_redis import redis_command
from bench.systems.child_processes import ended_after

HOST = "127.0.0.1"
START_LINES = 200
START_S, START_POLL_S = 120.0, 0.1
UP_STOP_S = 60.0


@contextmanager
def baton_up(*flags: str) -> Iterator[str]:
    """Run `baton up` for the duration of the block and yield the HTTP address."""
    command = [str(Path(sys.executable).parent / "baton"), "up", "--http-port", "0", "--grpc-port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with ended_after(process, signal.SIGINT, stop_s=UP_STOP_S):
        yield _after_ready(process)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """A running cluster.

    url: HTTP address of the gateway.
    grpc_address: gRPC address of the gateway.
    pids: process ids by name (`scheduler`, `gateway`, `p0`, `d0`, …).
    admin: addresses of the metrics endpoints by name.
    """

    url: str
    grpc_address: str
    pids: Mapping[str, int]
    admin: Mapping[str, str]

    def workers(self, role: str) -> list[str]:
        """Return the sorted names of the workers with this role: `p` or `d`."""
        return sorted(name for name in self.pids if name[0] == role and name[1:].isdigit())

    def metrics(self, name: str) -> dict[str, float]:
        """Return all metrics of one process, each summed over its labels."""
        sums: dict[str, float] = defaultdict(float)
        for line in self.page(name).splitlines():
            if line and not line.startswith("#"):
                sample, _, value = line.rpartition(" ")
                sums[sample.partition("{")[0]] += float(value)
        return dict(sums)

    def page(self, name: str) -> str:
        """Return the metrics page of one process as text."""
        with urllib.request.urlopen(f"http://{self.admin[name]}/metrics", timeout=10) as answer:
            page: str = answer.read().decode()
        return page


@contextmanager
def processes_up(*, prefill: int, decode: int, logs: Path, **settings: Any) -> Iterator[Processes]:
    """Run Redis, a scheduler, a gateway and workers as separate processes for the duration of the block.

    `settings` apply to every service that has a setting of that name. The output of the processes goes to
    `logs`. Raises SystemExit if a process or the cluster does not become ready.
    """
    logs.mkdir(parents=True, exist_ok=True)
    names = [f"{role}{number}" for role, count in (("p", prefill), ("d", decode)) for number in range(count)]
    with tempfile.TemporaryDirectory(prefix="baton-b-", dir="/tmp") as directory, ExitStack() as stack:
        redis = redis_command(Path(directory) / "redis")
        stack.enter_context(_running("redis", redis.argv, logs))
        asyncio.run(redis.wait_until_ready())
        http_port, grpc_port = (choose_port(HOST, 0, flag="") for _ in range(2))
        shared = {"host": HOST, "redis_url": redis.url, "workers_on_host": len(names), **settings}
        own: dict[str, tuple[str, dict[str, Any]]] = {
            "scheduler": ("scheduler", {}),
            "gateway": ("gateway", {"http_port": http_port, "grpc_port": grpc_port}),
            **{
                name: ("worker", {"worker_id": name, "role": {"p": "prefill", "d": "decode"}[name[0]]})
                for name in names
            },
        }
        admin = {name: f"{HOST}:{choose_port(HOST, 0, flag='')}" for name in own}
        started = {}
        for name, (service, more) in own.items():
            known = {setting.name for setting in settings_of(SERVICES[service])}
            values = {key: value for key, value in {**shared, **more}.items() if key in known}
            file = Path(directory) / f"{name}.yaml"
            file.write_text(
                yaml.safe_dump(
                    {**values, "admin_port": int(admin[name].rpartition(":")[2]), "log_dir": str(logs / name)}
                )
            )
            started[name] = stack.enter_context(_running(name, baton_command(service, file), logs))
        for process in started.values():
            _after_ready(process)
        running = Processes(
            url=f"http://{HOST}:{http_port}",
            grpc_address=f"{HOST}:{grpc_port}",
            pids={name: process.pid for name, process in started.items()},
            admin=admin,
        )
        _wait_ready(running)
        yield running


def machine(*packages: str) -> str:
    """Return one line with date, hardware, load and package versions, for the head of a table."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    load = os.getloadavg()[0]
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores of {cpu}, load {load:.1f} at the start; {versions}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _after_ready(process: subprocess.Popen[str]) -> str:
    """Return the address that the process prints after `ready `.

    Raises SystemExit with its output otherwise.
    """
    assert process.stdout is not None
    seen = ""
    for _ in range(START_LINES):
        line = process.stdout.readline()
        seen += line
        if found := re.match(r"ready (\S+)", line):
            return found[1]
        if not line:
            break
    raise SystemExit(f"{' '.join(process.args)} did not start:\n{seen}")  # type: ignore[arg-type]


@contextmanager
def _running(name: str, argv: Sequence[str], logs: Path) -> Iterator[subprocess.Popen[str]]:
    with (logs / f"{name}.out").open("ab") as errors:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True)
    with ended_after(process):
        yield process


def _wait_ready(running: Processes) -> None:
    """Wait until the gateway is ready and every decode worker has a link to every prefill worker.

    The scheduler prefers pairs that have a link. Raises SystemExit after `START_S`.
    """
    end_s = time.monotonic() + START_S
    last = ""
    while time.monotonic() < end_s:
        try:
            with urllib.request.urlopen(f"{running.url}/ready", timeout=2):
                pass
            links = {name: running.page(name).count("\nbaton_link_bytes_per_second{") for name in running.workers("d")}
            if all(num >= len(running.workers("p")) for num in links.values()):
                return
            last = f"links of decode workers: {links}"
        except OSError as error:
            last = str(error)
        time.sleep(START_POLL_S)
    raise SystemExit(f"the cluster is not ready after {START_S:g} s: {last}")


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
