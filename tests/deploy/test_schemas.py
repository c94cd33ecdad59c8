"""Rendered objects match the schemas of three Kubernetes versions, custom kinds those of the tests.

Both kinds of schema refuse invalid objects.
"""

import copy
from functools import cache
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import Rendered
from tests.deploy.custom_schemas import SCHEMAS, custom_problem, pod_templates
from tests.deploy.kubernetes_schemas import VERSIONS, kubernetes_problem, pod_template_problem
from tests.deploy.objects import named
from tests.deploy.renderer import Doc
from tests.deploy.value_sets import SETS


def problem_of(doc: Doc, version: str) -> str:
    if (doc["apiVersion"], doc["kind"]) not in SCHEMAS:
        return kubernetes_problem(doc, version)
    inside = (pod_template_problem(template, version) for template in pod_templates(doc))
    return custom_problem(doc) or next((problem for problem in inside if problem), "")


@cache
def known_problem(text: str, version: str) -> str:
    """Check an object once, because most are equal in many value sets."""
    return problem_of(yaml.load(text, Loader=yaml.CSafeLoader), version)


@pytest.mark.parametrize("name", SETS)
def test_objects_are_valid_in_all_kubernetes_versions(rendered: Rendered, name: str) -> None:
    docs = rendered(name)
    texts = {f"{doc['kind']} {doc['metadata']['name']}": yaml.dump(doc, Dumper=yaml.CSafeDumper) for doc in docs}
    found = {f"{what}, {version}": known_problem(text, version) for what, text in texts.items() for version in VERSIONS}

    assert {what: problem for what, problem in found.items() if problem} == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_unknown_field_or_kind_is_detected(rendered: Rendered, version: str) -> None:
    deployment = copy.deepcopy(named(rendered("default"), "Deployment", "rel-baton-gateway"))
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}

    assert "livenessprobe" in problem_of(deployment, version)
    with pytest.raises(FileNotFoundError):
        problem_of({**deployment, "kind": "Deploiment"}, version)


MISTAKES_IN_CUSTOM_KINDS: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "RayCluster": ("kuberay", ("spec", "workerGroupSpec"), "workerGroupSpec"),
    "ScaledObject": ("scaled-pools", ("spec", "maxReplicas"), "maxReplicas"),
    "ServiceMonitor": ("monitors", ("spec", "endpoints", 0, "targetport"), "targetport"),
    "PodMonitor": ("monitors", ("spec", "endpoints"), "endpoints"),
    "HTTPRoute": ("routes", ("spec", "rules", 0, "timeout"), "timeout"),
    "GRPCRoute": ("routes", ("spec", "hosts"), "hosts"),
    "Certificate": ("tls-issuer", ("spec", "dnsName"), "dnsName"),
    "Issuer": ("all-on", ("spec", "acme"), ""),
}


@pytest.mark.parametrize("kind", MISTAKES_IN_CUSTOM_KINDS)
def test_unknown_field_of_a_custom_kind_is_detected(rendered: Rendered, kind: str) -> None:
    name, path, word = MISTAKES_IN_CUSTOM_KINDS[kind]
    doc = copy.deepcopy(next(doc for doc in rendered(name) if doc["kind"] == kind))
    assert custom_problem(doc) == ""
    place: Any = doc
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = "something"

    assert word in custom_problem(doc) != ""


def test_pod_template_inside_a_custom_kind_is_checked(rendered: Rendered) -> None:
    cluster = copy.deepcopy(next(doc for doc in rendered("kuberay") if doc["kind"] == "RayCluster"))
    cluster["spec"]["workerGroupSpecs"][1]["template"]["spec"]["terminationGracePeriod"] = 5

    assert "terminationGracePeriod" in problem_of(cluster, VERSIONS[0])
