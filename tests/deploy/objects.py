"""Queries on rendered objects."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.deploy.renderer import Doc


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A group of equal pods. `replicas`: None if an autoscaler sets it."""

    kind: str
    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Mapping[str, Any]
    selector: Mapping[str, str] | None
    replicas: int | None

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[Mapping[str, Any]]:
        """All containers, including init containers."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    def container(self, name: str) -> Mapping[str, Any]:
        return next(container for container in self.containers if container["name"] == name)


def of_kind(docs: Iterable[Doc], *kinds: str) -> list[Doc]:
    return [doc for doc in docs if doc["kind"] in kinds]


def named(docs: Iterable[Doc], kind: str, name: str) -> Doc:
    return next(doc for doc in docs if doc["kind"] == kind and doc["metadata"]["name"] == name)


def workloads(docs: Iterable[Doc]) -> Iterator[Workload]:
    """Yield the Deployments, Jobs, pods and RayCluster groups."""
    for doc in docs:
        name = doc["metadata"]["name"]
        if doc["kind"] == "Job":
            yield _workload("Job", name, doc["spec"]["template"], None, 1)
        elif doc["kind"] == "Deployment":
            selector = doc["spec"]["selector"]["matchLabels"]
            yield _workload("Deployment", name, doc["spec"]["template"], selector, doc["spec"].get("replicas"))
        elif doc["kind"] == "Pod":
            yield _workload("Pod", name, doc, None, 1)
        elif doc["kind"] == "RayCluster":
            head, *groups = (doc["spec"]["headGroupSpec"], *doc["spec"]["workerGroupSpecs"])
            yield _workload("RayCluster", f"{name}-head", head["template"], None, 1)
            for group in groups:
                yield _workload(
                    "RayCluster", f"{name}-worker-{group['groupName']}", group["template"], None, group["replicas"]
                )


def _workload(
    kind: str, name: str, template: Mapping[str, Any], selector: Mapping[str, str] | None, replicas: int | None
) -> Workload:
    metadata = template["metadata"]
    return Workload(
        kind=kind,
        name=name,
        labels=metadata["labels"],
        annotations=metadata.get("annotations") or {},
        spec=template["spec"],
        selector=selector,
        replicas=replicas,
    )


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in selector.items())


def bytes_of(quantity: str | float) -> float:
    """Convert a Kubernetes quantity of memory to bytes."""
    text = str(quantity)
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    for suffix, factor in units.items():
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * factor
    return float(text)
