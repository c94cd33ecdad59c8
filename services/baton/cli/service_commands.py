"""`baton up`, and one service a command: gateway, scheduler, worker, fleet. Each runs until SIGTERM or
Ctrl-C; the second one cuts it off.

A service's module is imported by its own command only, so that `baton --help` is quick and a gateway never
loads torch.
"""

import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

from baton.cli.expected_errors import on_purpose
from baton.cli.setting_options import SettingsCommand, load_options, settings_options
from baton.core.errors import ConfigError
from baton.runtime.config.config_base import Loaded
from baton.runtime.config.settings import (
    ClusterConfig,
    FleetConfig,
    GatewayConfig,
    ProcessSettings,
    SchedulerConfig,
    WorkerConfig,
)
from baton.runtime.process.process import Stop, run

P = TypeVar("P", bound=ProcessSettings)
OnReady = Callable[[str], None]
Serve = Callable[[P, Stop, OnReady], Coroutine[Any, Any, None]]
"""A service's main: calls back with its address once it serves, and returns when it has drained."""


@click.command(cls=SettingsCommand)
@settings_options(ClusterConfig)
def up(**options: Any) -> None:
    """Start a whole cluster on this machine.

    Redis, Ray, scheduler, workers and gateway; it serves until Ctrl-C and leaves nothing behind.
    """
    loaded = load_options(ClusterConfig, options)
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)
    log_dir = loaded.config.log_dir
    if log_dir is not None:
        try:
            log_dir.expanduser().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _no_log(log_dir, error) from error
    from baton.fleet.up import up as bring_up

    sys.exit(run(lambda stop: bring_up(loaded.config, stop, click.echo)))


@click.command(cls=SettingsCommand)
@settings_options(GatewayConfig)
def gateway(**options: Any) -> None:
    """The front door: OpenAI API over HTTP, and gRPC."""
    loaded = load_options(GatewayConfig, options)
    from baton.gateway.gateway_main import serve

    _serve("gateway", loaded, serve)


@click.command(cls=SettingsCommand)
@settings_options(SchedulerConfig)
def scheduler(**options: Any) -> None:
    """Decides where each request runs."""
    loaded = load_options(SchedulerConfig, options)
    from baton.scheduler.scheduler_main import serve

    _serve("scheduler", loaded, serve)


@click.command(cls=SettingsCommand)
@settings_options(WorkerConfig)
def worker(**options: Any) -> None:
    """One worker: a model, its KV, and some requests."""
    loaded = load_options(WorkerConfig, options)
    from baton.worker.worker_main import serve

    _serve(f"worker-{loaded.config.worker_id or os.getpid()}", loaded, serve)


@click.command(cls=SettingsCommand)
@settings_options(FleetConfig)
def fleet(**options: Any) -> None:
    """The workers of a cluster, as Ray actors.

    They are placed, started, and started again when they die.
    """
    loaded = load_options(FleetConfig, options)
    from baton.fleet.fleet_main import serve

    _serve("fleet", loaded, serve)


COMMANDS = (up, gateway, scheduler, worker, fleet)


def _serve(name: str, loaded: Loaded[P], serve: Serve[P]) -> None:
    """Run one service as this process's work; prints `ready ADDRESS` once it serves, which is what the fleet
    waits for."""
    log = _logging(name, loaded)

    def on_ready(address: str) -> None:
        click.echo(f"ready {address}")

    try:
        code = run(lambda stop: serve(loaded.config, stop, on_ready))
    except BaseException as error:
        _note(log, error)
        raise
    sys.exit(code)


def _logging(name: str, loaded: Loaded[P]) -> Any:
    """Set the log up; says where it is, and what was odd about the settings, once: in the log where that is
    standard error."""
    from baton.runtime import logging

    config = loaded.config
    try:
        path: Path | None = logging.configure(name, level=config.log_level, log_dir=config.log_dir, pid=os.getpid())
    except OSError as error:
        raise _no_log(config.log_dir, error) from error
    log = logging.get_logger(__name__)
    if path is not None:
        click.echo(f"log {path}", err=True)
    for warning in loaded.warnings:
        if path is None:
            log.warning("odd_setting", problem=warning)
        else:
            click.echo(f"warning: {warning}", err=True)
    return log


def _no_log(log_dir: Path | None, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write a log into {log_dir}: {error.strerror}; choose another directory with --log-dir")


def _note(log: Any, error: BaseException) -> None:
    """The log says why the process ended, too; an error that we raised on purpose needs no traceback."""
    told = on_purpose(error)
    if told is not None:
        log.error("service_failed", problem=str(told))
    elif isinstance(error, Exception | BaseExceptionGroup):
        log.error("service_crashed", exc_info=error)
