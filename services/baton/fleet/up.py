"""`baton up`: the whole real cluster on one machine, from one configuration to nothing left behind."""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from baton.core.errors import BatonError
from baton.fleet.first_prompt import ask, authorization, client_of_ours, curl_example, rehearse
from baton.fleet.local.local_plan import plan_here
from baton.fleet.model_files import model_directory
from baton.fleet.processes.run_dir import RunDir
from baton.fleet.processes.supervisor import Child, ChildSpec, baton_command
from baton.fleet.ray.ray_fleet import Joined, RayFleet
from baton.fleet.ray.worker_actor import WorkerFacts
from baton.fleet.startup_progress import Say, StartupProgress
from baton.fleet.worker_plan import WorkerSpec, most_on_a_gpu, plan_workers
from baton.model.loading.model_source import DEMO
from baton.runtime import logging
from baton.runtime.config.config_base import Config, derive, dump
from baton.runtime.config.settings import ClusterConfig, GatewayConfig, SchedulerConfig, WorkerConfig
from baton.runtime.network.addresses import choose_port, join_address
from baton.runtime.process.process import Stop, set_batch_scheduling, unless_stopped
from baton.store.redis.private_redis import START_S, redis_command

log = logging.get_logger(__name__)

LOOPBACK = "127.0.0.1"
READY_LIMIT_S = 120.0
STOP_GRACE_S = 5.0


class Cluster:
    """Everything that one `baton up` starts, in the order in which it has to end."""

    def __init__(self, config: ClusterConfig, run: RunDir, log_dir: Path | None, say: Say) -> None:
        self._config = config
        self._run = run
        self._log_dir = log_dir
        self._progress = StartupProgress(say)
        self._say = say
        self._children: list[Child] = []
        joined = None
        if config.ray_address is not None:
            joined = Joined(address=config.ray_address, cluster=config.cluster, placement=config.ray_placement)
        self._fleet = RayFleet(
            ray_dir=run.path / "ray",
            log_dir=log_dir,
            joined=joined,
            start_limit_s=config.worker_start_s,
            on_change=self._worker_changed,
            say=say,
        )
        self._serving = False
        self.http_url = ""
        self.grpc_address = ""

    async def start(self) -> None:
        """Bring everything up. Raises BatonError naming what did not start, and why."""
        config = self._config
        http_port = choose_port(config.host, config.http_port, flag="--http-port")
        grpc_port = choose_port(config.host, config.grpc_port, flag="--grpc-port")
        scheme = "http" if config.front_tls_pair is None else "https"
        self.http_url = f"{scheme}://{join_address(config.host, http_port)}"
        self.grpc_address = join_address(config.host, grpc_port)
        model = await self._model()
        async with asyncio.TaskGroup() as group:
            ray = group.create_task(self._progress.phase("ray", self._fleet.connect(), str))
            if self._is_joined:
                await ray  # which says at what address the workers' nodes reach us
            redis_url = config.redis_url or await self._start_redis()
            host = self._fleet.node_address
            scheduler = derive(
                SchedulerConfig,
                config,
                host=host,
                advertise_host=self._advertise_host,
                redis_url=redis_url,
                rpc_port=choose_port(host, 0, flag="--rpc-port"),
                log_dir=self._log_dir,
            )
            group.create_task(self._start_child("scheduler", scheduler, config.policy))
            gateway = derive(
                GatewayConfig,
                config,
                http_port=http_port,
                grpc_port=grpc_port,
                model=model,
                served_model_name=config.model_name,
                advertise_host=None,
                redis_url=redis_url,
                log_dir=self._log_dir,
            )
            group.create_task(self._start_child("gateway", gateway, f"{self.http_url}, gRPC {self.grpc_address}"))
            await ray
            specs = plan_workers(config, cores=()) if self._is_joined else await plan_here(config)
            on_gpu = 1 if self._is_joined else most_on_a_gpu(specs)  # where Ray gives them out, each is of one worker
            for spec in specs:
                group.create_task(self._start_worker(spec, self._worker_config(spec, on_gpu, model, redis_url)))
        await self._progress.phase("link", self._until_ready(), str)
        await rehearse(self.http_url, config.model_name)
        self._serving = True

    async def supervise(self) -> None:
        """Keep everything alive until cancelled. Raises BatonError when something keeps dying."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fleet.supervise())
            for child in self._children:
                group.create_task(child.supervise())

    async def close(self) -> None:
        """End all of it, gateway first, so that running answers can finish while their workers live.

        What does not end is told, not raised, so that the others are ended, too, and the first error remains
        the last word.
        """
        self._serving = False
        for end in (*(child.stop for child in reversed(self._children)), self._fleet.close):
            try:
                await end(STOP_GRACE_S)
            except Exception as error:
                log.error("not_closed", exc_info=error)
                self._say(f"while ending: {str(error) or type(error).__name__}")

    async def _model(self) -> str:
        """The directory that every process loads without the network; a hub id is fetched now, once."""
        if self._is_joined:  # each node has the model, or fetches it; this one needs it for its tokenizer
            await model_directory(self._config.model)
            return self._config.model
        began_s = asyncio.get_running_loop().time()
        directory = await model_directory(self._config.model)
        if directory != self._config.model and self._config.model != DEMO:
            self._progress.line("model", directory, asyncio.get_running_loop().time() - began_s)
        return directory

    async def _start_redis(self) -> str:
        if self._is_joined:
            command = redis_command(
                self._run.path / "redis", host=self._fleet.node_address, advertise_host=self._advertise_host
            )
        else:
            command = redis_command(self._run.path / "redis")
        child = Child(
            self._spec("redis", command.argv, START_S, command.wait_until_ready), on_restart=self._child_is_back
        )
        self._children.append(child)
        await self._progress.phase("redis", child.start(), lambda _: command.description)
        return command.url

    async def _start_child(self, name: str, settings: Config, what: str) -> None:
        file = self._run.path / f"{name}.yaml"
        file.touch(mode=0o600)
        file.write_text(json.dumps(dump(settings)))  # JSON is YAML, too
        child = Child(self._spec(name, baton_command(name, file), READY_LIMIT_S), on_restart=self._child_is_back)
        self._children.append(child)
        await self._progress.phase(name, child.start(), lambda _: f"{what}  pid {child.pid}")

    async def _start_worker(self, spec: WorkerSpec, settings: WorkerConfig) -> None:
        def describe(facts: WorkerFacts) -> str:
            return (
                f"{spec.role.value:<8} pid {facts.pid}{f' on {facts.host}' if self._is_joined else ''}  {facts.summary}"
            )

        name = spec.worker_id if self._is_joined else f"worker {spec.worker_id}"
        await self._progress.phase(name, self._fleet.start(spec, settings), describe)

    def _worker_config(self, spec: WorkerSpec, on_gpu: int, model: str, redis_url: str) -> WorkerConfig:
        config = self._config
        return derive(
            WorkerConfig,
            config,
            host=LOOPBACK,  # on nodes of a cluster, the node's own address
            advertise_host=None,
            worker_id=spec.worker_id,
            role=spec.role.value,
            model=model,
            served_model_name=config.model_name,
            redis_url=redis_url,
            threads_per_worker=config.threads_per_worker or len(spec.cores) or None,
            workers_on_host=config.prefill + config.decode + config.hybrid,
            workers_on_gpu=on_gpu,
            log_dir=self._log_dir,
        )

    def _spec(
        self,
        name: str,
        argv: list[str],
        start_timeout_s: float,
        ready: Callable[[], Coroutine[Any, Any, str]] | None = None,
    ) -> ChildSpec:
        output = self._output_dir / f"{name}.out"
        return ChildSpec(name=name, argv=argv, output=output, start_timeout_s=start_timeout_s, wait_until_ready=ready)

    @property
    def _output_dir(self) -> Path:
        return self._log_dir or self._run.path

    async def _until_ready(self) -> str:
        """Wait until the gateway says that roles and pairs are there; returns what it says of the links."""
        last = "no answer"
        async with client_of_ours(2.0) as client:
            try:
                async with asyncio.timeout(READY_LIMIT_S):
                    while True:
                        try:
                            answer = await client.get(f"{self.http_url}/ready", headers=authorization())
                        except httpx.HTTPError as error:
                            last = str(error) or type(error).__name__
                        else:
                            if answer.status_code == 200:
                                return str(answer.json().get("links", ""))
                            last = answer.text
                        await asyncio.sleep(0.05)
            except TimeoutError:
                raise BatonError(
                    f"the gateway was not ready within {READY_LIMIT_S:g} s: {last}; logs: {self._output_dir}"
                ) from None

    def _child_is_back(self, name: str) -> None:
        child = next(child for child in self._children if child.spec.name == name)
        self._say(f"{name} died and is back, pid {child.pid}")

    def _worker_changed(self, worker_id: str, facts: WorkerFacts | None) -> None:
        if self._serving:
            self._say(
                f"worker {worker_id} {'died; starting it again' if facts is None else f'is back, pid {facts.pid}'}"
            )

    @property
    def _is_joined(self) -> bool:
        return self._config.ray_address is not None

    @property
    def _advertise_host(self) -> str | None:
        return self._config.advertise_host if self._is_joined else None


async def up(config: ClusterConfig, stop: Stop, say: Say) -> None:
    """Start, serve until `stop` is asked for (or, with `once`, until the first answer), and clean up in every
    case."""
    log_dir = config.log_dir and config.log_dir.expanduser() / datetime.now().strftime("%m%d-%H%M%S")
    logging.configure("up", level=config.log_level, log_dir=log_dir)
    if config.ray_address is None:  # all that is started shares the cores with the workers
        set_batch_scheduling()
    run = RunDir()
    cluster = Cluster(config, run, log_dir, say)
    try:
        await unless_stopped(stop, cluster.start())
        if not stop.drain.is_set():
            await _serve(config, cluster, stop, say, log_dir)
    finally:
        try:
            await cluster.close()
        finally:
            await asyncio.to_thread(run.close)


async def _serve(config: ClusterConfig, cluster: Cluster, stop: Stop, say: Say, log_dir: Path | None) -> None:
    say(f"ready {cluster.http_url}    gRPC {cluster.grpc_address}" + (f"    logs {log_dir}" if log_dir else ""))
    supervision = asyncio.create_task(cluster.supervise())
    try:
        if config.first_prompt is not None:
            await unless_stopped(stop, _first_answer(cluster.http_url, config.model_name, config.first_prompt, say))
            if config.once:
                return
        else:
            say(curl_example(cluster.http_url, config.model_name))
        say("Why there? baton explain last      Stop: Ctrl-C")
        await unless_stopped(stop, supervision)
    finally:
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)


async def _first_answer(url: str, model: str, prompt: str, say: Say) -> None:
    first_token_s = await ask(url, model, prompt, write=_write)
    StartupProgress(say).line("first token", "from the start of this command", first_token_s)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
