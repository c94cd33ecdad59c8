"""NetworkPolicies allow exactly the connections that the services need."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.deploy.conftest import Rendered
from tests.deploy.objects import Workload, of_kind, selects, workloads
from tests.deploy.renderer import Doc
from tests.deploy.value_sets import SETS

ANY_CLIENT, METRICS = "any client", "metrics"
ANYWHERE, OUTSIDE = "anywhere", "outside"
RAY = ("ray-head", "fleet", "worker")
RAY_PORTS = [(6380, 6386), (10002, 10101)]
EPHEMERAL = (32768, 60999)
NEEDED: Mapping[str, Mapping[str, Sequence[tuple[int, int]]]] = {
    "gateway": {ANY_CLIENT: [(8000, 8000), (8001, 8001)]},
    "scheduler": {"gateway": [(8100, 8100)], "worker": [(8100, 8100)]},
    "worker": {
        "gateway": [(8101, 8101)],
        "worker": [(8101, 8101), (20000, 20099), *RAY_PORTS],
        "ray-head": RAY_PORTS,
        "fleet": RAY_PORTS,
    },
    "ray-head": dict.fromkeys(RAY, RAY_PORTS),
    "fleet": dict.fromkeys(RAY, RAY_PORTS),
    "redis": {name: [(6379, 6379)] for name in ("gateway", "scheduler", "fleet", "worker")},
}
"""Allowed clients and ports by target component."""


def allowed(docs: Sequence[Doc], target: Workload) -> dict[str, list[tuple[int, int]]]:
    """Return the clients and ports that a network plugin allows for these pods.

    Without a policy that selects them, ANY_CLIENT may use every port.
    """
    policies = [
        policy
        for policy in of_kind(docs, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"]["matchLabels"], target.labels)
    ]
    if not policies:
        return {ANY_CLIENT: [(1, 65535)]}
    found: dict[str, list[tuple[int, int]]] = {}
    for policy in policies:
        assert "Ingress" in policy["spec"]["policyTypes"]
        for rule in policy["spec"]["ingress"]:
            ports = [(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]]
            for who in _sources(rule, docs):
                found[who] = sorted({*found.get(who, ()), *ports})
    return found


def _sources(rule: Mapping[str, Any], docs: Sequence[Doc]) -> Iterator[str]:
    if "from" not in rule:
        yield ANY_CLIENT
    for peer in rule.get("from", ()):
        if "podSelector" in peer:
            components = {
                workload.component
                for workload in workloads(docs)
                if selects(peer["podSelector"]["matchLabels"], workload.labels)
            }
            assert len(components) == 1, peer
            yield components.pop()
        else:
            yield METRICS


@pytest.mark.parametrize("name", ["default", "kuberay", "hybrid", "two-kinds", "long-name", "redis-secret"])
def test_policies_allow_exactly_the_needed_connections(rendered: Rendered, name: str) -> None:
    docs = rendered(name)
    for workload in workloads(docs):
        if workload.component != "test":
            needed = {who: sorted(ports) for who, ports in NEEDED[workload.component].items()}

            assert allowed(docs, workload) == needed, workload.name


@pytest.mark.parametrize(
    ("name", "ports"), [("collective", [EPHEMERAL]), ("auto-transfer", [(20000, 20099), EPHEMERAL])]
)
def test_workers_reach_the_ports_that_gloo_takes(
    rendered: Rendered, name: str, ports: Sequence[tuple[int, int]]
) -> None:
    docs = rendered(name)
    for workload in workloads(docs):
        if workload.component == "worker":
            found = allowed(docs, workload)
            assert found.pop("worker") == sorted([(8101, 8101), *ports, *RAY_PORTS])
            assert found == {who: sorted(each) for who, each in NEEDED["worker"].items() if who != "worker"}


def test_only_named_clients_reach_the_gateway(rendered: Rendered) -> None:
    docs = rendered("clients")
    (gateway,) = (workload for workload in workloads(docs) if workload.component == "gateway")
    (prefill,) = (workload for workload in workloads(docs) if workload.labels.get("baton.internal/role") == "prefill")

    front = [(8000, 8000), (8001, 8001)]
    assert allowed(docs, gateway) == {METRICS: [*front, (9000, 9000)], "test": front}
    assert allowed(docs, prefill)[METRICS] == [(9000, 9000)]
    (fleet,) = (workload for workload in workloads(docs) if workload.component == "fleet")
    assert allowed(docs, fleet)[METRICS] == [(9000, 9000)]


def outgoing(docs: Sequence[Doc], source: Workload) -> dict[str, list[tuple[int, int]]]:
    """Return the targets and ports that these pods may connect to.

    Fails unless exactly one policy restricts them.
    """
    (policy,) = (
        policy
        for policy in of_kind(docs, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"]["matchLabels"], source.labels)
    )
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    found: dict[str, list[tuple[int, int]]] = {}
    for rule in policy["spec"]["egress"]:
        ports = {(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]}
        for target in _targets(rule, docs):
            found[target] = sorted({*found.get(target, ()), *ports})
    return found


def _targets(rule: Mapping[str, Any], docs: Sequence[Doc]) -> Iterator[str]:
    if "to" not in rule:
        yield ANYWHERE
    for peer in rule.get("to", ()):
        if "podSelector" in peer:
            yield from {
                workload.component
                for workload in workloads(docs)
                if selects(peer["podSelector"]["matchLabels"], workload.labels)
            }
        else:
            yield OUTSIDE


def test_outgoing_connections_are_those_that_the_targets_allow(rendered: Rendered) -> None:
    docs = rendered("egress")
    seen = set()
    for source in workloads(docs):
        if source.component == "test":
            continue
        needed = {
            target: sorted(clients[source.component])
            for target, clients in NEEDED.items()
            if source.component in clients
        }
        assert outgoing(docs, source) == needed | {ANYWHERE: [(53, 53)], OUTSIDE: [(4317, 4317)]}, source.name
        seen.add(source.component)
    assert seen == set(NEEDED)


def test_no_policies_if_disabled(rendered: Rendered) -> None:
    assert of_kind(rendered("no-policies"), "NetworkPolicy") == []


@pytest.mark.parametrize("name", SETS)
def test_each_open_port_is_in_a_policy_or_used_by_probes(rendered: Rendered, name: str) -> None:
    docs = rendered(name)
    if not of_kind(docs, "NetworkPolicy"):
        return
    for workload in workloads(docs):
        if workload.component == "test":
            continue
        ranges = [ports for open_to in allowed(docs, workload).values() for ports in open_to]
        for container in workload.containers:
            for port in container.get("ports", ()):
                number = port["containerPort"]
                assert port["name"] == "admin" or any(low <= number <= high for low, high in ranges), (
                    workload.name,
                    port,
                )
