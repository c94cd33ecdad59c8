"""The Ray actor around a worker: its node settings and its end.

Real actors are in tests/integration/fleet.
"""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.errors import BatonError, ConfigError
from baton.fleet.ray.release_check import release_probe
from baton.fleet.ray.worker_actor import LINGER_S, NODE_SHUTTING_DOWN, WorkerActor, apply_node_settings
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.network.addresses import advertised_host

NODE = "10.0.0.7"


@pytest.mark.parametrize(
    ("environ", "listens", "advertises"),
    [
        ({}, NODE, NODE),
        ({"BATON_HOST": "0.0.0.0"}, "0.0.0.0", NODE),
        ({"BATON_HOST": "192.168.1.7"}, "192.168.1.7", "192.168.1.7"),
        ({"BATON_ADVERTISE_HOST": "gpu-7.example"}, NODE, "gpu-7.example"),
        ({"BATON_HOST": "0.0.0.0", "BATON_ADVERTISE_HOST": "gpu-7.example"}, "0.0.0.0", "gpu-7.example"),
    ],
)
def test_worker_listens_at_the_node_address_unless_the_node_overrides_it(
    environ: dict[str, str], listens: str, advertises: str
) -> None:
    config = apply_node_settings(WorkerConfig(), NODE, environ)
    assert (config.host, advertised_host(config.host, config.advertise_host)) == (listens, advertises)


def test_node_can_override_ports_but_not_the_role() -> None:
    config = apply_node_settings(
        WorkerConfig(), NODE, {"BATON_ADMIN_PORT": "9100", "BATON_KV_PORT_RANGE": "7000-7100", "BATON_ROLE": "decode"}
    )
    assert (config.admin_port, config.kv_port_range, config.role) == (9100, "7000-7100", "hybrid")
    with pytest.raises(ConfigError, match="BATON_RPC_PORT"):
        apply_node_settings(WorkerConfig(), NODE, {"BATON_RPC_PORT": "many"})


def test_actor_refuses_a_fleet_of_another_release() -> None:
    """That fleet found the actor of an earlier fleet, which only now got a node."""
    with pytest.raises(BatonError, match=r"its node has Baton .*, this fleet has 0\.0\.9"):
        WorkerActor((), gpu="").start({}, None, True, {**release_probe()(), "Baton": "0.0.9"})


def test_actor_exits_some_time_after_its_worker() -> None:
    """It does so even if no driver asks, and however the worker ended."""
    order: list[Any] = []

    class Worker:
        def start(self) -> None:
            raise RuntimeError("no memory")

        def wait(self) -> str:
            order.append("the worker")
            return "no memory"

    actor = WorkerActor((), gpu="", exit_process=order.append)
    actor._worker = Worker()
    actor._exit_with_worker(sleep=order.append)
    assert order == ["the worker", LINGER_S, 0]


@pytest.mark.parametrize(
    ("reason", "node_shutting_down", "reported"),
    [("", False, ""), ("", True, NODE_SHUTTING_DOWN), ("it broke", True, "it broke"), (None, False, None)],
)
def test_wait_reports_a_node_shutdown(reason: str | None, node_shutting_down: bool, reported: str | None) -> None:
    actor = WorkerActor((), gpu="")
    actor._worker = SimpleNamespace(wait=lambda timeout_s: reason, node_shutting_down=node_shutting_down)
    assert actor.wait(1.0) == reported


def test_release_probe_runs_on_a_node_without_baton() -> None:
    """Runs in other processes, because a process that has imported Ray can no longer start a private Ray."""
    pickle_probe = """
import sys
from ray import cloudpickle
from baton.fleet.ray.release_check import release_probe
sys.stdout.buffer.write(cloudpickle.dumps(release_probe()))
"""
    probe = subprocess.run([sys.executable, "-c", pickle_probe], capture_output=True, check=True).stdout
    answer = """
import sys
sys.modules["baton"] = None
from ray import cloudpickle
print(cloudpickle.loads(sys.stdin.buffer.read())())
"""
    done = subprocess.run([sys.executable, "-c", answer], input=probe, capture_output=True, check=True)
    assert done.stdout == b"{}\n"


def test_drain_ends_an_actor_that_was_never_started() -> None:
    def exit_process(code: int) -> None:
        raise SystemExit(code)

    with pytest.raises(SystemExit):
        WorkerActor((), gpu="", exit_process=exit_process).drain()
