"""What `baton up` asks of Ray: the memory monitor, no signal handler, and no messages on the terminal."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.fleet.ray import ray_connection
from baton.fleet.ray.ray_connection import PRINT_FUNCTION, send_messages_to_log, set_memory_monitor
from baton.runtime.config.settings import ClusterConfig

REFRESH, THRESHOLD = "RAY_memory_monitor_refresh_ms", "RAY_memory_usage_threshold"
START_WITHOUT_RAY = """
import sys
from pathlib import Path
from types import SimpleNamespace

from baton.fleet.ray.ray_connection import RayConnection

class Connection(RayConnection):
    api = SimpleNamespace(init=lambda **options: None, cluster_resources=dict)

Connection().start(Path(sys.argv[1]), None)
from ray._private.ray_constants import RAY_DISABLE_FAILURE_SIGNAL_HANDLER
print(RAY_DISABLE_FAILURE_SIGNAL_HANDLER)
"""
NAMES_IN_LISTENER = """
from ray._private.worker import listen_error_messages
print(*listen_error_messages.__code__.co_names)
"""


@pytest.mark.parametrize(
    ("limit", "environ", "result"),
    [
        (None, {}, {REFRESH: "0"}),
        (0.9, {}, {THRESHOLD: "0.9", REFRESH: "250"}),
        (None, {THRESHOLD: "0.8"}, {THRESHOLD: "0.8"}),
        (0.9, {REFRESH: "100"}, {THRESHOLD: "0.9", REFRESH: "100"}),
    ],
)
def test_memory_monitor_is_off_unless_a_limit_is_given(
    limit: float | None, environ: dict[str, str], result: dict[str, str]
) -> None:
    set_memory_monitor(limit, environ)
    assert environ == result


def test_memory_limit_does_not_apply_to_an_existing_cluster() -> None:
    with pytest.raises(ConfigError, match="RAY_memory_usage_threshold"):
        ClusterConfig(ray_memory_limit=0.9, ray_address="h:1")


def test_signal_handler_of_ray_is_off(tmp_path: Path) -> None:
    """It would abort a process whose shutdown takes longer than three seconds."""
    assert _output_of(START_WITHOUT_RAY, str(tmp_path / "ray")) == "True\n"


def test_messages_of_ray_go_to_the_log(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    module = SimpleNamespace(**{PRINT_FUNCTION: lambda *_, **__: sys.stdout.write("on the terminal")})
    send_messages_to_log(SimpleNamespace(_private=SimpleNamespace(worker=module)))
    with caplog.at_level(logging.WARNING):
        getattr(module, PRINT_FUNCTION)({"lines": ["A worker died"], "pid": "raylet"}, ignore_prefix=False)
    assert capsys.readouterr().out == ""
    (event,) = [record.msg for record in caplog.records if record.name == ray_connection.__name__]
    values: Any = event
    assert (values["event"], values["lines"]) == ("ray_message", ["A worker died"])
    send_messages_to_log(SimpleNamespace())


def test_the_installed_ray_still_prints_by_that_function() -> None:
    """If this fails after an update of Ray, find out how its listener thread prints now."""
    assert _output_of(NAMES_IN_LISTENER).split().count(PRINT_FUNCTION) == 1


def _output_of(code: str, *args: str) -> str:
    """Run Python code in a process of its own, because Ray reads its environment when it is imported."""
    run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout
