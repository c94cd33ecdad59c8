"""A fleet on an existing Ray cluster of several machines: placement, adoption, drain and restarts."""

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
from baton.gateway.auth.api_keys import key_digest, new_key
from baton.runtime.config.config_base import settings_of
from baton.runtime.config.settings import SERVICES
from baton.runtime.network.addresses import choose_port
from baton.store.redis.private_redis import redis_command
from baton.store.redis.redis_connection import RedisConnection
from tests.emulated_answer import emulated_answer
from tests.integration.fleet.ray_hosts import Host, Hosts, ray_hosts, terminate
from tests.netns import pid_below, unavailable_reason
from tests.times import TEST_TIMES

UNAVAILABLE_REASON = unavailable_reason()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(UNAVAILABLE_REASON), reason=UNAVAILABLE_REASON or "network namespaces are available"),
]

VOCAB_SIZE = 4096
START_S = 90.0
OTHER_VERSION = "0.0.9"
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "device": "emulated",
    "policy": "round_robin",  # always places prefill and decode apart, however slow the link seems
    "emulated_costs": "step=4ms,prefill_token=20us",
    "kv_memory": 64 * 2**20,
    "max_model_len": 4096,
    **TEST_TIMES,
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """A head, a prefill node, a decode node, and a second decode node with another Baton release."""
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
    """Create a package that equals this one except for its version. Return the directory for PYTHONPATH."""
    package = directory / "other" / "baton"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = {OTHER_VERSION!r}\n__path__ = {list(baton.__path__)!r}\n")
    return package.parent


class Cluster:
    """The services and the fleet, all on the head's machine."""

    def __init__(self, hosts: Hosts, stack: ExitStack, *, api_key: str = "", **changes: Any) -> None:
        """Start all processes.

        api_key: an admin's key that the gateway requires; empty: it requires none.
        changes: settings in addition to `SETTINGS`.
        """
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
            **changes,
        }
        self.api_key = api_key
        if api_key:
            self.settings["api_keys"] = self._key_file(api_key)
        for service in ("scheduler", "gateway"):
            self._start(service, self._command(service))
        self.fleet = self.start_fleet()

    def start_fleet(self, **changes: Any) -> subprocess.Popen[bytes]:
        self.settings |= changes
        return self._start("fleet", self._command("fleet"))

    def _key_file(self, api_key: str) -> str:
        key = {"name": "admin", "tenant": "test", "sha256": key_digest(api_key).hex(), "admin": True}
        file = self.directory / "keys.yaml"
        file.write_text(yaml.safe_dump({"salt": "ab" * 16, "keys": [key]}))
        file.chmod(0o600)
        return str(file)

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
        """Run a `baton` command on one of the machines and wait for its end."""
        log = host.directory / "command.out"
        log.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "baton.cli", *words, "--gateway", f"{self.head.address}:{self.grpc_port}"]
        process = host.popen(*argv, log=log, **({"BATON_API_KEY": self.api_key} if self.api_key else {}))
        return subprocess.CompletedProcess(argv, process.wait(60), log.read_text())

    def complete(self, number: int) -> dict[str, Any]:
        """Send one completion request from the head's machine. Return the checked response."""
        return self.head.call(lambda: complete(self.url, number, self.api_key))

    def workers(self) -> dict[str, dict[str, Any]]:
        """Ready workers by id, as `baton status` lists them."""
        done = self.baton(self.head, "status", "--json")
        found = json.loads(done.stdout)["workers"] if done.returncode == 0 else []
        return {worker["worker"]["worker_id"]: worker for worker in found if worker["state"] == "ready"}

    def until(self, condition: Callable[[], Any], what: str, limit_s: float = START_S) -> Any:
        """Wait until `condition` returns a true value, and return it."""
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
        """Number of workers by role and state, from the metrics of the fleet. Zeros are left out."""
        url = f"http://{self.head.address}:{self.settings['admin_port']}/metrics"
        text = self.head.call(lambda: httpx.get(url, timeout=5.0)).text
        found = re.findall(r'^baton_fleet_workers\{role="(\w+)",state="(\w+)"\} (\d+)', text, re.MULTILINE)
        return {(role, state): int(number) for role, state, number in found if number != "0"}

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Log lines of the fleet with this event."""
        lines = [json.loads(line) for line in self.fleet_log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("event") == event]


def complete(url: str, number: int, api_key: str = "") -> dict[str, Any]:
    """Send one completion request and check every token of the answer. Return the response."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    rng = Random(number)
    prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(300)]
    request = {"prompt": prompt, "max_tokens": 8, "seed": number, "temperature": 1.0}
    body = {"model": "demo", "return_token_ids": True, "timeline": True, **request}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60.0)
    assert answer.status_code == httpx.codes.OK, answer.text
    expected = emulated_answer(prompt, seed=number, max_tokens=8, vocab_size=VOCAB_SIZE)
    response: dict[str, Any] = answer.json()
    assert response["choices"][0]["token_ids"] == expected
    return response


class RequestLoop:
    """Sends one request after the other until `end` is called. `failed` lists all errors."""

    def __init__(self, url: str, api_key: str) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self._url = url
        self._api_key = api_key
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.05):
            try:
                complete(self._url, 1000 + self.answered, self._api_key)
            except Exception as error:
                self.failed.append(repr(error))
            self.answered += 1

    def end(self) -> None:
        self._end.set()


@pytest.fixture(scope="module")
def cluster(hosts: Hosts) -> Iterator[Cluster]:
    """A cluster whose workers serve, one on `node-p` and one on `node-d`, so that a test can run alone."""
    with ExitStack() as stack:
        # A key, because without keys only a process of the gateway's machine may drain workers.
        cluster = Cluster(hosts, stack, api_key=new_key())
        cluster.until_ready()
        cluster.until(lambda: cluster.workers().keys() == {"prefill-0", "decode-0"}, "two workers")
        yield cluster


def test_up_on_an_existing_ray_cluster_serves_and_removes_its_processes(hosts: Hosts, tmp_path: Path) -> None:
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
    output = log.read_text()
    assert re.search(r"^prefill-0 .* on node-p ", output, re.MULTILINE), output
    assert re.search(r"^decode-0 .* on node-d ", output, re.MULTILINE), output
    assert (
        f"node-x ({hosts.hosts[3].address}) has Baton {OTHER_VERSION}, this fleet has {baton.__version__}: refused"
        in output
    )
    hosts.head.call(lambda: complete(ready[1], 1))
    processes = psutil.Process(pid_below(up)).children(recursive=True)
    reaper = next(process.cmdline() for process in processes if "baton.fleet.processes.reaper" in process.cmdline())
    conf = Path(reaper[-1], "redis", "redis.conf")
    assert conf.stat().st_mode & 0o777 == 0o600
    settings = dict(line.split(maxsplit=1) for line in conf.read_text().splitlines())
    assert settings["bind"] == hosts.head.address
    password = settings["requirepass"]
    visible_texts = [
        *(" ".join(process.cmdline()) for process in processes),
        *(path.read_text(errors="replace") for path in tmp_path.rglob("*.*")),
    ]
    assert not [text for text in visible_texts if password in text]
    os.kill(pid_below(up), signal.SIGTERM)
    assert up.wait(60) == 0, log.read_text()
    assert not [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_fleet_places_by_role_and_refuses_a_node_with_another_release(cluster: Cluster) -> None:
    workers = cluster.workers()
    addresses = {host.name: host.address for host in cluster.hosts.hosts}
    assert {name: (worker["host"], worker["worker"]["address"].split(":")[0]) for name, worker in workers.items()} == {
        "prefill-0": ("node-p", addresses["node-p"]),
        "decode-0": ("node-d", addresses["node-d"]),
    }
    (refused,) = cluster.logged("node_refused")
    assert refused["node"] == f"node-x ({addresses['node-x']})"
    assert refused["reason"] == f"has Baton {OTHER_VERSION}, this fleet has {baton.__version__}"
    cluster.until(lambda: cluster.workers()["decode-0"]["links"], "decode-0 can read from prefill-0")
    timeline = cluster.complete(7)["baton"]
    assert (timeline["prefill"]["worker_id"], timeline["decode"]["worker_id"], timeline["transport"]) == (
        "prefill-0",
        "decode-0",
        "tcp",
    )
    assert timeline["kv_bytes"] > 0


def test_workers_serve_without_the_fleet_and_the_next_fleet_adopts_them(cluster: Cluster) -> None:
    before = cluster.workers()
    requests = RequestLoop(cluster.url, cluster.api_key)
    thread = threading.Thread(target=lambda: cluster.head.call(requests.run))
    thread.start()
    os.kill(pid_below(cluster.fleet), signal.SIGKILL)
    cluster.fleet.wait(10)
    without = requests.answered
    cluster.until(lambda: requests.answered > without, "an answer without a fleet")
    num_started = len(cluster.logged("worker_started"))
    cluster.fleet = cluster.start_fleet()
    cluster.until(lambda: len(cluster.logged("worker_started")) == num_started + 2, "two workers adopted")
    requests.end()
    thread.join()
    assert requests.failed == []
    after = cluster.workers()
    assert {name: (w["worker"], w["pid"]) for name, w in after.items()} == {
        name: (w["worker"], w["pid"]) for name, w in before.items()
    }


def test_worker_of_a_drained_node_moves_to_a_new_node(cluster: Cluster) -> None:
    hosts = cluster.hosts
    node = next(host for host in hosts.hosts if host.name == "node-d")
    new = hosts.add("node-e")
    hosts.join(new, "--num-cpus", "1", "--resources", '{"baton_decode": 1}')  # joins while the worker waits for a node
    done = cluster.baton(node, "drain", "--here", "--wait", "--limit-s", "30")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "decode-0 has ended"
    cluster.until(lambda: cluster.workers().get("decode-0", {}).get("host") == "node-e", "the worker on the new node")
    cluster.until_ready()
    cluster.complete(9)


def test_dead_worker_is_restarted_and_a_stopped_fleet_leaves_its_workers(cluster: Cluster) -> None:
    node = cluster.hosts.hosts[1]
    before = cluster.workers()
    node.popen("kill", "-9", str(before["prefill-0"]["pid"]), log=node.directory / "kill.out").wait(10)
    cluster.until(lambda: cluster.logged("worker_died"), "the fleet logs its death")
    cluster.until(
        lambda: cluster.workers().get("prefill-0", before["prefill-0"])["pid"] != before["prefill-0"]["pid"],
        "the worker is restarted",
    )
    assert terminate(cluster.fleet, 30) == 0
    cluster.until_ready()
    assert cluster.workers().keys() == {"prefill-0", "decode-0"}
    cluster.complete(11)


def test_workers_follow_the_places_that_nodes_offer(cluster: Cluster) -> None:
    """The node that was drained before counts again, because the new fleet does not know of the drain. The
    place of the node with another release keeps one worker waiting."""
    hosts, before = cluster.hosts, cluster.workers()
    port = cluster.head.call(lambda: choose_port(cluster.head.address, 0, flag=""))
    cluster.fleet = cluster.start_fleet(scale_with_nodes=True, admin_port=port)
    expected = {("prefill", "serving"): 1, ("decode", "serving"): 2, ("decode", "waiting"): 1}
    cluster.until(lambda: cluster.fleet_workers() == expected, "a worker for each place")
    after = cluster.workers()
    assert {after[name]["pid"] for name in before} == {worker["pid"] for worker in before.values()}, "adopted"
    new = hosts.add("node-f")
    hosts.join(new, "--num-cpus", "1", "--resources", '{"baton_prefill": 2}')
    cluster.until(
        lambda: cluster.fleet_workers() == {**expected, ("prefill", "serving"): 3}, "workers for the new node"
    )
    cluster.until(lambda: cluster.workers().keys() > {"prefill-1", "prefill-2"}, "they serve")
    left = cluster.workers()["prefill-1"]
    done = cluster.baton(cluster.head, "drain", "prefill-1", "--wait", "--limit-s", "30")
    assert done.returncode == 0, done.stdout
    back = cluster.until(lambda: cluster.workers().get("prefill-1"), "the worker is restarted")
    assert (back["host"], back["worker"] == left["worker"]) == ("node-f", False), "a new incarnation on the same node"
    done = cluster.baton(new, "drain", "--here", "--wait", "--limit-s", "30")
    assert done.returncode == 0, done.stdout
    cluster.until(lambda: cluster.fleet_workers() == expected, "no worker waits for a place on the draining node")
    cluster.complete(13)


def test_redis_requires_its_password(cluster: Cluster) -> None:
    async def ping(url: str) -> None:
        connection = RedisConnection(url)
        try:
            await connection.ping()
        finally:
            await connection.aclose()

    node = cluster.hosts.hosts[1]
    node.call(lambda: asyncio.run(ping(cluster.redis_url)))
    with pytest.raises(StoreUnavailable, match="uthentication"):
        node.call(lambda: asyncio.run(ping(re.sub(r"//:[^@]+@", "//", cluster.redis_url))))
