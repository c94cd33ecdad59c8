"""Translation of NetworkPolicies and Services into packet filter rules."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.deploy.conftest import Rendered
from tests.deploy.objects import workloads
from tests.deploy.rehearsal.nft import PacketFilter
from tests.deploy.rehearsal.policy import Opening, Peer, VirtualPort, input_chain, openings, service_chains
from tests.deploy.renderer import Doc
from tests.deploy.test_policies import ANY_CLIENT, NEEDED
from tests.netns import Netns, Network, unavailable_reason

PREFIX = "10.149.7"
NODE = f"{PREFIX}.254"
SERVICE, EMPTY = f"{PREFIX}.200", f"{PREFIX}.201"
UNAVAILABLE_REASON = unavailable_reason()
DROPPED_S = 0.3
"""Timeout of connections whose packets are dropped."""


@pytest.mark.parametrize("name", ["default", "hybrid", "two-kinds", "long-name"])
def test_rules_open_ports_to_the_selected_pods(rendered: Rendered, name: str) -> None:
    there = [workload for workload in workloads(rendered(name)) if workload.component != "test"]
    peers = [Peer(labels=workload.labels, address=f"10.0.0.{number}") for number, workload in enumerate(there)]
    by_component = {
        component: {
            peer.address for workload, peer in zip(there, peers, strict=True) if workload.component == component
        }
        for component in NEEDED
    }
    for workload in there:
        opened = openings(rendered(name), workload.labels, peers)
        assert opened is not None

        found = {
            (opening.low, opening.high, address) for opening in opened for address in opening.sources or {ANY_CLIENT}
        }
        assert found == {
            (low, high, address)
            for who, ports in NEEDED[workload.component].items()
            for low, high in ports
            for address in ({ANY_CLIENT} if who == ANY_CLIENT else by_component[who])
        }


def test_pod_without_policy_is_open(rendered: Rendered) -> None:
    assert openings(rendered("no-policies"), next(workloads(rendered("no-policies"))).labels, ()) is None


def test_unknown_kind_of_rule_raises(rendered: Rendered) -> None:
    gateway = next(workload for workload in workloads(rendered("clients")) if workload.component == "gateway")

    with pytest.raises(ValueError, match="namespaceSelector cannot be rehearsed"):
        openings(rendered("clients"), gateway.labels, ())


def _policy(**spec: object) -> Doc:
    return {"kind": "NetworkPolicy", "spec": {"podSelector": {}, "policyTypes": ["Ingress"], **spec}}


def test_policy_without_rules_opens_nothing() -> None:
    assert openings([_policy()], {}, ()) == ()


@pytest.mark.parametrize(
    "spec", [{"policyTypes": ["Egress"]}, {"egress": []}, {"ingress": [{"ports": [{"protocol": "UDP", "port": 1}]}]}]
)
def test_unsupported_policy_raises(spec: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cannot be rehearsed"):
        openings([_policy(**spec)], {}, ())


@pytest.fixture
def machines() -> Iterator[tuple[Netns, Netns, Netns]]:
    with ExitStack() as stack:
        network = Network(PREFIX, stack)
        yield network.add(), network.add(), network.add()


def _said(netns: Netns, port: int, word: bytes, stack: ExitStack) -> None:
    """Serve a word to every connection."""
    server = stack.enter_context(netns.call(lambda: socket.create_server((netns.address, port))))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(word)

    thread = threading.Thread(target=serve)
    thread.start()
    stack.callback(thread.join)
    stack.callback(server.shutdown, socket.SHUT_RDWR)


def _heard(netns: Netns, address: str, port: int, limit_s: float = 30.0) -> str:
    def ask() -> str:
        try:
            with socket.create_connection((address, port), timeout=limit_s) as connection:
                return connection.recv(10).decode()
        except (TimeoutError, ConnectionRefusedError) as error:
            return type(error).__name__

    return netns.call(ask)


@pytest.mark.skipif(bool(UNAVAILABLE_REASON), reason=UNAVAILABLE_REASON or "network namespaces are available")
def test_kernel_enforces_the_rules(machines: tuple[Netns, Netns, Netns]) -> None:
    known, other, server = machines
    with ExitStack() as stack:
        for port in (80, 89, 99):
            _said(server, port, f"server{port}".encode(), stack)
        _said(other, 80, b"other80", stack)
        filters = {netns: PacketFilter(netns, "test") for netns in machines}
        for each in filters.values():
            stack.callback(each.close)
        filters[server].replace([input_chain([Opening(low=80, high=89, sources=frozenset({known.address}))], NODE)])

        assert [_heard(known, server.address, port) for port in (80, 89)] == ["server80", "server89"]
        assert _heard(known, server.address, 99, DROPPED_S) == "TimeoutError"
        assert _heard(other, server.address, 80, DROPPED_S) == "TimeoutError"
        assert _heard(server, server.address, 99) == "server99"
        assert _heard(server, other.address, 80) == "other80"

        both = ((server.address, 80), (other.address, 80))
        ports = [VirtualPort(address=SERVICE, port=8, backends=both), VirtualPort(address=EMPTY, port=8, backends=())]
        filters[known].replace(service_chains(ports))

        assert {_heard(known, SERVICE, 8) for _ in range(40)} == {"server80", "other80"}
        assert _heard(known, EMPTY, 8) == "ConnectionRefusedError"

        filters[server].replace([input_chain(None, NODE)])

        assert _heard(other, server.address, 99) == "server99"
