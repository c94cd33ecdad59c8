"""The command of each service: settings, log, `ready` line and exit code. The services are fakes."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from baton.cli import service_commands
from baton.cli.main import cli, main
from baton.core.errors import ConfigError, ModelError
from baton.runtime import logging as baton_logging
from baton.runtime.config.settings import FleetConfig, GatewayConfig, SchedulerConfig, WorkerConfig
from baton.runtime.process.process import Stop, python_module

ADDRESS = "127.0.0.1:4711"


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    baton_logging._remove_handler()
    root.setLevel(level)
    logging.captureWarnings(False)


class FakeService:
    """A service that is ready immediately, records its settings, and then returns or raises."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.config: Any = None
        self.error = error

    async def serve(self, config: Any, stop: Stop, on_ready: Callable[[str], None]) -> None:
        self.config = config
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        on_ready(ADDRESS)


def fake_service(monkeypatch: pytest.MonkeyPatch, service: str, error: BaseException | None = None) -> FakeService:
    fake = FakeService(error)
    monkeypatch.setitem(sys.modules, f"baton.{service}.{service}_main", SimpleNamespace(serve=fake.serve))  # type: ignore[arg-type]
    return fake


def logged(file: Path) -> list[dict[str, Any]]:
    """Return the lines of the command. A thread that an earlier test has left behind may log, too."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if line["logger"] == service_commands.__name__]


def run(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, args, prog_name="baton", env=env)


@pytest.mark.parametrize(
    ("service", "kind"),
    [("gateway", GatewayConfig), ("scheduler", SchedulerConfig), ("worker", WorkerConfig), ("fleet", FleetConfig)],
)
def test_each_service_gets_its_settings_and_prints_its_address_when_ready(
    monkeypatch: pytest.MonkeyPatch, service: str, kind: type
) -> None:
    fake = fake_service(monkeypatch, service)
    done = run(service, "--drain-s", "7", env={"BATON_REDIS_URL": "redis://h:1/0"})
    assert done.exit_code == 0, done.output
    assert done.stdout == f"ready {ADDRESS}\n"
    assert type(fake.config) is kind
    assert (fake.config.drain_s, fake.config.redis_url) == (7.0, "redis://h:1/0")


def test_log_file_path_is_printed_and_its_lines_have_the_pid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_service(monkeypatch, "worker", RuntimeError("a bug"))
    done = run("worker", "--worker-id", "w7", "--log-dir", str(tmp_path))
    file = tmp_path / "worker-w7.log"
    assert done.stderr.splitlines()[0] == f"log {file}"
    (line,) = logged(file)
    assert line["event"] == "service_crashed"
    assert "RuntimeError: a bug" in line["exception"]
    assert isinstance(line["pid"], int)


def test_unknown_environment_variable_is_reported_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("scheduler", "gateway"):
        fake_service(monkeypatch, name)
    in_file = run("scheduler", "--log-dir", str(tmp_path), env={"BATON_POLCY": "x"})
    assert in_file.stderr.count("BATON_POLCY") == 1
    assert (tmp_path / "scheduler.log").read_text().count("BATON_POLCY") == 0
    assert run("gateway", env={"BATON_POLCY": "x"}).stderr.count("BATON_POLCY; did you mean BATON_POLICY?") == 1


@pytest.mark.parametrize("error", [ConfigError("port 80 is taken"), ModelError("port 80 is taken")])
def test_baton_error_gives_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, error: Exception
) -> None:
    fake_service(monkeypatch, "gateway", error)
    with pytest.raises(SystemExit) as end:
        main(["gateway", "--log-dir", str(tmp_path)])
    assert end.value.code == 1
    assert capsys.readouterr().err == f"log {tmp_path / 'gateway.log'}\nbaton: port 80 is taken\n"
    assert [line["event"] for line in logged(tmp_path / "gateway.log")] == ["service_failed"]


def test_baton_errors_of_several_tasks_give_one_line_and_other_exceptions_are_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nested = ExceptionGroup("tasks", [ExceptionGroup("inner", [ConfigError("first")]), ConfigError("second")])
    fake_service(monkeypatch, "fleet", nested)
    with pytest.raises(SystemExit) as end:
        main(["fleet", "--log-dir", str(tmp_path)])
    assert end.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1] == "baton: first"
    fake_service(monkeypatch, "fleet", ExceptionGroup("tasks", [ConfigError("first"), ValueError("a bug")]))
    with pytest.raises(ExceptionGroup):
        main(["fleet", "--log-dir", str(tmp_path)])
    failed, crashed = logged(tmp_path / "fleet.log")
    assert (failed["event"], failed["problem"], "exception" in failed) == ("service_failed", "first", False)
    assert crashed["event"] == "service_crashed"
    assert "ValueError: a bug" in crashed["exception"]


def test_main_disables_telemetry_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_DISABLE_TELEMETRY", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "unset")
    fake_service(monkeypatch, "worker")
    with pytest.raises(SystemExit):
        main(["worker"])
    assert (os.environ["HF_HUB_DISABLE_TELEMETRY"], os.environ["RAY_USAGE_STATS_ENABLED"]) == ("1", "0")


@pytest.mark.parametrize("service", ["scheduler", "up"])
def test_unwritable_log_directory_is_an_error_that_names_the_flag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, service: str
) -> None:
    fake_service(monkeypatch, service)
    (tmp_path / "file").touch()
    done = run(service, "--log-dir", str(tmp_path / "file" / "logs"))
    assert isinstance(done.exception, ConfigError)
    assert "choose another directory with --log-dir" in str(done.exception)


def test_up_gets_the_cluster_settings_and_prints_its_messages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def up(config: Any, stop: Stop, say: Callable[[str], None]) -> None:
        say(f"{config.prefill} prefill, {config.model_name}")

    monkeypatch.setitem(sys.modules, "baton.fleet.up", SimpleNamespace(up=up))  # type: ignore[arg-type]
    done = run("up", "--log-dir", str(tmp_path), "--prefill", "3", "--served-model-name", "m", env={"BATON_DECOD": "2"})
    assert done.exit_code == 0, done.output
    assert done.stdout == "3 prefill, m\n"
    assert "did you mean BATON_DECODE?" in done.stderr


def test_policy_that_does_not_load_ends_up_before_anything_starts() -> None:
    result = run("up", "--policy", "no_such_module:choose")
    assert isinstance(result.exception, ConfigError)
    assert "there is no module 'no_such_module'" in str(result.exception)


def test_interrupt_ends_up_while_the_import_of_its_policy_does_not_return(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("print('imported', flush=True)\nwhile True: pass\n")
    up = subprocess.Popen(
        [*python_module("baton.cli"), "up", "--policy", "endless:choose"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert up.stdout is not None
        assert up.stdout.readline() == "imported\n"
        up.send_signal(signal.SIGINT)
        _, errors = up.communicate(timeout=60)
    finally:
        up.kill()
        up.wait()
    assert (up.returncode, "Traceback" in errors) == (1, False)
