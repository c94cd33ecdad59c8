"""Resources that a worker requests from its node, and nodes that may run workers."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from baton.fleet.ray.node_resources import Demand, Node, demand_of, living_nodes, max_workers_on, places_by_role
from baton.fleet.ray.ray_nodes import NodesRefused, RayNodes
from baton.fleet.ray.release_check import release_mismatch, release_probe
from baton.runtime.config.fleet_settings import RayPlacement
from baton.runtime.config.settings import WorkerConfig
from tests.unit.fleet.fake_ray import FakeConnection

RELEASE = release_probe()()


def node(name: str, **resources: float) -> Node:
    return Node(node_id=f"id-{name}", name=name, address=f"at-{name}", resources=resources)


def row(node: Node, alive: bool = True) -> dict[str, Any]:
    """A row of `ray.nodes()`. Rows of dead nodes have no resources."""
    facts = {
        "NodeID": node.node_id,
        "NodeManagerHostname": node.name,
        "NodeManagerAddress": node.address,
        "Alive": alive,
    }
    return facts | ({"Resources": dict(node.resources)} if alive else {})


@pytest.mark.parametrize(
    ("device", "placement", "offered", "asked"),
    [
        ("cpu", "auto", {"CPU"}, "CPU: 1"),
        ("cpu", "auto", {"CPU", "baton_prefill"}, "CPU: 1"),
        ("cpu", "auto", {"CPU", "baton_decode"}, "baton_decode: 1"),
        ("cpu", "role", {"CPU"}, "baton_decode: 1"),
        ("cpu", "spread", {"CPU", "baton_decode"}, "CPU: 1"),
        ("auto", "auto", {"CPU", "GPU"}, "CPU: 1, GPU: 1"),
        ("auto", "role", {"CPU", "GPU"}, "GPU: 1, baton_decode: 1"),
        ("cuda", "auto", {"CPU"}, "CPU: 1, GPU: 1"),
        ("emulated", "auto", {"CPU", "GPU"}, "CPU: 1"),
    ],
)
def test_demand_of_a_decode_worker(device: Any, placement: RayPlacement, offered: set[str], asked: str) -> None:
    assert str(demand_of(WorkerConfig(role="decode", device=device), placement, offered)) == asked


def test_node_without_cpus_holds_no_worker_unless_it_offers_places() -> None:
    demand = Demand(num_cpus=1, spread=True)
    assert not demand.fits(node("head", memory=1e9))
    assert node("head", memory=1e9).places == {}
    assert Demand(resources={"baton_hybrid": 1}).fits(node("own", baton_hybrid=1))
    assert node("own", baton_hybrid=1).places == {"baton_hybrid": 1}


@pytest.mark.parametrize(
    ("here", "others", "num_workers", "share"),
    [
        (node("a", CPU=8, baton_prefill=2, baton_decode=1), [], 8, 3),
        (node("a", CPU=8, baton_prefill=4), [], 2, 2),
        (node("a", CPU=8, baton_prefill=0.5), [], 2, 1),
        (node("a", CPU=8), [node("b", CPU=8), node("head")], 3, 2),
        (node("a", CPU=8), [], 3, 3),
    ],
)
def test_max_workers_on_a_node(here: Node, others: list[Node], num_workers: int, share: int) -> None:
    assert max_workers_on(here, num_workers, [here, *others]) == share


def test_places_are_integers_by_role() -> None:
    nodes = [node("a", CPU=8, baton_prefill=2), node("b", baton_prefill=1.5, baton_decode=0.5), node("head")]
    assert places_by_role(nodes) == {"prefill": 3, "decode": 0, "hybrid": 0}


def test_dead_nodes_are_dropped() -> None:
    a, b = node("a", CPU=1), node("b", CPU=1)
    assert living_nodes([row(a), row(b, alive=False)]) == (a,)


@pytest.mark.parametrize(
    ("node_release", "mismatch"),
    [
        (RELEASE, None),
        ({}, f"has no Baton, this fleet has {RELEASE['Baton']}"),
        ({**RELEASE, "Baton": "0.0.9"}, f"has Baton 0.0.9, this fleet has {RELEASE['Baton']}"),
        ({**RELEASE, "protocol": "0"}, f"has protocol 0, this fleet has {RELEASE['protocol']}"),
        ({"Baton": RELEASE["Baton"]}, f"has protocol unknown, this fleet has {RELEASE['protocol']}"),
    ],
)
def test_release_mismatch_names_the_difference(node_release: dict[str, str], mismatch: str | None) -> None:
    assert release_mismatch(node_release, RELEASE) == mismatch


class Cluster:
    """Answers the Ray calls of `RayNodes` with nodes and their releases.

    An exception is raised by its node.
    """

    def __init__(self, **releases: dict[str, str] | Exception) -> None:
        self.releases = releases
        self.nodes = [node(name, CPU=2) for name in releases]
        self.num_probes = 0

    async def __call__(self, action: str, call: Callable[[], Any]) -> Any:
        if action == "list its nodes":
            return tuple(self.nodes)
        self.num_probes += 1
        release = self.releases[list(self.releases)[self.num_probes - 1]]

        class Reference:
            def future(self) -> Future[Any]:
                future: Future[Any] = Future()
                future.set_exception(release) if isinstance(release, Exception) else future.set_result(release)
                return future

        return Reference()


OTHER = {**RELEASE, "Baton": "0.0.9"}


async def test_node_with_another_release_is_refused_and_others_are_accepted() -> None:
    cluster = Cluster(a=RELEASE, b=OTHER)
    nodes = RayNodes(cluster, FakeConnection())
    await nodes.refresh()
    await nodes.refresh()
    assert cluster.num_probes == 2, "each node is probed once"
    assert nodes.is_accepted("id-a")
    assert nodes.refused == [f"b (at-b) has Baton 0.0.9, this fleet has {RELEASE['Baton']}"]
    assert nodes.label_selector() == {"ray.io/node-id": "!in(id-b)"}
    nodes.check(Demand(num_cpus=1))
    assert nodes.describe() == "a (at-a) has CPU: 2"
    assert [each.name for each in nodes.not_draining] == ["a", "b"], "a refused node counts, because it can be updated"


async def test_error_names_each_node_if_all_are_refused() -> None:
    nodes = RayNodes(Cluster(a={}, b=OTHER), FakeConnection())
    await nodes.refresh()
    with pytest.raises(
        NodesRefused,
        match=r"requests CPU: 1: a \(at-a\) has no Baton.*; b \(at-b\) has Baton 0\.0\.9.*same Baton on all",
    ):
        nodes.check(Demand(num_cpus=1))
    nodes.check(Demand(resources={"baton_decode": 1}))  # no node offers that yet; one may still join


async def test_node_that_does_not_answer_is_probed_again() -> None:
    cluster = Cluster(a=RuntimeError("it went away"))
    nodes = RayNodes(cluster, FakeConnection())
    await nodes.refresh()
    assert not nodes.is_accepted("id-a")
    assert nodes.refused == []
    cluster.releases, cluster.num_probes = {"a": RELEASE}, 0
    await nodes.refresh()
    assert nodes.is_accepted("id-a")


async def test_draining_node_is_excluded_and_its_resources_are_remembered() -> None:
    cluster = Cluster(a=RELEASE, b=RELEASE)
    nodes = RayNodes(cluster, FakeConnection())
    await nodes.refresh()
    nodes.mark_draining("id-b")
    assert nodes.label_selector() == {"ray.io/node-id": "!in(id-b)"}
    assert [each.name for each in nodes.not_draining] == ["a"]
    cluster.nodes = [node("a", baton_prefill=1)]
    await nodes.refresh()
    assert nodes.label_selector() == {}
    assert nodes.offered == {"CPU", "baton_prefill"}
