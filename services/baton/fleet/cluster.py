"""Starts, supervises and stops all processes of one `baton up`."""

import asyncio
import json
import math
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx

from baton.core.errors import BatonError, ConfigError
from baton.fleet.first_prompt import authorization, local_client, warm_up
from baton.fleet.local.local_plan import plan_local_workers
from baton.fleet.model_files import model_directory
from baton.fleet.preflight import check_model
from baton.fleet.processes.restart_policy import SERVICE_LIMIT
from baton.fleet.processes.run_dir import RunDir
from baton.fleet.processes.supervisor import Child, ChildSpec, baton_command
from baton.fleet.ray.ray_connection import JoinedCluster
from baton.fleet.ray.ray_fleet import RayFleet
from baton.fleet.ray.worker_actor import WorkerFacts
from baton.fleet.startup_progress import Notify, StartupProgress
from baton.fleet.worker_plan import WorkerSpec, max_workers_per_gpu, plan_workers
from baton.model.loading.model_source import DEMO
from baton.runtime import logging
from baton.runtime.config.config_base import Config, derive, dump
from baton.runtime.config.settings import ClusterConfig, GatewayConfig, SchedulerConfig, WorkerConfig
from baton.runtime.config.worker_settings import DRAFT_PREFIX, draft_model_of
from baton.runtime.network.addresses import choose_port, join_address, local_host, reserve_port
from baton.runtime.process.process_end import describe_exit
from baton.store.redis.private_redis import START_S, redis_command

log = logging.get_logger(__name__)

LOOPBACK = "127.0.0.1"
VIEW_PORT = 8002
"""Port of the live view, if the HTTP port is the default one."""
READY_TIMEOUT_S = 120.0
STOP_GRACE_S = 5.0
GIVE_UP_S = 300.0
"""Time for which the scheduler or the gateway may keep dying before the cluster ends. Without both, nothing
can serve."""


class Cluster:
    """All processes of one `baton up`: Redis, scheduler and gateway as child processes, workers on Ray.

    http_url, grpc_address, view_url: where clients and browsers reach the gateway, set by `start`.
    """

    def __init__(self, config: ClusterConfig, run: RunDir, log_dir: Path | None, notify: Notify) -> None:
        self._config = config
        self._run = run
        self._log_dir = log_dir
        self._progress = StartupProgress(notify)
        self._notify = notify
        self._children: list[Child] = []
        self._fleet = RayFleet(
            ray_dir=run.path / "ray",
            log_dir=log_dir,
            joined=_joined_cluster(config),
            memory_limit=config.ray_memory_limit,
            start_timeout_s=config.worker_start_s,
            on_started=self._report_start,
            on_died=self._report_death,
            on_activity=self._report_activity,
            notify=notify,
        )
        self._supervision: asyncio.Task[None] | None = None
        self._worker_began_s: dict[str, float] = {}
        self._has_served = False
        self._http_port = self._grpc_port = self._admin_port = 0
        self._reserved: list[socket.socket] = []
        self.http_url = self.view_url = ""
        self.grpc_address = ""

    async def start(self) -> None:
        """Start everything and wait until the cluster has answered a request.

        Processes are supervised as soon as all have started. Raises BatonError with the name of the process
        that did not start or keeps dying, and the reason.
        """
        await self._start_processes()
        self._supervision = asyncio.create_task(self._supervise(), name="supervision")
        await self._unless_it_fails(self._progress.phase("link", self._wait_until_ready(), str))
        await self._unless_it_fails(warm_up(self.http_url, self._config.model_name))
        self._has_served = True

    async def _start_processes(self) -> None:
        self._choose_ports()
        model = await self._resolve_model()
        async with asyncio.TaskGroup() as group:
            connecting = group.create_task(self._progress.phase("ray", self._fleet.connect(), str))
            if self._is_joined:
                await connecting  # determines the address at which the worker nodes reach this machine
            redis_url = self._config.redis_url or await self._start_redis()
            group.create_task(self._start_scheduler(redis_url))
            group.create_task(self._start_gateway(redis_url, model))
            await connecting
            for spec, settings in await self._worker_settings(model, redis_url):
                group.create_task(self._start_worker(spec, settings))

    async def supervise(self) -> None:
        """Wait for the supervision that `start` began. Raises BatonError if nothing can serve any more."""
        assert self._supervision is not None
        await self._supervision

    async def _unless_it_fails(self, work: Coroutine[Any, Any, object]) -> None:
        """Await `work`, or raise the error of the supervision if that comes first."""
        assert self._supervision is not None
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, self._supervision), return_when=asyncio.FIRST_COMPLETED)
            await (task if task.done() else self._supervision)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _supervise(self) -> None:
        """Restart processes that die."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fleet.supervise())
            for child in self._children:
                group.create_task(child.supervise())

    async def close(self) -> None:
        """Stop the gateway, then the other services, then the workers, so that running requests can finish.

        Errors are reported and not raised, so that the remaining processes are ended too and an earlier error
        stays the one that is raised.
        """
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
            self._supervision = None
        for stop in (*(child.stop for child in reversed(self._children)), self._fleet.close):
            try:
                await stop(STOP_GRACE_S)
            except Exception as error:
                log.error("stop_failed", exc_info=error)
                self._notify(f"while stopping: {str(error) or type(error).__name__}")
        while self._reserved:
            self._reserved.pop().close()

    @property
    def parts(self) -> list[str]:
        """Names of what has been started, for people."""
        children = [child.spec.name for child in reversed(self._children)]
        number = self._fleet.num_workers
        workers = [f"{number} worker{'' if number == 1 else 's'}"] if number else []
        return [*children, *workers, *(["Ray"] if self._fleet.owns_ray else [])]

    def _choose_ports(self) -> None:
        config = self._config
        self._http_port = self._reserve_port(config.host, config.http_port, flag="--http-port")
        self._grpc_port = self._reserve_port(config.host, config.grpc_port, flag="--grpc-port")
        self._admin_port = self._reserve_port(config.host, _wanted_admin_port(config), flag="--admin-port")
        scheme = "http" if config.front_tls_pair is None else "https"
        host = local_host(config.host)
        self.http_url = f"{scheme}://{join_address(host, self._http_port)}"
        self.grpc_address = join_address(host, self._grpc_port)
        self.view_url = f"{scheme}://{join_address(host, self._admin_port)}/"

    def _reserve_port(self, host: str, port: int, *, flag: str) -> int:
        """Return `port`, or a free one for 0, which is the cluster's until `close`."""
        reserved = reserve_port(host, port, flag=flag)
        self._reserved.append(reserved)
        number: int = reserved.getsockname()[1]
        return number

    async def _resolve_model(self) -> str:
        """Return the model that workers load: a local directory, or its name on an existing Ray cluster.

        In the latter case each node has the model or downloads it. This machine needs it for the gateway's
        tokenizer.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        directory = await model_directory(self._config.model)
        check_model(self._config, Path(directory))
        if self._is_joined:
            return self._config.model
        if directory != self._config.model and self._config.model != DEMO:
            self._progress.line("model", directory, loop.time() - began_s)
        return directory

    async def _resolve_speculate(self) -> str:
        """Return `speculate` with the directory of its draft model, which is found as the model is."""
        draft = draft_model_of(self._config.speculate)
        if draft is None or self._is_joined:
            return self._config.speculate
        return f"{DRAFT_PREFIX}{await model_directory(draft)}"

    async def _start_redis(self) -> str:
        if self._is_joined:
            command = redis_command(
                self._run.path / "redis", host=self._fleet.node_address, advertise_host=self._advertise_host
            )
        else:
            command = redis_command(self._run.path / "redis")
        child = self._add_child("redis", command.argv, START_S, command.wait_until_ready)
        await self._progress.phase("redis", child.start(), lambda _: command.description)
        return command.url

    async def _start_scheduler(self, redis_url: str) -> None:
        host = self._fleet.node_address
        settings = derive(
            SchedulerConfig,
            self._config,
            host=host,
            advertise_host=self._advertise_host,
            redis_url=redis_url,
            rpc_port=self._reserve_port(host, 0, flag="--rpc-port"),
            admin_port=self._services_admin_port,
            log_dir=self._log_dir,
        )
        await self._start_service("scheduler", settings, self._config.policy)

    async def _start_gateway(self, redis_url: str, model: str) -> None:
        settings = derive(
            GatewayConfig,
            self._config,
            http_port=self._http_port,
            grpc_port=self._grpc_port,
            admin_port=self._admin_port,
            admin_tls=self._config.front_tls_pair is not None,
            model=model,
            served_model_name=self._config.model_name,
            advertise_host=None,
            redis_url=redis_url,
            log_dir=self._log_dir,
        )
        await self._start_service("gateway", settings, f"{self.http_url}, gRPC {self.grpc_address}")

    async def _start_service(self, name: str, settings: Config, description: str) -> None:
        file = self._run.path / f"{name}.yaml"
        file.touch(mode=0o600)
        file.write_text(json.dumps(dump(settings)))  # JSON is a subset of YAML
        child = self._add_child(name, baton_command(name, file), READY_TIMEOUT_S)
        await self._progress.phase(name, child.start(), lambda _: f"{description}  pid {child.pid}")

    def _add_child(
        self,
        name: str,
        argv: list[str],
        start_timeout_s: float,
        wait_until_ready: Callable[[], Coroutine[Any, Any, str]] | None = None,
    ) -> Child:
        spec = ChildSpec(
            name=name,
            argv=argv,
            output=self._output_dir / f"{name}.out",
            start_timeout_s=start_timeout_s,
            wait_until_ready=wait_until_ready,
        )
        child = Child(
            spec,
            limit=SERVICE_LIMIT,
            on_restart=self._report_restart,
            on_failing=self._report_failing,
            on_recovered=self._report_recovery,
            give_up_s=lambda: self._give_up_s(name),
        )
        self._children.append(child)
        return child

    async def _start_worker(self, spec: WorkerSpec, settings: WorkerConfig) -> None:
        def describe(facts: WorkerFacts) -> str:
            host = f" on {facts.host}" if self._is_joined else ""
            return f"{spec.role.value:<8} pid {facts.pid}{host}  {facts.summary}"

        self._worker_began_s[spec.worker_id] = asyncio.get_running_loop().time()
        name = self._worker_name(spec.worker_id)
        await self._progress.phase(name, self._fleet.start(spec, settings), describe)

    def _worker_name(self, worker_id: str) -> str:
        return worker_id if self._is_joined else f"worker {worker_id}"

    async def _worker_settings(self, model: str, redis_url: str) -> list[tuple[WorkerSpec, WorkerConfig]]:
        """Plan the workers and return the settings of each."""
        config = self._config
        specs = plan_workers(config, cores=()) if self._is_joined else await plan_local_workers(config)
        # On an existing Ray cluster, Ray gives each worker its own GPU.
        workers_on_gpu = 1 if self._is_joined else max_workers_per_gpu(specs)
        speculate = await self._resolve_speculate()
        return [
            (
                spec,
                derive(
                    WorkerConfig,
                    config,
                    host=LOOPBACK,  # replaced by the node's own address on an existing Ray cluster
                    advertise_host=None,
                    worker_id=spec.worker_id,
                    role=spec.role.value,
                    admin_port=self._services_admin_port,
                    model=model,
                    speculate=speculate,
                    served_model_name=config.model_name,
                    redis_url=redis_url,
                    threads_per_worker=config.threads_per_worker or len(spec.cores) or None,
                    workers_on_host=len(specs),
                    workers_on_gpu=workers_on_gpu,
                    log_dir=self._log_dir,
                ),
            )
            for spec in specs
        ]

    @property
    def _output_dir(self) -> Path:
        return self._log_dir or self._run.path

    async def _wait_until_ready(self) -> str:
        """Wait until the gateway has workers of all roles and connected pairs.

        Return its summary of the links.
        """
        last = "no answer"
        async with local_client(2.0) as client:
            try:
                async with asyncio.timeout(READY_TIMEOUT_S):
                    while True:
                        try:
                            response = await client.get(f"{self.http_url}/ready", headers=authorization())
                        except httpx.HTTPError as error:
                            last = str(error) or type(error).__name__
                        else:
                            if response.status_code == httpx.codes.OK:
                                return str(response.json().get("links", ""))
                            last = response.text
                        await asyncio.sleep(0.05)
            except TimeoutError:
                raise BatonError(
                    f"the gateway was not ready within {READY_TIMEOUT_S:g} s: {last}; logs: {self._output_dir}"
                ) from None

    def _give_up_s(self, name: str) -> float:
        """Return how long a service may keep dying: not at all before the first answer, and Redis for ever.

        Without Redis, requests are still placed and answered.
        """
        if not self._has_served:
            return 0.0
        return math.inf if name == "redis" else GIVE_UP_S

    def _report_restart(self, name: str, exit_code: int) -> None:
        self._notify(f"{name} died ({describe_exit(exit_code)}) and was restarted, pid {self._child(name).pid}")

    def _report_failing(self, name: str, reason: str, output: str) -> None:
        limit_s = self._give_up_s(name)
        end = f"; `baton up` ends if that lasts {limit_s / 60:g} minutes" if math.isfinite(limit_s) else ""
        last_line = output.splitlines()[-1]
        self._notify(
            f"{name} keeps dying: {reason}; it is tried again at most {SERVICE_LIMIT.max_wait_s:g} s later, "
            f"the rest goes on{end}. The end of {self._child(name).spec.output}: {last_line}"
        )

    def _report_recovery(self, name: str) -> None:
        self._notify(f"{name} serves again, pid {self._child(name).pid}")

    def _child(self, name: str) -> Child:
        return next(child for child in self._children if child.spec.name == name)

    def _report_start(self, facts: WorkerFacts) -> None:
        if self._supervision is not None:
            self._notify(f"worker {facts.worker_id} was restarted, pid {facts.pid}")

    def _report_activity(self, worker_id: str, text: str) -> None:
        if self._supervision is None:
            began_s = self._worker_began_s[worker_id]
            self._progress.line(self._worker_name(worker_id), text, asyncio.get_running_loop().time() - began_s)

    def _report_death(self, worker_id: str, reason: str) -> None:
        if self._supervision is not None:
            self._notify(f"worker {worker_id} died: {reason}; restarting it")

    @property
    def _is_joined(self) -> bool:
        return self._config.ray_address is not None

    @property
    def _services_admin_port(self) -> int | None:
        """The admin port of scheduler and workers: a free one of the loopback, and none on other machines."""
        return None if self._is_joined else 0

    @property
    def _advertise_host(self) -> str | None:
        return self._config.advertise_host if self._is_joined else None


def _wanted_admin_port(config: ClusterConfig) -> int:
    """Return the admin port to use, 0 for a free one."""
    if config.admin_port is not None:
        return config.admin_port
    if config.http_port != ClusterConfig.http_port:  # another cluster, perhaps beside one with the default ports
        return 0
    try:
        return choose_port(config.host, VIEW_PORT, flag="--admin-port")
    except ConfigError:  # in use by something else
        return 0


def _joined_cluster(config: ClusterConfig) -> JoinedCluster | None:
    if config.ray_address is None:
        return None
    return JoinedCluster(address=config.ray_address, cluster=config.cluster, placement=config.ray_placement)
