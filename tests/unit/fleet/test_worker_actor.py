"""The actor around a worker: where it listens, and its end. Whole ones: tests/integration/fleet."""

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.errors import BatonError, ConfigError
from baton.fleet.ray import worker_actor
from baton.fleet.ray.release_check import release_probe
from baton.fleet.ray.worker_actor import NODE_SHUTTING_DOWN, WorkerActor, at_node
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
def test_a_worker_listens_where_ray_knows_its_node_unless_the_node_says_otherwise(
    environ: dict[str, str], listens: str, advertises: str
) -> None:
    config = at_node(WorkerConfig(), NODE, environ)
    assert (config.host, advertised_host(config.host, config.advertise_host)) == (listens, advertises)


def test_ports_may_be_the_nodes_own_and_nothing_else() -> None:
    config = at_node(
        WorkerConfig(), NODE, {"BATON_ADMIN_PORT": "9100", "BATON_KV_PORT_RANGE": "7000-7100", "BATON_ROLE": "decode"}
    )
    assert (config.admin_port, config.kv_port_range, config.role) == (9100, "7000-7100", "hybrid")
    with pytest.raises(ConfigError, match="BATON_RPC_PORT"):
        at_node(WorkerConfig(), NODE, {"BATON_RPC_PORT": "many"})


def test_nothing_is_started_for_a_fleet_of_another_release() -> None:
    """It found the actor that an earlier fleet had asked for, and that has only now come to a node."""
    with pytest.raises(BatonError, match=r"its node has Baton .*, this fleet has 0\.0\.9"):
        WorkerActor((), gpu="").start({}, None, True, {**release_probe()(), "Baton": "0.0.9"})


def test_an_actor_ends_some_time_after_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """However that ended, and whether or not anybody asks."""
    order: list[Any] = []
    exited = threading.Event()

    class Worker:
        def start(self) -> None:
            raise RuntimeError("no memory")

        def wait(self) -> str:
            order.append("the worker")
            return "no memory"

    actor = WorkerActor((), gpu="")
    actor._worker = Worker()
    monkeypatch.setattr(worker_actor.time, "sleep", order.append)
    monkeypatch.setattr(worker_actor.os, "_exit", lambda code: (order.append(code), exited.set()))
    actor._end_with_the_worker()
    assert exited.is_set()
    assert order == ["the worker", worker_actor.LINGER_S, 0]


@pytest.mark.parametrize(
    ("why", "node_shutting_down", "told"),
    [("", False, ""), ("", True, NODE_SHUTTING_DOWN), ("it broke", True, "it broke"), (None, False, None)],
)
def test_who_waits_is_told_whether_its_node_leaves(why: str | None, node_shutting_down: bool, told: str | None) -> None:
    actor = WorkerActor((), gpu="")
    actor._worker = SimpleNamespace(wait=lambda limit_s: why, node_shutting_down=node_shutting_down)
    assert actor.wait(1.0) == told


def test_the_question_for_the_release_is_understood_where_there_is_no_baton() -> None:
    """In other processes: one that has loaded Ray cannot start one with a token any more."""
    ask = """
import sys
from ray import cloudpickle
from baton.fleet.ray.release_check import release_probe
sys.stdout.buffer.write(cloudpickle.dumps(release_probe()))
"""
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, check=True).stdout
    answer = "import sys; sys.modules['baton'] = None; from ray import cloudpickle; print(cloudpickle.loads(sys.stdin.buffer.read())())"
    done = subprocess.run([sys.executable, "-c", answer], input=asked, capture_output=True, check=True)
    assert done.stdout == b"{}\n"


def test_one_that_was_never_started_ends_when_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(worker_actor.os, "_exit", leave)
    with pytest.raises(SystemExit):
        WorkerActor((), gpu="").drain()
