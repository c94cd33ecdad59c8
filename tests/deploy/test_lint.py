"""Rendered objects have no lint problem, and the lint detects injected ones."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy.conftest import Rendered
from tests.deploy.lint import problems
from tests.deploy.objects import named, of_kind, workloads
from tests.deploy.renderer import NAMESPACE, Doc, Renderer
from tests.deploy.value_sets import SETS


@pytest.mark.parametrize("name", SETS)
def test_objects_of_all_value_sets_have_no_problem(rendered: Rendered, name: str) -> None:
    assert problems(rendered(name), namespace=NAMESPACE, external=SETS[name].external) == []


def test_all_objects_are_in_the_namespace_of_the_release(helm: Renderer) -> None:
    docs = helm.docs(SETS["all-on"].values, namespace="another")

    assert {doc["metadata"]["namespace"] for doc in docs} == {"another"}


def test_all_pods_except_redis_use_one_image(rendered: Rendered) -> None:
    images = {
        container["image"]
        for workload in workloads(rendered("digest"))
        if workload.component != "redis"
        for container in workload.containers
    }

    assert images == {f"registry.example.com:5000/baton@sha256:{'0' * 64}"}


def _gateway(docs: list[Doc]) -> Any:
    return named(docs, "Deployment", "rel-baton-gateway")["spec"]


def _pod(docs: list[Doc]) -> Any:
    return _gateway(docs)["template"]["spec"]


def _container(docs: list[Doc]) -> Any:
    return _pod(docs)["containers"][0]


def _worker(docs: list[Doc]) -> Any:
    return named(docs, "Deployment", "rel-baton-worker-decode")["spec"]["template"]["spec"]


def _service(docs: list[Doc]) -> Any:
    return named(docs, "Service", "rel-baton-gateway")


def _budget(docs: list[Doc]) -> Any:
    return named(docs, "PodDisruptionBudget", "rel-baton-scheduler")["spec"]


BROKEN: dict[str, tuple[Callable[[list[Doc]], Any], str]] = {
    "twice the same object": (lambda docs: docs.append(docs[0]), "is defined 2 times"),
    "a long name": (lambda docs: _service(docs)["metadata"].update(name="x" * 64), "longer than 63"),
    "a foreign namespace": (lambda docs: _service(docs)["metadata"].update(namespace="default"), "namespace"),
    "a selector that matches no pod": (
        lambda docs: _service(docs)["spec"]["selector"].update(some="label"),
        "selects no pod",
    ),
    "a Service port that no pod has": (
        lambda docs: _service(docs)["spec"]["ports"][0].update(targetPort="web"),
        "has no port 'web'",
    ),
    "a Deployment that does not select its pods": (
        lambda docs: _gateway(docs)["selector"]["matchLabels"].update(a="b"),
        "selector",
    ),
    "a probe of an undefined port": (
        lambda docs: _container(docs)["readinessProbe"]["httpGet"].update(port="web"),
        "readinessProbe",
    ),
    "a port twice": (lambda docs: _container(docs)["ports"][0].update(containerPort=8001), "taken 2 times"),
    "a variable twice": (
        lambda docs: _container(docs)["env"].append({"name": "HOME", "value": "/"}),
        "HOME is set 2 times",
    ),
    "a variable before what it uses": (lambda docs: _container(docs)["env"].reverse(), "REDIS_PASSWORD"),
    "a Secret that is not there": (
        lambda docs: docs.remove(named(docs, "Secret", "rel-baton-redis")),
        "no secret rel-baton-redis",
    ),
    "a key that is not there": (
        lambda docs: _pod(docs)["volumes"][2]["configMap"]["items"][0].update(key="x.yaml"),
        "no key x.yaml",
    ),
    "a volume that is mounted nowhere": (
        lambda docs: _container(docs)["volumeMounts"].pop(0),
        "no container mounts the volume tmp",
    ),
    "a mount without a volume": (lambda docs: _pod(docs)["volumes"].pop(0), "no volume tmp"),
    "the latest image": (lambda docs: _container(docs).update(image="baton:latest"), "has no fixed tag"),
    "an image without a tag": (
        lambda docs: _container(docs).update(image="registry:5000/baton"),
        "has no fixed tag",
    ),
    "no memory limit": (lambda docs: _container(docs)["resources"].pop("limits"), "no limits.memory"),
    "too much shared memory": (
        lambda docs: _worker(docs)["volumes"][2]["emptyDir"].update(sizeLimit="64Gi"),
        "/dev/shm is larger",
    ),
    "a budget over one pod": (
        lambda docs: named(docs, "Deployment", "rel-baton-scheduler")["spec"].update(replicas=1),
        "only pod",
    ),
    "a budget that allows no eviction": (lambda docs: _budget(docs).update(maxUnavailable=0), "allows no eviction"),
    "a budget that matches no workload": (
        lambda docs: _budget(docs)["selector"]["matchLabels"].update(a="b"),
        "selects 0 workloads",
    ),
    "no number of pods": (lambda docs: _gateway(docs).pop("replicas"), "number of pods"),
    "root": (lambda docs: _pod(docs)["securityContext"].update(runAsNonRoot=False), "root"),
    "a writable root": (
        lambda docs: _container(docs)["securityContext"].update(readOnlyRootFilesystem=False),
        "root file system",
    ),
    "a capability": (
        lambda docs: _container(docs)["securityContext"]["capabilities"].update(add=["NET_ADMIN"]),
        "NET_ADMIN",
    ),
    "IPC_LOCK without RDMA": (
        lambda docs: _container(docs)["securityContext"]["capabilities"].update(add=["IPC_LOCK"]),
        "IPC_LOCK",
    ),
    "the host's network": (lambda docs: _pod(docs).update(hostNetwork=True), "hostNetwork"),
    "a token": (lambda docs: _pod(docs).pop("automountServiceAccountToken"), "token"),
    "no account": (lambda docs: _pod(docs).update(serviceAccountName="admin"), "no ServiceAccount admin"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_lint_detects(rendered: Rendered, what: str) -> None:
    break_it, words = BROKEN[what]
    docs = copy.deepcopy(list(rendered("default")))
    break_it(docs)

    assert any(words in problem for problem in problems(docs, namespace=NAMESPACE))


def test_lint_detects_two_autoscalers_of_one_deployment(rendered: Rendered) -> None:
    docs = copy.deepcopy(list(rendered("scaled-gateway")))
    (scaled,) = of_kind(docs, "ScaledObject")
    _gateway(docs)["replicas"] = 3
    docs.append({**scaled, "metadata": {**scaled["metadata"], "name": "second"}})
    found = problems(docs, namespace=NAMESPACE)

    assert "Deployment rel-baton-gateway: is scaled by 2" in found
    assert "Deployment rel-baton-gateway: has replicas although a ScaledObject scales it" in found
