"""Implements `baton up` and the commands that run one service: gateway, scheduler, worker, fleet.

Each runs until SIGTERM or Ctrl-C, then drains; a second signal stops it immediately. A command imports its
service only when it runs, so that `baton --help` is fast and a gateway never loads torch.
"""

import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

from baton.cli.setting_options import SettingsCommand, load_options, settings_options
from baton.cli.up_help import UpCommand
from baton.core.errors import BatonError, ConfigError
from baton.runtime.config.config_base import Loaded
from baton.runtime.config.settings import ClusterConfig, FleetConfig, GatewayConfig, SchedulerConfig, WorkerConfig
from baton.runtime.config.shared_settings import ProcessSettings
from baton.runtime.memory.garbage_collection import uncollected_imports
from baton.runtime.process.process import Stop, run

P = TypeVar("P", bound=ProcessSettings)
OnReady = Callable[[str], None]
Serve = Callable[[P, Stop, OnReady], Coroutine[Any, Any, None]]
"""Main coroutine of a service.

It passes its address to the callback once it serves, and returns after draining.
"""


@click.command(cls=UpCommand)
@settings_options(ClusterConfig)
def up(**options: Any) -> None:
    """Start a complete cluster on this machine.

    Starts Redis, Ray, a scheduler, workers and a gateway. It serves until Ctrl-C and then stops all of them.
    """
    loaded = load_options(ClusterConfig, options)
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)
    log_dir = loaded.config.log_dir
    if log_dir is not None:
        try:
            log_dir.expanduser().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _log_dir_error(log_dir, error) from error
    with uncollected_imports():
        from baton.fleet.preflight import check_policy
        from baton.fleet.up import up as bring_up

    check_policy(loaded.config)
    sys.exit(run(lambda stop: bring_up(loaded.config, stop, click.echo)))


@click.command(cls=SettingsCommand)
@settings_options(GatewayConfig)
def gateway(**options: Any) -> None:
    """Run a gateway, which serves the OpenAI API over HTTP and the gRPC API."""
    loaded = load_options(GatewayConfig, options)
    with uncollected_imports():
        from baton.gateway.gateway_main import serve

    _serve("gateway", loaded, serve)


@click.command(cls=SettingsCommand)
@settings_options(SchedulerConfig)
def scheduler(**options: Any) -> None:
    """Run a scheduler, which selects the workers of each request."""
    loaded = load_options(SchedulerConfig, options)
    with uncollected_imports():
        from baton.scheduler.scheduler_main import serve

    _serve("scheduler", loaded, serve)


@click.command(cls=SettingsCommand)
@settings_options(WorkerConfig)
def worker(**options: Any) -> None:
    """Run one worker, which loads the model and runs prefill, decode or both."""
    loaded = load_options(WorkerConfig, options)
    with uncollected_imports():
        from baton.worker.worker_main import serve

    _serve(f"worker-{loaded.config.worker_id or os.getpid()}", loaded, serve)


@click.command(cls=SettingsCommand)
@settings_options(FleetConfig)
def fleet(**options: Any) -> None:
    """Run the fleet, which starts workers as Ray actors and restarts those that fail."""
    loaded = load_options(FleetConfig, options)
    with uncollected_imports():
        from baton.fleet.fleet_main import serve

    _serve("fleet", loaded, serve)


COMMANDS = (up, gateway, scheduler, worker, fleet)


def expected_error(error: BaseException) -> BatonError | None:
    """Return the BatonError to report for `error`, or None if `error` is a bug that needs a traceback.

    An exception group is expected if all of its errors are; its first error, which ended the others, is
    returned.
    """
    if isinstance(error, BaseExceptionGroup):
        expected = [expected_error(each) for each in error.exceptions]
        return expected[0] if all(expected) else None
    return error if isinstance(error, BatonError) else None


def _serve(name: str, loaded: Loaded[P], serve: Serve[P]) -> None:
    """Run one service until it ends, then exit.

    Prints `ready ADDRESS` once it serves; `baton up` waits for that line.
    """
    log = _configure_logging(name, loaded)

    def on_ready(address: str) -> None:
        click.echo(f"ready {address}")

    try:
        code = run(lambda stop: serve(loaded.config, stop, on_ready))
    except BaseException as error:
        _log_failure(log, error)
        raise
    sys.exit(code)


def _configure_logging(name: str, loaded: Loaded[P]) -> Any:
    """Configure logging, print the log file's path, and report warnings about settings.

    Warnings go to standard error; if that is where logs go, they are log events.
    """
    from baton.runtime import logging

    config = loaded.config
    try:
        path: Path | None = logging.configure(name, level=config.log_level, log_dir=config.log_dir, pid=os.getpid())
    except OSError as error:
        raise _log_dir_error(config.log_dir, error) from error
    log = logging.get_logger(__name__)
    if path is not None:
        click.echo(f"log {path}", err=True)
    for warning in loaded.warnings:
        if path is None:
            log.warning("setting_warned", problem=warning)
        else:
            click.echo(f"warning: {warning}", err=True)
    return log


def _log_dir_error(log_dir: Path | None, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write logs to {log_dir}: {error.strerror}; choose another directory with --log-dir")


def _log_failure(log: Any, error: BaseException) -> None:
    """Log why the process ends, with a traceback unless the error is expected."""
    expected = expected_error(error)
    if expected is not None:
        log.error("service_failed", problem=str(expected))
    elif isinstance(error, Exception | BaseExceptionGroup):
        log.error("service_crashed", exc_info=error)
