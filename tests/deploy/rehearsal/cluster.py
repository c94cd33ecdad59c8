"""Runs rendered objects as pods on this machine, with a small replacement of Kubernetes' controllers."""

import base64
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

from tests.deploy.objects import named, of_kind, selects
from tests.deploy.rehearsal.kubelet import Kubelet
from tests.deploy.rehearsal.nft import PacketFilter
from tests.deploy.rehearsal.pods import pod_of
from tests.deploy.rehearsal.policy import Peer, VirtualPort, input_chain, openings, service_chains
from tests.deploy.renderer import Doc
from tests.netns import Netns, Network

TABLE = "rehearsal"
NODE, FIRST_SERVICE = 254, 200
"""Last bytes of the addresses of the node and of the first Service. Pods start at 2."""
KILL_S = 20.0
WAIT_S = 0.1
_DOMAINS = ("", ".{namespace}", ".{namespace}.svc", ".{namespace}.svc.cluster.local")


def issued(docs: Sequence[Doc], ca: trustme.CA) -> list[Doc]:
    """Return the Secrets that cert-manager would create for the Certificates, all signed by one CA."""
    made = []
    for doc in of_kind(docs, "Certificate"):
        if doc["spec"].get("isCA"):
            continue
        pair = ca.issue_cert(*doc["spec"]["dnsNames"])
        blobs = {
            "tls.crt": b"".join(blob.bytes() for blob in pair.cert_chain_pems),
            "tls.key": pair.private_key_pem.bytes(),
            "ca.crt": ca.cert_pem.bytes(),
        }
        data = {name: base64.b64encode(blob).decode() for name, blob in blobs.items()}
        made.append({"kind": "Secret", "metadata": {"name": doc["spec"]["secretName"]}, "data": data})
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Outsider:
    """A simulated machine outside all policies, for clients. It resolves the addresses of the Services."""

    netns: Netns
    filter: PacketFilter


class Cluster:
    """Runs all Deployments of the objects from `start` until the stack is closed."""

    def __init__(self, docs: Sequence[Doc], namespace: str, directory: Path, stack: ExitStack) -> None:
        number = os.getpid() % 60_000
        self.docs = docs
        self.kubelets: list[Kubelet] = []
        """All pods so far, including ended ones."""
        self._namespace = namespace
        self._directory = directory
        self._network = Network(f"10.{150 + number // 256 % 50}.{number % 256}", stack)
        self._node = self._network.join_this_process(NODE)
        self._filters: dict[str, PacketFilter] = {}
        self._outsiders: list[Outsider] = []
        self._counts: dict[str, int] = {}
        self._changing = threading.RLock()
        services = [doc for doc in of_kind(docs, "Service") if doc["spec"].get("clusterIP") != "None"]
        self._virtual = {
            doc["metadata"]["name"]: f"{self._network.prefix}.{FIRST_SERVICE + n}" for n, doc in enumerate(services)
        }
        stack.callback(self._close)

    def start(self) -> None:
        """Start all pods at the same time, as after `helm install`."""
        for doc in of_kind(self.docs, "Deployment"):
            for _ in range(doc["spec"]["replicas"]):
                self._create(doc)

    def outsider(self) -> Outsider:
        """Create a machine for clients."""
        netns = self._network.add()
        made = Outsider(netns=netns, filter=PacketFilter(netns, TABLE))
        self._outsiders.append(made)
        self._refresh()
        return made

    def address(self, service: str) -> str:
        """Return the address of a Service."""
        return self._virtual[service]

    def pods(self, component: str = "", **labels: str) -> list[Kubelet]:
        """Return the running pods of one component or of all, without terminating ones."""
        wanted = {name.replace("__", "/").replace("_", "-"): value for name, value in labels.items()}
        wanted |= {"app.kubernetes.io/component": component} if component else {}
        return [
            kubelet
            for kubelet in self.kubelets
            if not kubelet.is_ending.is_set() and selects(wanted, kubelet.pod.labels)
        ]

    def roll(self, deployment: str, limit_s: float) -> None:
        """Replace all pods of a Deployment as `kubectl rollout restart` does, and wait for the end of the old
        ones."""
        doc = named(self.docs, "Deployment", deployment)
        old = self._of(doc)
        strategy = doc["spec"]["strategy"]
        if strategy.get("type") == "Recreate":
            for kubelet in old:
                kubelet.end()
            _until_ended(old, limit_s)
            self._until_ready([self._create(doc) for _ in old], limit_s)
            return
        surge, away = strategy["rollingUpdate"]["maxSurge"], strategy["rollingUpdate"]["maxUnavailable"]
        assert surge + away == 1, "one pod at a time"
        for kubelet in old:
            if away:
                kubelet.end()  # it no longer counts, so its successor starts immediately
            self._until_ready([self._create(doc)], limit_s)
            kubelet.end()
        _until_ended(old, limit_s)

    def until_ready(self, limit_s: float) -> None:
        """Wait until all pods are ready. Raises AssertionError with their logs."""
        self._until_ready([kubelet for kubelet in self.kubelets if not kubelet.is_ending.is_set()], limit_s)

    def why_not_ready(self) -> list[str]:
        return [kubelet.why_not_ready() for kubelet in self.pods() if not kubelet.is_ready]

    def _until_ready(self, kubelets: Sequence[Kubelet], limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while missing := [kubelet for kubelet in kubelets if not kubelet.is_ready]:
            why = [kubelet.why_not_ready() for kubelet in missing]
            logs = (
                "\n".join(kubelet.log() for kubelet in missing)
                if time.monotonic() > end_s or any(k.failed for k in missing)
                else ""
            )
            assert not logs, f"not ready within {limit_s:g} s: {why}\n{logs}"
            time.sleep(WAIT_S)

    def _of(self, doc: Doc) -> list[Kubelet]:
        return [
            kubelet for kubelet in self.pods() if selects(doc["spec"]["selector"]["matchLabels"], kubelet.pod.labels)
        ]

    def _create(self, doc: Doc) -> Kubelet:
        deployment = doc["metadata"]["name"]
        with self._changing:
            number = self._counts[deployment] = self._counts.get(deployment, 0) + 1
            netns = self._network.add()
            pod = pod_of(doc["spec"]["template"], self.docs, name=f"{deployment}-{number}", address=netns.address)
            directory = self._directory / pod.name
            directory.mkdir()
            kubelet = Kubelet(pod, netns, directory, self._refresh)
            self.kubelets.append(kubelet)
            self._filters[pod.name] = PacketFilter(netns, TABLE)
            self._refresh()
        kubelet.start()
        return kubelet

    def _refresh(self) -> None:
        """Update policies, Services and host names of all machines."""
        with self._changing:
            there = [kubelet for kubelet in self.kubelets if kubelet.pod.name in self._filters]
            for kubelet in there:
                if kubelet.failed is not None or not (kubelet.is_alive() or kubelet.ident is None):
                    self._filters.pop(kubelet.pod.name).close()
            there = [kubelet for kubelet in there if kubelet.pod.name in self._filters]
            peers = [Peer(labels=kubelet.pod.labels, address=kubelet.pod.address) for kubelet in there]
            services = service_chains(list(self._virtual_ports(there)))
            names = list(self._names(there))
            for kubelet in there:
                opened = openings(self.docs, kubelet.pod.labels, peers)
                self._filters[kubelet.pod.name].replace([input_chain(opened, self._node), *services])
                _write_over(kubelet.hosts, ["127.0.0.1 localhost", f"{kubelet.pod.address} {kubelet.pod.name}", *names])
            for outsider in self._outsiders:
                outsider.filter.replace(services)

    def _virtual_ports(self, there: Sequence[Kubelet]) -> Iterator[VirtualPort]:
        for name, address in self._virtual.items():
            spec = named(self.docs, "Service", name)["spec"]
            behind = _endpoints(spec, there)
            for port in spec["ports"]:
                backends = tuple((kubelet.pod.address, self._target(port, kubelet)) for kubelet in behind)
                yield VirtualPort(address=address, port=port["port"], backends=backends)

    def _target(self, port: Mapping[str, Any], kubelet: Kubelet) -> int:
        """Return the number of the pod port that a Service port targets."""
        for doc in of_kind(self.docs, "Deployment"):
            if selects(doc["spec"]["selector"]["matchLabels"], kubelet.pod.labels):
                spec = doc["spec"]["template"]["spec"]
                for container in (*spec.get("initContainers", ()), *spec["containers"]):
                    for own in container.get("ports", ()):
                        if own["name"] == port["targetPort"]:
                            return int(own["containerPort"])
        raise KeyError(port["targetPort"])

    def _names(self, there: Sequence[Kubelet]) -> Iterator[str]:
        """Yield the DNS records of the cluster as lines of /etc/hosts."""
        for doc in of_kind(self.docs, "Service"):
            name = doc["metadata"]["name"]
            words = " ".join(f"{name}{domain.format(namespace=self._namespace)}" for domain in _DOMAINS)
            if name in self._virtual:
                yield f"{self._virtual[name]} {words}"
            else:
                yield from (f"{kubelet.pod.address} {words}" for kubelet in _endpoints(doc["spec"], there))

    def _close(self) -> None:
        for kubelet in self.kubelets:
            kubelet.kill()
        for kubelet in self.kubelets:
            kubelet.join(KILL_S)
        for packet_filter in (*self._filters.values(), *(outsider.filter for outsider in self._outsiders)):
            packet_filter.close()


def _endpoints(spec: Mapping[str, Any], there: Sequence[Kubelet]) -> list[Kubelet]:
    """Return the pods behind a Service: the ready ones, else terminating ones that were ready."""
    behind = [kubelet for kubelet in there if selects(spec["selector"], kubelet.pod.labels)]
    if spec.get("publishNotReadyAddresses"):
        return behind
    ready = [kubelet for kubelet in behind if kubelet.is_ready]
    return [kubelet for kubelet in ready if not kubelet.is_ending.is_set()] or ready


def _until_ended(kubelets: Sequence[Kubelet], limit_s: float) -> None:
    for kubelet in kubelets:
        kubelet.join(limit_s)
        assert not kubelet.is_alive(), f"{kubelet.pod.name} has not ended within {limit_s:g} s"


def _write_over(file: Path, lines: Sequence[str]) -> None:
    """Overwrite a file in place, because it is mounted elsewhere."""
    text = "\n".join([*lines, ""])
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
