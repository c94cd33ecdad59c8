"""A cluster of several machines: workers on nodes of a Ray that others run, which a fleet finds again, and
which leave one by one."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest
import yaml

import baton
from baton.core.errors import StoreUnavailable
from baton.runtime.config.config_base import settings_of
from baton.runtime.config.settings import SERVICES
from baton.runtime.network.addresses import choose_port
from baton.store.redis.private_redis import redis_command
from baton.store.redis.redis_connection import RedisConnection
from tests.emulated_answer import emulated_answer
from tests.integration.fleet.ray_hosts import Host, Hosts, ray_hosts, terminate
from tests.netns import pid_below, why_not
from tests.times import TEST_TIMES

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "they can be made"),
]

VOCAB_SIZE = 4096
START_S = 90.0
OTHER_VERSION = "0.0.9"
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "device": "emulated",
    "emulated_costs": "step=4ms,prefill_token=20us",
    "kv_memory": 64 * 2**20,
    "max_model_len": 4096,
    **TEST_TIMES,
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """A head, a node for prefill, one for decode, and another one for decode that has another Baton."""
    with ray_hosts() as hosts:
        hosts.join(hosts.add("node-p"), "--num-cpus", "1", "--resources", '{"baton_prefill": 1}')
        hosts.join(hosts.add("node-d"), "--num-cpus", "1", "--resources", '{"baton_decode": 1}')
        other = hosts.add("node-x")
        path = f"{another_baton(other.directory)}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        hosts.join(other, "--num-cpus", "1", "--resources", '{"baton_decode": 1}', PYTHONPATH=path)
        for host in hosts.hosts:
            host.until_node()
        yield hosts


def another_baton(directory: Path) -> Path:
    """Where to find a package that is this one in all but its version."""
    package = directory / "other" / "baton"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = {OTHER_VERSION!r}\n__path__ = {list(baton.__path__)!r}\n")
    return package.parent


class Cluster:
    """What runs on the head's machine: the services, and the fleet."""

    def __init__(self, hosts: Hosts, stack: ExitStack) -> None:
        self.hosts = hosts
        self.head = hosts.head
        self.directory = hosts.head.directory
        self._stack = stack
        self.fleet_log = self.directory / "fleet.out"
        redis = self.head.call(lambda: redis_command(self.directory / "redis", host=self.head.address))
        self.redis_url = redis.url
        self._start("redis", redis.argv)
        self.http_port, self.grpc_port = (
            self.head.call(lambda: choose_port(self.head.address, 0, flag="")) for _ in range(2)
        )
        self.settings = {
            **SETTINGS,
            "redis_url": redis.url,
            "host": self.head.address,
            "ray_address": hosts.ray_address,
            "ray_placement": "role",
        }
        for service in ("scheduler", "gateway"):
            self._start(service, self._command(service))
        self.fleet = self.start_fleet()

    def start_fleet(self, **changes: Any) -> subprocess.Popen[bytes]:
        self.settings |= changes
        return self._start("fleet", self._command("fleet"))

    def _command(self, service: str) -> list[str]:
        known = {item.name for item in settings_of(SERVICES[service])}
        ports = {"http_port": self.http_port, "grpc_port": self.grpc_port}
        file = self.directory / f"{service}.yaml"
        file.write_text(
            yaml.safe_dump({name: value for name, value in {**self.settings, **ports}.items() if name in known})
        )
        return [sys.executable, "-m", "baton.cli", service, "--config", str(file)]

    def _start(self, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        process = self.head.popen(*argv, log=self.directory / f"{name}.out")
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    @property
    def url(self) -> str:
        return f"http://{self.head.address}:{self.http_port}"

    def get(self, path: str) -> httpx.Response:
        return self.head.call(lambda: httpx.get(f"{self.url}{path}", timeout=5.0))

    def baton(self, host: Host, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of `baton` on one of the machines, to its end."""
        log = host.directory / "command.out"
        log.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "baton.cli", *words, "--gateway", f"{self.head.address}:{self.grpc_port}"]
        process = host.popen(*argv, log=log)
        return subprocess.CompletedProcess(argv, process.wait(60), log.read_text())

    def workers(self) -> dict[str, dict[str, Any]]:
        """Those that are ready, by name, as `baton status` has them."""
        done = self.baton(self.head, "status", "--json")
        found = json.loads(done.stdout)["workers"] if done.returncode == 0 else []
        return {worker["worker"]["worker_id"]: worker for worker in found if worker["state"] == "ready"}

    def until(self, condition: Callable[[], Any], what: str, limit_s: float = START_S) -> Any:
        """What `condition` says, once that is true."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            with suppress(httpx.HTTPError):
                if found := condition():
                    return found
            time.sleep(0.2)
        outputs = {path.name: path.read_text()[-3000:] for path in self.directory.glob("*.out")}
        raise AssertionError(f"not within {limit_s:g} s: {what}; {outputs}")

    def until_ready(self) -> None:
        self.until(lambda: self.get("/ready").status_code == httpx.codes.OK, "the gateway is ready")

    def fleet_workers(self) -> dict[tuple[str, str], int]:
        """By role and state, as the fleet counts them at its admin port; none of which there are none."""
        url = f"http://{self.head.address}:{self.settings['admin_port']}/metrics"
        text = self.head.call(lambda: httpx.get(url, timeout=5.0)).text
        found = re.findall(r'^baton_fleet_workers\{role="(\w+)",state="(\w+)"\} (\d+)', text, re.MULTILINE)
        return {(role, state): int(number) for role, state, number in found if number != "0"}

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Of the fleet."""
        lines = [json.loads(line) for line in self.fleet_log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("event") == event]


def ask(url: str, number: int) -> dict[str, Any]:
    """One completion; raises AssertionError where it is not exactly what it has to be."""
    rng = Random(number)
    prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(300)]
    asked = {"prompt": prompt, "max_tokens": 8, "seed": number, "temperature": 1.0}
    body = {"model": "demo", "return_token_ids": True, "timeline": True, **asked}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == httpx.codes.OK, answer.text
    right = emulated_answer(prompt, seed=number, max_tokens=8, vocab_size=VOCAB_SIZE)
    told: dict[str, Any] = answer.json()
    assert told["choices"][0]["token_ids"] == right
    return told


class Asking:
    """Asks one request after the other until it is ended; `failed` is what was wrong with any."""

    def __init__(self, url: str) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self._url = url
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.05):
            try:
                ask(self._url, 1000 + self.answered)
            except Exception as error:
                self.failed.append(repr(error))
            self.answered += 1

    def end(self) -> None:
        self._end.set()


@pytest.fixture(scope="module")
def cluster(hosts: Hosts) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(hosts, stack)


def test_up_on_a_cluster_serves_and_ends_what_it_started(hosts: Hosts, tmp_path: Path) -> None:
    log = tmp_path / "up.out"
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in SETTINGS.items()
        if name in {"model", "device", "kv_memory", "max_model_len"}
    ]
    command = [sys.executable, "-m", "baton.cli", "up", "--ray-address", hosts.ray_address, *flags]
    up = hosts.head.popen(*command, "--http-port", "0", "--grpc-port", "0", "--log-dir", str(tmp_path), log=log)
    end_s = time.monotonic() + START_S
    while not (ready := re.search(r"^ready (http://\S+)", log.read_text(), re.MULTILINE)):
        assert up.poll() is None, log.read_text()
        assert time.monotonic() < end_s, log.read_text()
        time.sleep(0.1)
    said = log.read_text()
    assert re.search(r"^prefill-0 .* on node-p ", said, re.MULTILINE), said
    assert re.search(r"^decode-0 .* on node-d ", said, re.MULTILINE), said
    assert (
        f"node-x ({hosts.hosts[3].address}) has Baton {OTHER_VERSION}, this fleet has {baton.__version__}: refused"
        in said
    )
    hosts.head.call(lambda: ask(ready[1], 1))
    processes = psutil.Process(pid_below(up)).children(recursive=True)
    reaper = next(process.cmdline() for process in processes if "baton.fleet.processes.reaper" in process.cmdline())
    conf = Path(reaper[-1], "redis", "redis.conf")
    assert conf.stat().st_mode & 0o777 == 0o600
    settings = dict(line.split(maxsplit=1) for line in conf.read_text().splitlines())
    assert settings["bind"] == hosts.head.address
    password = settings["requirepass"]
    told_anybody = [
        *(" ".join(process.cmdline()) for process in processes),
        *(path.read_text(errors="replace") for path in tmp_path.rglob("*.*")),
    ]
    assert not [text for text in told_anybody if password in text]
    os.kill(pid_below(up), signal.SIGTERM)
    assert up.wait(60) == 0, log.read_text()
    assert not [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_a_fleet_places_by_role_and_refuses_another_baton_by_name(cluster: Cluster) -> None:
    cluster.until_ready()
    workers = cluster.until(lambda: len(found := cluster.workers()) == 2 and found, "two workers")
    addresses = {host.name: host.address for host in cluster.hosts.hosts}
    assert {name: (worker["host"], worker["worker"]["address"].split(":")[0]) for name, worker in workers.items()} == {
        "prefill-0": ("node-p", addresses["node-p"]),
        "decode-0": ("node-d", addresses["node-d"]),
    }
    (refused,) = cluster.logged("node_refused")
    assert refused["node"] == f"node-x ({addresses['node-x']})"
    assert refused["why"] == f"has Baton {OTHER_VERSION}, this fleet has {baton.__version__}"
    told = cluster.head.call(lambda: ask(cluster.url, 7))["baton"]
    assert (told["prefill"]["worker_id"], told["decode"]["worker_id"], told["transport"]) == (
        "prefill-0",
        "decode-0",
        "tcp",
    )
    assert told["kv_bytes"] > 0


def test_workers_live_on_without_the_fleet_and_the_next_one_adopts_them(cluster: Cluster) -> None:
    before = cluster.workers()
    asking = Asking(cluster.url)
    thread = threading.Thread(target=lambda: cluster.head.call(asking.run))
    thread.start()
    os.kill(pid_below(cluster.fleet), signal.SIGKILL)
    cluster.fleet.wait(10)
    without = asking.answered
    cluster.until(lambda: asking.answered > without, "an answer without a fleet")
    num_started = len(cluster.logged("worker_started"))
    cluster.fleet = cluster.start_fleet()
    cluster.until(lambda: len(cluster.logged("worker_started")) == num_started + 2, "two workers adopted")
    asking.end()
    thread.join()
    assert asking.failed == []
    after = cluster.workers()
    assert {name: (w["worker"], w["pid"]) for name, w in after.items()} == {
        name: (w["worker"], w["pid"]) for name, w in before.items()
    }


def test_a_drained_node_gives_its_worker_up_and_the_next_node_gets_it(cluster: Cluster) -> None:
    hosts = cluster.hosts
    node = next(host for host in hosts.hosts if host.name == "node-d")
    new = hosts.add("node-e")
    hosts.join(
        new, "--num-cpus", "1", "--resources", '{"baton_decode": 1}'
    )  # it comes while the worker waits for a node
    done = cluster.baton(node, "drain", "--here", "--wait", "--limit-s", "30")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "decode-0 has left"
    cluster.until(lambda: cluster.workers().get("decode-0", {}).get("host") == "node-e", "the worker on the new node")
    cluster.until_ready()
    cluster.head.call(lambda: ask(cluster.url, 9))


def test_a_worker_that_dies_comes_back_and_a_fleet_that_is_stopped_leaves_all_there(cluster: Cluster) -> None:
    node = cluster.hosts.hosts[1]
    before = cluster.workers()
    node.popen("kill", "-9", str(before["prefill-0"]["pid"]), log=node.directory / "kill.out").wait(10)
    cluster.until(lambda: cluster.logged("worker_died"), "its death is seen")
    cluster.until(
        lambda: cluster.workers().get("prefill-0", before["prefill-0"])["pid"] != before["prefill-0"]["pid"],
        "it is back",
    )
    assert terminate(cluster.fleet, 30) == 0
    cluster.until_ready()
    assert cluster.workers().keys() == {"prefill-0", "decode-0"}
    cluster.head.call(lambda: ask(cluster.url, 11))


def test_workers_follow_the_places_that_nodes_offer(cluster: Cluster) -> None:
    """The node that was drained before counts again, as nobody has told this fleet; that of the other Baton
    keeps one waiting."""
    hosts, before = cluster.hosts, cluster.workers()
    port = cluster.head.call(lambda: choose_port(cluster.head.address, 0, flag=""))
    cluster.fleet = cluster.start_fleet(scale_with_nodes=True, admin_port=port)
    there = {("prefill", "serving"): 1, ("decode", "serving"): 2, ("decode", "waiting"): 1}
    cluster.until(lambda: cluster.fleet_workers() == there, "a worker for each place")
    after = cluster.workers()
    assert {after[name]["pid"] for name in before} == {worker["pid"] for worker in before.values()}, "adopted"
    new = hosts.add("node-f")
    hosts.join(new, "--num-cpus", "1", "--resources", '{"baton_prefill": 2}')
    cluster.until(lambda: cluster.fleet_workers() == {**there, ("prefill", "serving"): 3}, "workers for the new node")
    cluster.until(lambda: cluster.workers().keys() > {"prefill-1", "prefill-2"}, "they serve")
    left = cluster.workers()["prefill-1"]
    done = cluster.baton(cluster.head, "drain", "prefill-1", "--wait", "--limit-s", "30")
    assert done.returncode == 0, done.stdout
    back = cluster.until(lambda: cluster.workers().get("prefill-1"), "it is back")
    assert (back["host"], back["worker"] == left["worker"]) == ("node-f", False), "in a new life, where it was"
    done = cluster.baton(new, "drain", "--here", "--wait", "--limit-s", "30")
    assert done.returncode == 0, done.stdout
    cluster.until(lambda: cluster.fleet_workers() == there, "nobody waits for a place on the node that leaves")
    cluster.head.call(lambda: ask(cluster.url, 13))


def test_a_stranger_gets_nothing_out_of_redis(cluster: Cluster) -> None:
    async def come(url: str) -> None:
        connection = RedisConnection(url)
        try:
            await connection.ping()
        finally:
            await connection.aclose()

    node = cluster.hosts.hosts[1]
    node.call(lambda: asyncio.run(come(cluster.redis_url)))
    with pytest.raises(StoreUnavailable, match="uthentication"):
        node.call(lambda: asyncio.run(come(re.sub(r"//:[^@]+@", "//", cluster.redis_url))))
