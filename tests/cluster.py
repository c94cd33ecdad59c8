"""A test cluster of real processes: Redis, scheduler, workers and gateway, without Ray.

Each process can be stopped, killed and started.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.core.client_api import ClusterStatus
from baton.fleet.processes.supervisor import Child, ChildSpec, baton_command
from baton.rpc.admin_rpc import AdminClient
from baton.rpc.channel import channel_options, open_channel
from baton.runtime.config.config_base import settings_of
from baton.runtime.config.settings import SERVICES
from baton.store.redis.private_redis import RedisCommand
from tests.cluster_network import HOST, ClusterNetwork
from tests.cluster_security import ADMIN, Secured
from tests.redis_proxy import RedisProxy
from tests.times import TEST_TIMES

START_S = 90.0
PROGRAM = "baton.cli"
SETTLE_S = 30.0
"""Time after the last request and fault within which all blocks, leases and sequences must be released."""
DEMO_BLOCK_BYTES = 16 * 6 * 2 * 2 * 64 * 4
"""KV of 16 tokens of the demo model: 6 layers, keys and values, 2 heads of size 64, float32."""


class History(Protocol):
    """A request of a client and its answer so far."""

    def token_chains(self) -> Iterable[tuple[int, ...]]:
        """Return prompt and output tokens of each sample, or only the prompt if there is no output."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayAddresses:
    """Addresses at which clients reach a gateway."""

    url: str
    grpc_address: str


class ProcessCluster:
    """A cluster whose processes are named `redis`, `scheduler`, `gateway`, `p0`, `d0`, `h0`, ...

    history: requests and answers since the start. Each test client appends its own.
    gateways: addresses of all gateways by name.
    start_limit_s: longest time until a process is ready.
    """

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, Any],
        secured: Secured | None = None,
        network: ClusterNetwork | None = None,
    ) -> None:
        """Create a cluster without processes.

        secured: certificates and API keys. None: without TLS and authentication.
        network: the places of the processes, by default the loopback interface.
        """
        self.directory = directory
        self.secured = secured
        self.network = network or ClusterNetwork()
        self.settings: dict[str, Any] = {
            "host": HOST,
            "model": "demo",
            "dtype": "float32",
            "kv_memory": 64 * 2**20,
            "max_model_len": 4096,
            "threads_per_worker": 1,
            "policy": "least_loaded",  # placement in these tests must not depend on measured times
            **TEST_TIMES,
            **({} if secured is None else secured.settings()),
            **settings,
        }
        self.children: dict[str, Child] = {}
        self.roles: dict[str, str] = {}
        self.url = ""
        self.grpc_address = ""
        self.redis_proxy: RedisProxy | None = None
        self.history: list[History] = []
        self.gateways: dict[str, GatewayAddresses] = {}
        self.start_limit_s = START_S
        self._redis: RedisCommand | None = None
        self._started: dict[str, tuple[str, dict[str, Any]]] = {}

    async def start(
        self,
        *,
        prefill: int = 1,
        decode: int = 1,
        hybrid: int = 0,
        schedulers: int = 1,
        gateways: int = 1,
        failpoints: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> None:
        """Start all processes. Redis is reached through `redis_proxy` if that is set.

        schedulers, gateways: numbers of these. The further ones are named `scheduler1`, `gateway1`, ...
        failpoints: failpoints by worker name.
        wait: wait until all gateways are ready.
        """
        await self.start_redis()
        if self.redis_proxy is not None:
            self.settings["redis_url"] = await self.redis_proxy.start(self.settings["redis_url"])
        gateway_names = ["gateway", *(f"gateway{i}" for i in range(1, gateways))]
        ports = {name: self._choose_gateway_ports(name) for name in gateway_names}
        self.url, self.grpc_address = self.gateways["gateway"].url, self.gateways["gateway"].grpc_address
        names = {
            f"{role[0]}{i}": role
            for role, n in (("prefill", prefill), ("decode", decode), ("hybrid", hybrid))
            for i in range(n)
        }
        self.roles = names
        await asyncio.gather(
            *(self.start_service(f"scheduler{i or ''}", "scheduler") for i in range(schedulers)),
            *(self.start_service(name, "gateway", **chosen) for name, chosen in ports.items()),
            *(self.start_worker(name, failpoints=(failpoints or {}).get(name, "")) for name in names),
        )
        if wait:
            for name in gateway_names:
                await self.wait_ready(self.gateways[name].url)

    async def start_redis(self) -> None:
        """Start Redis, or start it again at the same address without its data."""
        if self._redis is None:
            self._redis = self.network.redis(self.directory / "redis")
            self.settings["redis_url"] = self._redis.url
        place = self.network.place("redis")
        argv = [*place.argv, *self._redis.argv]
        await self._start_child("redis", argv, dict(place.environ), self._redis.wait_until_ready)

    async def start_again(self, name: str) -> None:
        """Start a process that ended, with the settings of its last start. A worker gets a new epoch."""
        if name == "redis":
            await self.start_redis()
        else:
            command, arguments = self._started[name]
            await self.start_service(name, command, **arguments)

    async def start_worker(self, name: str, *, failpoints: str = "", program: str = PROGRAM, **settings: Any) -> None:
        """Start a worker, or start it again with a new epoch."""
        role = self.roles.setdefault(name, {"p": "prefill", "d": "decode", "h": "hybrid"}[name[0]])
        await self.start_service(
            name, "worker", failpoints=failpoints, program=program, worker_id=name, role=role, **settings
        )

    async def start_service(
        self,
        name: str,
        command: str,
        *,
        failpoints: str = "",
        max_open_files: int | None = None,
        program: str = PROGRAM,
        **settings: Any,
    ) -> None:
        """Start a service.

        max_open_files: limit of open files of the process.
        program: the Python module to run; it takes the command line of `baton`.
        """
        self._started[name] = (command, {"failpoints": failpoints, "program": program, **settings})
        known = {setting.name for setting in settings_of(SERVICES[command])}
        place = self.network.place(name)
        every = {**self.settings, **place.settings, **settings}
        values = {key: value for key, value in every.items() if key in known and value is not None}
        file = self.directory / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**values, "log_dir": str(self.directory / "logs" / name)}))
        limited = [] if max_open_files is None else ["/bin/sh", "-c", f'ulimit -n {max_open_files} && exec "$@"', "sh"]
        own = [sys.executable, "-m", program, command, "--config", str(file)]
        argv = [*place.argv, *limited, *(baton_command(command, file) if program == PROGRAM else own)]
        failing = {"BATON_FAILPOINTS": failpoints} if failpoints else {}
        await self._start_child(name, argv, {**place.environ, **failing})

    async def _start_child(self, name: str, argv: list[str], environ: dict[str, str], ready: Any = None) -> None:
        output = self.directory / f"{name}.out"
        child = Child(
            ChildSpec(
                name=name,
                argv=argv,
                output=output,
                environ=environ,
                start_timeout_s=self.start_limit_s,
                wait_until_ready=ready,
            ),
        )
        self.children[name] = child
        await child.start()

    def pid(self, name: str) -> int:
        return self.children[name].pid

    def _process(self, name: str) -> psutil.Process | None:
        """Return a running process, None if it has ended. Its pid may get another process later."""
        child = self.children[name]
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(child.pid) if child.pid and child.exit_code is None else None
        return None

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process. Raises ProcessLookupError if it is not running."""
        child = self.children[name]
        if not child.pid or child.exit_code is not None:  # to os.kill, 0 is this process with all its children
            raise ProcessLookupError(f"{name} is not running")
        os.kill(child.pid, number)

    async def kill(self, name: str) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.signal(name, signal.SIGKILL)
        await self.children.pop(name).stop(grace_s=30)

    async def stop_one(self, name: str) -> int:
        """Send SIGTERM and return the exit code."""
        child = self.children.pop(name)
        await child.stop(grace_s=30)
        assert child.exit_code is not None
        return child.exit_code

    async def until_ended(self, name: str, limit_s: float = 60.0) -> int:
        """Wait for the end of a process that received SIGTERM, and return its exit code."""
        async with asyncio.timeout(limit_s):
            while self.children[name].exit_code is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return await self.stop_one(name)

    async def start_gateway(self, name: str, *, max_open_files: int | None = None, **settings: Any) -> GatewayAddresses:
        """Start another gateway and wait until it is ready."""
        ports = self._choose_gateway_ports(name)
        await self.start_service(name, "gateway", max_open_files=max_open_files, **ports, **settings)
        await self.wait_ready(self.gateways[name].url)
        return self.gateways[name]

    def _choose_gateway_ports(self, name: str) -> dict[str, int]:
        """Choose the ports of a gateway, note its addresses and return its settings."""
        host, http_port, grpc_port = self.network.client_ports(name)
        scheme = "http" if self.secured is None else "https"
        self.gateways[name] = GatewayAddresses(url=f"{scheme}://{host}:{http_port}", grpc_address=f"{host}:{grpc_port}")
        return {"http_port": http_port, "grpc_port": grpc_port}

    async def wait_ready(self, url: str | None = None) -> None:
        """Wait until the gateway at `url` is ready, by default `gateway`."""
        last = ""
        async with httpx.AsyncClient(
            timeout=10.0, verify=True if self.secured is None else self.secured.trust
        ) as client:
            for _ in range(int(self.start_limit_s / 0.05)):
                try:
                    answer = await client.get(f"{url or self.url}/ready")
                    last = answer.text
                    if answer.status_code == 200:
                        return
                except httpx.HTTPError as error:
                    last = repr(error)
                await asyncio.sleep(0.05)
        raise AssertionError(f"not ready: {last}; see {self.directory}")

    async def status(self) -> ClusterStatus:
        async with self._admin() as admin:
            return await admin.status()

    @asynccontextmanager
    async def _admin(self, gateway: str = "gateway") -> AsyncIterator[AdminClient]:
        tls, key = (None, "") if self.secured is None else (self.secured.front, self.secured.bearer(ADMIN))
        # A long keepalive and timeout, so that a busy machine breaks no connection.
        address = self.gateways[gateway].grpc_address
        async with open_channel(address, channel_options(10.0), tls) as channel:
            yield AdminClient(channel, address, authorization=key, call_s=60.0)

    async def until(
        self, condition: Callable[[ClusterStatus], bool], limit_s: float, what: str, *, gateway: str = "gateway"
    ) -> ClusterStatus:
        """Poll the cluster's status, as `gateway` knows it, until `condition` holds.

        Raises AssertionError with the last status.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        async with self._admin(gateway) as admin:  # one connection for all polls, so that few states are missed
            while True:
                status = await admin.status()
                if condition(status):
                    return status
                if loop.time() > end_s:
                    raise AssertionError(f"not within {limit_s:g} s: {what}\n{self.ends_of_logs()}\n{status}")
                await asyncio.sleep(0.05)

    def ends_of_logs(self, max_bytes: int = 3_000) -> str:
        """Return each child's exit code and the end of its output and log. The directory is removed with the
        cluster."""
        texts = []
        for name, child in self.children.items():
            ended = "runs" if child.exit_code is None else f"ended with {child.exit_code}"
            files = (child.spec.output, *(self.directory / "logs" / name).glob("*.log"))
            ends = [file.read_bytes()[-max_bytes:].decode(errors="replace") for file in files if file.exists()]
            texts.append(f"--- {name}, pid {child.pid}, {ended}\n" + "\n".join(ends))
        return "\n".join(texts)

    async def until_workers(self, *names: str, limit_s: float = START_S) -> None:
        """Wait until exactly these workers are ready."""
        await self.until(
            lambda s: sorted(w.worker.worker_id for w in s.workers if w.state.value == "ready") == sorted(names),
            limit_s,
            f"workers {names}",
        )

    async def check_clean(self, limit_s: float = SETTLE_S) -> None:
        """Wait until every block of every living worker is free or cached, and no lease or sequence is
        left."""

        def is_clean(status: ClusterStatus) -> bool:
            return all(
                w.blocks.free + w.blocks.cached == w.blocks.total
                and w.blocks.is_balanced
                and not w.open_leases
                and not w.running_seqs
                and not w.waiting_seqs
                for w in status.workers
            )

        await self.until(
            is_clean, limit_s, "every block free or cached, none used, receiving or quarantined; no lease, no sequence"
        )

    def check_alive(self) -> None:
        """Raise AssertionError with the end of its log if a process ended that was not stopped or killed."""
        for name, child in self.children.items():
            if child.exit_code is not None:
                logs = [path.read_text()[-3000:] for path in (self.directory / "logs" / name).glob("*.log")]
                raise AssertionError(f"{name} ended with {child.exit_code}: {logs}")

    def log_entries(self, name: str) -> list[dict[str, Any]]:
        """Return all complete log entries of all incarnations of a process."""
        texts = [file.read_text() for file in (self.directory / "logs" / name).glob("*.log")]
        return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]

    async def metric(self, name: str, metric: str) -> float:
        """Return the sum of a metric's samples. The process must have been started with `admin_port=0`."""
        return sum(sample.value for sample in await self.scrape(name) if sample.name == metric)

    async def scrape(self, name: str) -> list[Sample]:
        """Return all samples of a process that was started with `admin_port=0`."""
        started = [entry for entry in self.log_entries(name) if entry["event"] == "admin_started"]
        address = started[-1]["address"]
        async with httpx.AsyncClient(timeout=60.0) as client:
            text = (await client.get(f"http://{address}/metrics")).text
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    async def stop(self) -> None:
        """Stop all processes, gateways first, and close the network. Raises AssertionError if one is left."""
        ranks = {name: 0 if name.startswith("g") else 2 if name == "redis" else 1 for name in self.children}
        processes = [process for name in ranks if (process := self._process(name)) is not None]
        try:
            for name in ranks:
                self.children[name].resume()
            stopped: list[Exception | None] = []
            for rank in range(3):  # the processes of one rank at the same time
                names = [name for name in ranks if ranks[name] == rank]
                stopped += await asyncio.gather(*(_outcome(self.children.pop(n).stop(grace_s=15)) for n in names))
            if errors := [error for error in stopped if error is not None]:
                raise errors[0]
            left = [process for process in processes if process.is_running()]
            assert not left, f"processes left behind: {left}"
        finally:
            if self.redis_proxy is not None:
                await self.redis_proxy.aclose()
            await self.network.aclose()


async def _outcome(work: Coroutine[Any, Any, None]) -> Exception | None:
    """Await `work` and return its error, so that the next step of a cleanup follows."""
    try:
        await work
    except Exception as error:
        return error
    return None


@asynccontextmanager
async def process_cluster(
    *,
    prefill: int = 1,
    decode: int = 1,
    hybrid: int = 0,
    failpoints: Mapping[str, str] | None = None,
    wait: bool = True,
    redis_proxy: RedisProxy | None = None,
    tenants: tuple[str, ...] = (),
    network: ClusterNetwork | None = None,
    **settings: Any,
) -> AsyncIterator[ProcessCluster]:
    """Run a cluster. It is cleaned up also after a failed test.

    tenants: enable TLS on all connections and API keys for these tenants.
    network: the places of the processes, by default the loopback interface.
    """
    with tempfile.TemporaryDirectory(prefix="baton-t-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        secured = Secured.new(Path(directory), *tenants) if tenants else None
        cluster = ProcessCluster(Path(directory), settings, secured, network)
        cluster.redis_proxy = redis_proxy
        try:
            await cluster.start(prefill=prefill, decode=decode, hybrid=hybrid, failpoints=failpoints, wait=wait)
            yield cluster
        finally:
            await cluster.stop()
