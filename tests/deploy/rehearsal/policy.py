"""Translates NetworkPolicies and Services into packet filter rules, as a network plugin does."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.deploy.objects import of_kind, selects
from tests.deploy.rehearsal import nft
from tests.deploy.renderer import Doc


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A pod as a peer of policies."""

    labels: Mapping[str, str]
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """An inclusive port range and the addresses that can reach it; None: all addresses."""

    low: int
    high: int
    sources: frozenset[str] | None


def openings(docs: Iterable[Doc], labels: Mapping[str, str], peers: Sequence[Peer]) -> tuple[Opening, ...] | None:
    """Return the open ports of a pod with these labels, or None if no policy selects it.

    Raises ValueError for rules that cannot be simulated with the pods of one namespace.
    """
    policies = [
        doc
        for doc in of_kind(docs, "NetworkPolicy")
        if selects(doc["spec"]["podSelector"].get("matchLabels", {}), labels)
    ]
    if not policies:
        return None
    found: list[Opening] = []
    for policy in policies:
        _check_keys(policy["spec"], {"podSelector", "policyTypes", "ingress"})
        if policy["spec"]["policyTypes"] != ["Ingress"]:
            raise ValueError(f"policy types {policy['spec']['policyTypes']} cannot be rehearsed")
        for rule in policy["spec"].get("ingress", ()):
            sources = None if "from" not in rule else frozenset(_addresses(rule["from"], peers))
            for port in rule["ports"]:
                if port["protocol"] != "TCP":
                    raise ValueError(f"protocol {port['protocol']} cannot be rehearsed")
                found.append(Opening(low=port["port"], high=port.get("endPort", port["port"]), sources=sources))
    return tuple(found)


def _addresses(selectors: Iterable[Mapping[str, Any]], peers: Sequence[Peer]) -> Iterable[str]:
    for selector in selectors:
        _check_keys(selector, {"podSelector"})
        _check_keys(selector["podSelector"], {"matchLabels"})
        yield from (peer.address for peer in peers if selects(selector["podSelector"]["matchLabels"], peer.labels))


def _check_keys(item: Mapping[str, Any], known: set[str]) -> None:
    if unknown := item.keys() - known:
        raise ValueError(f"{', '.join(sorted(unknown))} cannot be rehearsed")


def input_chain(opened: Sequence[Opening] | None, node: str) -> nft.Chain:
    """Return the input chain of a pod. The node can always reach it, because probes come from there."""
    chain = nft.Chain(
        name="policy", kind="filter", hook=nft.INPUT, priority=0, policy=nft.ACCEPT if opened is None else nft.DROP
    )
    if opened is not None:
        accept = nft.verdict(nft.ACCEPT)
        chain.rules.extend([*of, *accept] for of in (nft.loopback(), nft.established(), nft.source(node)))
        for opening in opened:
            ports = nft.tcp_to(opening.low, opening.high)
            if opening.sources is None:
                chain.rules.append([*ports, *accept])
            else:
                chain.rules.extend([*nft.source(address), *ports, *accept] for address in sorted(opening.sources))
    return chain


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualPort:
    """A port of a Service address, and the pod sockets behind it."""

    address: str
    port: int
    backends: tuple[tuple[str, int], ...]


def service_chains(ports: Sequence[VirtualPort]) -> list[nft.Chain]:
    """Return the chains that send each connection to one pod of the Service, or refuse it without any."""
    translate = nft.Chain(name="services", kind="nat", hook=nft.OUTPUT, priority=-100)
    refuse = nft.Chain(name="no_backends", kind="filter", hook=nft.OUTPUT, priority=0)
    for port in ports:
        to = [*nft.destination(port.address), *nft.tcp_to(port.port, port.port)]
        for left, (address, number) in zip(range(len(port.backends), 0, -1), port.backends, strict=True):
            translate.rules.append([*to, *nft.one_in(left), *nft.redirect_to(address, number)])
        if not port.backends:
            refuse.rules.append([*to, *nft.refuse()])
    return [translate, refuse]
