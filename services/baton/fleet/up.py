"""`baton up`: starts a complete cluster from one configuration and removes it completely afterwards."""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Protocol

from baton.core.errors import ConfigError
from baton.fleet.cluster import Cluster
from baton.fleet.first_prompt import ask
from baton.fleet.hints import CA_PLACEHOLDER, curl_hint, explain_hint, key_hint
from baton.fleet.log_directories import new_log_directory
from baton.fleet.preflight import check_before_start
from baton.fleet.processes.run_dir import RunDir
from baton.fleet.startup_progress import Notify, StartupProgress
from baton.runtime import logging
from baton.runtime.config.settings import ClusterConfig
from baton.runtime.network.addresses import local_host
from baton.runtime.network.client_trust import ClientTrust, client_trust
from baton.runtime.network.tls_files import CertificatePair, machine_authorities
from baton.runtime.process.process import Stop, set_batch_scheduling, unless_stopped
from baton.runtime.process.process_identity import process_identity
from baton.runtime.process.run_file import RunningCluster, run_directories, write_run_file


class Stoppable(Protocol):
    """A cluster that can be started and closed. Tests use a stub in place of `Cluster`."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Closeable(Protocol):
    """A resource that is closed at the end. Tests use a stub in place of `RunDir`."""

    def close(self) -> list[int]: ...


async def up(config: ClusterConfig, stop: Stop, notify: Notify) -> None:
    """Start a cluster, serve until a stop is requested, and remove it.

    With `config.once` it ends after the answer to the first prompt.
    """
    log_dir = config.log_dir and new_log_directory(config.log_dir.expanduser(), datetime.now())
    logging.configure("up", level=config.log_level, log_dir=log_dir)
    await check_before_start(config)
    if config.ray_address is None:  # all processes share the cores of this machine with the workers
        set_batch_scheduling()
    run = RunDir()
    cluster = Cluster(config, run, log_dir, notify)
    left = await run_until_stopped(cluster, run, stop, lambda: _serve(config, cluster, stop, notify, log_dir))
    if stop.drain.is_set():
        overwrite = "\r" if sys.stdout.isatty() else ""  # of the `^C` that the terminal shows
        notify(overwrite + describe_end(cluster.parts, left, log_dir))


def describe_end(parts: Sequence[str], left: Sequence[int], log_dir: Path | None) -> str:
    """Return the last line after Ctrl-C: what was stopped, and the pids of processes that are still there."""
    logs = f"; logs stay in {log_dir}" if log_dir is not None else ""
    rest = f"still running: pid {', '.join(map(str, left))}" if left else "nothing is left running"
    return f"stopped {', '.join(parts) or 'before anything had started'}; {rest}{logs}"


async def run_until_stopped(
    cluster: Stoppable, run: Closeable, stop: Stop, serve: Callable[[], Awaitable[None]]
) -> list[int]:
    """Start the cluster and await `serve`, unless a stop was requested meanwhile.

    The cluster and the run directory are closed in any case. Returns the pids of processes that are left.
    """
    try:
        await unless_stopped(stop, cluster.start())
        if not stop.drain.is_set():
            await serve()
    finally:
        try:
            await cluster.close()
        finally:
            left = await asyncio.to_thread(run.close)
    return left


async def _serve(config: ClusterConfig, cluster: Cluster, stop: Stop, notify: Notify, log_dir: Path | None) -> None:
    logs = f"    logs {log_dir}" if log_dir else ""
    running, cacert = describe_running(config, cluster.http_url, cluster.grpc_address, log_dir)
    running = replace(running, view=cluster.view_url)
    directories = run_directories(os.environ)
    run_file = write_run_file(running, directories)
    notify(f"ready {cluster.http_url}    gRPC {cluster.grpc_address}{logs}")
    if not run_file.is_written:
        notify(
            f"Other commands do not find this cluster without --gateway {cluster.grpc_address}: "
            f"{' and '.join(map(str, directories))} must be a directory that only you can write to"
        )
    supervision = asyncio.create_task(cluster.supervise())
    try:
        if config.first_prompt is not None:
            await unless_stopped(stop, _ask_first(cluster.http_url, config.model_name, config.first_prompt, notify))
            if config.once:
                return
        else:
            notify(curl_hint(running, cacert=cacert))
        notify(f"Live view: {cluster.view_url} (or `baton view`)")
        notify(f"Explain the placement: {explain_hint(running)}      Stop: Ctrl-C")
        if keys := key_hint(running):
            notify(keys)
        await unless_stopped(stop, supervision)
    finally:
        run_file.close()
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)


def describe_running(
    config: ClusterConfig, http_url: str, grpc_address: str, log_dir: Path | None
) -> tuple[RunningCluster, str]:
    """Return the content of the run file, and the file for curl's --cacert (empty if it needs none)."""
    ca, name, cacert = "", "", ""
    if (pair := config.front_tls_pair) is not None:
        trust = _client_trust(config, pair, local_host(config.host))
        name = trust.name
        ca = str(trust.ca.absolute()) if trust.ca is not None else ""
        cacert = ca or CA_PLACEHOLDER
    running = RunningCluster(
        pid=os.getpid(),
        identity=process_identity(os.getpid()),
        started_s=time.time(),
        cluster=config.cluster,
        model=config.model_name,
        url=http_url,
        gateway=grpc_address,
        needs_key=config.api_keys is not None,
        ca=ca,
        name=name,
        log_dir=str(log_dir or ""),
    )
    return running, cacert


def _client_trust(config: ClusterConfig, pair: CertificatePair, host: str) -> ClientTrust:
    """Find the authority of the gateway's certificate: itself, the cluster's, or one of the machine's."""
    candidates = [pair.certificate, *([config.tls_ca] if config.tls_ca is not None else [])]
    with suppress(ConfigError):
        candidates.append(machine_authorities())
    return client_trust(pair, candidates, host)


async def _ask_first(url: str, model: str, prompt: str, notify: Notify) -> None:
    first_token_s = await ask(url, model, prompt, write=_write)
    StartupProgress(notify).line("first token", "since the start of this command", first_token_s)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
