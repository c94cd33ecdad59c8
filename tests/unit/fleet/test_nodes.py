"""What a worker asks of its node, and which nodes may be asked."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from baton.fleet.ray.node_resources import Demand, Node, demand_of, living_nodes, places_by_role, workers_on
from baton.fleet.ray.ray_nodes import NodesRefused, RayNodes
from baton.fleet.ray.release_check import release_probe, why_refused
from baton.runtime.config.settings import RayPlacement, WorkerConfig

OURS = release_probe()()


def node(name: str, **resources: float) -> Node:
    return Node(node_id=f"id-{name}", name=name, address=f"at-{name}", resources=resources)


def row(node: Node, alive: bool = True) -> dict[str, Any]:
    """As `ray.nodes()` has it; a node that has died has no resources there."""
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
def test_what_a_decode_worker_asks_for(device: Any, placement: RayPlacement, offered: set[str], asked: str) -> None:
    assert str(demand_of(WorkerConfig(role="decode", device=device), placement, offered)) == asked


def test_a_node_without_cpus_is_for_no_worker_unless_it_says_so() -> None:
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
def test_how_many_workers_may_share_a_node(here: Node, others: list[Node], num_workers: int, share: int) -> None:
    assert workers_on(here, num_workers, [here, *others]) == share


def test_places_are_whole_and_by_role() -> None:
    nodes = [node("a", CPU=8, baton_prefill=2), node("b", baton_prefill=1.5, baton_decode=0.5), node("head")]
    assert places_by_role(nodes) == {"prefill": 3, "decode": 0, "hybrid": 0}


def test_nodes_that_have_died_are_none() -> None:
    a, b = node("a", CPU=1), node("b", CPU=1)
    assert living_nodes([row(a), row(b, alive=False)]) == (a,)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (OURS, None),
        ({}, f"has no Baton, this fleet has {OURS['Baton']}"),
        ({**OURS, "Baton": "0.0.9"}, f"has Baton 0.0.9, this fleet has {OURS['Baton']}"),
        ({**OURS, "protocol": "0"}, f"has protocol 0, this fleet has {OURS['protocol']}"),
        ({"Baton": OURS["Baton"]}, f"has protocol unknown, this fleet has {OURS['protocol']}"),
    ],
)
def test_another_release_is_refused_by_what_differs(theirs: dict[str, str], why: str | None) -> None:
    assert why_refused(theirs, OURS) == why


class Cluster:
    """Answers what `RayNodes` asks of Ray: which nodes there are, and what each of them has; an exception is
    raised by the node."""

    def __init__(self, **releases: dict[str, str] | Exception) -> None:
        self.releases = releases
        self.nodes = [node(name, CPU=2) for name in releases]
        self.asked = 0

    async def __call__(self, what: str, call: Callable[[], Any]) -> Any:
        if what == "list its nodes":
            return tuple(self.nodes)
        self.asked += 1
        release = self.releases[list(self.releases)[self.asked - 1]]

        class Reference:
            def future(self) -> Future[Any]:
                told: Future[Any] = Future()
                told.set_exception(release) if isinstance(release, Exception) else told.set_result(release)
                return told

        return Reference()


OTHER = {**OURS, "Baton": "0.0.9"}


async def test_a_node_with_another_baton_is_refused_by_name_and_the_others_serve() -> None:
    cluster = Cluster(a=OURS, b=OTHER)
    nodes = RayNodes(cluster)
    await nodes.look()
    await nodes.look()
    assert cluster.asked == 2, "each is asked once"
    assert nodes.is_accepted("id-a")
    assert nodes.refused == [f"b (at-b) has Baton 0.0.9, this fleet has {OURS['Baton']}"]
    assert nodes.selector() == {"ray.io/node-id": "!in(id-b)"}
    nodes.check(Demand(num_cpus=1))
    assert nodes.places() == "a (at-a) has CPU: 2"
    assert [each.name for each in nodes.open] == ["a", "b"], "what a refused one offers is counted"


async def test_where_all_are_refused_the_error_names_each() -> None:
    nodes = RayNodes(Cluster(a={}, b=OTHER))
    await nodes.look()
    with pytest.raises(
        NodesRefused,
        match=r"asks for CPU: 1: a \(at-a\) has no Baton.*; b \(at-b\) has Baton 0\.0\.9.*same Baton on all",
    ):
        nodes.check(Demand(num_cpus=1))
    nodes.check(Demand(resources={"baton_decode": 1}))  # nobody has that yet; a node may come


async def test_a_node_that_does_not_answer_is_asked_again() -> None:
    cluster = Cluster(a=RuntimeError("it went away"))
    nodes = RayNodes(cluster)
    await nodes.look()
    assert not nodes.is_accepted("id-a")
    assert nodes.refused == []
    cluster.releases, cluster.asked = {"a": OURS}, 0
    await nodes.look()
    assert nodes.is_accepted("id-a")


async def test_a_node_that_was_left_is_not_chosen_again_while_it_lives_and_what_it_offered_is_remembered() -> None:
    cluster = Cluster(a=OURS, b=OURS)
    nodes = RayNodes(cluster)
    await nodes.look()
    nodes.leave("id-b")
    assert nodes.selector() == {"ray.io/node-id": "!in(id-b)"}
    assert [each.name for each in nodes.open] == ["a"]
    cluster.nodes = [node("a", baton_prefill=1)]
    await nodes.look()
    assert nodes.selector() == {}
    assert nodes.offered == {"CPU", "baton_prefill"}
