"""`values.yaml`, its schema, the table in the README and the templates are consistent."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from tests.deploy.objects import of_kind
from tests.deploy.renderer import CHART, Renderer, RenderError
from tests.deploy.value_sets import ALL_ON, EXAMPLES, KUBERAY, PROMETHEUS, RDMA, SCALED
from tools import gen_chart

SECRETS: dict[str, Any] = {
    "apiKeys": {"existingSecret": "keys"},
    "ray": {"existingSecret": "token"},
    "redis": {"bundled": {"existingSecret": "password"}},
}
"""Values without generated Secrets, so that two renderings are equal."""
FT = {"gcsFaultTolerance": {"enabled": True, "redisAddress": "other:6379"}}
TLS = {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "mine"}}}
BASES: tuple[Mapping[str, Any], ...] = (
    {
        "gateway": {"replicas": 2},
        "poolDefaults": {"replicas": 2, "gpu": {"count": 1}, "image": {"variant": "cuda"}, **RDMA},
        "tls": TLS,
        "frontTls": TLS,
    },
    {
        "model": {"source": "hub", "hub": {"claimName": "cache", "prefetch": True}},
        "runtime": KUBERAY,
        "networkPolicy": {"clients": [{"podSelector": {}}], "egress": {"enabled": True, "rules": [{"to": []}]}},
    },
    {
        "model": {"source": "pvc", "pvc": {"claimName": "models"}},
        "config": {"model": "/models/some"},
        "redis": {"existingSecret": "url"},
    },
    {
        "gateway": {"service": {"type": "LoadBalancer"}, "autoscaling": SCALED},
        "poolDefaults": {"autoscaling": SCALED},
        "keda": PROMETHEUS,
        "ray": FT,
    },
    {
        "gateway": {name: ALL_ON["gateway"][name] for name in ("ingress", "httpRoute", "grpcRoute")},
        "metrics": ALL_ON["metrics"],
        "pools": [{"name": "a", "role": "hybrid"}],
    },
)
"""Value sets such that each value has an effect in at least one of them."""
DESCRIBED = {path: default for path, default, _ in gen_chart.described_values()}
OTHER: Mapping[str, Any] = {
    "config.model": "/models/other",
    "config.host": "::",
    "config.log_level": "debug",
    "image.variant": "cuda",
    "image.digest": "sha256:" + "1" * 64,
    "image.pullPolicy": "Always",
    "image.pullSecrets": ["registry"],
    "model.source": "image",
    "model.pvc.mountPath": "/models/",
    "tls.certManager.duration": "100h",
    "tls.certManager.renewBefore": "10h",
    "tls.certManager.issuerRef": {"name": "other"},
    "frontTls.certManager.issuerRef": {"name": "other"},
    "frontTls.dnsNames": ["other.example.com"],
    "redis.url": "redis://other:6379/0",
    "redis.bundled.image.digest": "sha256:" + "2" * 64,
    "redis.bundled.maxmemory": "128mb",
    "runtime.mode": "kuberay",
    "ray.gcsFaultTolerance.redisAddress": "another:6379",
    "kuberay.apiLevel": "1.6",
    "gateway.service.type": "NodePort",
    "gateway.service.loadBalancerSourceRanges": ["10.0.0.0/8"],
    "gateway.ingress.hosts": ["other.example.com"],
    "gateway.ingress.tls": [{"secretName": "web"}],
    "gateway.httpRoute.parentRefs": [{"name": "other"}],
    "gateway.httpRoute.hostnames": ["other.example.com"],
    "gateway.grpcRoute.parentRefs": [{"name": "other"}],
    "gateway.grpcRoute.hostnames": ["other.example.com"],
    "fleet.config.kv_port_range": "30000-30001",
    "fleet.config.kv_memory": "1GiB",
    "pools": [{"name": "other", "role": "hybrid"}],
    "poolDefaults.image": {"tag": "other", "variant": "cuda"},
    "poolDefaults.gpu.count": 0,
    "poolDefaults.autoscaling.minReplicas": 3,
    "poolDefaults.gpu.resource": "amd.com/gpu",
    "poolDefaults.rdma.resource": "rdma/other",
    "poolDefaults.pdb.maxUnavailable": 2,
    "topologySpread.whenUnsatisfiable": "DoNotSchedule",
    "networkPolicy.clients": [{"podSelector": {}}],
    "networkPolicy.metricsFrom": [{"podSelector": {}}],
    "networkPolicy.egress.rules": [{"to": [{"podSelector": {}}]}],
    "securityContext.pod": {"runAsUser": 4711},
    "securityContext.container": {"privileged": False},
    "metrics.interval": "5s",
    "keda.prometheusAddress": "http://other:9090",
    "extraObjects": [{"kind": "Some", "apiVersion": "v1"}],
}
"""A value other than the default, if it does not follow from the type."""
NEEDS_FILES = ("metrics.prometheusRule", "metrics.dashboards")
"""Tested below with files."""


def other_than(path: str, default: Any) -> Any:
    """Return another value of the same type."""
    if path in OTHER:
        return OTHER[path]
    if isinstance(default, int):
        return default + 1
    if path.rpartition(".")[2] in ("extraEnv",):
        return [{"name": "OTHER", "value": "1"}]
    if isinstance(default, list):
        return [
            {"name": "other", "emptyDir": {}}
            if "Volumes" in path
            else {"name": "other", "mountPath": "/other"}
            if "Mounts" in path
            else {"key": "other"}
        ]
    if path.endswith(("resources", "Resources")):
        return {"limits": {"memory": "77Gi"}}
    if isinstance(default, dict):
        return {"other": "other"} if not path.endswith("affinity") else {"nodeAffinity": {"other": "other"}}
    return f"7{default}" if default.endswith(("Gi", "Mi", "GiB", "MiB")) else "other"


def merged(base: Any, over: Any) -> Any:
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return copy.deepcopy(over)
    return {
        key: merged(base.get(key), over[key]) if key in over else copy.deepcopy(base[key]) for key in {**base, **over}
    }


def at(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def leaves(values: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all leaf values. Lists and empty mappings count as leaves."""
    for name, value in values.items():
        below = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value and below not in DESCRIBED:
            yield from leaves(value, below)
        else:
            yield below


def test_generated_parts_are_up_to_date() -> None:
    assert (CHART / "values.schema.json").read_text(encoding="utf-8") == gen_chart.schema_text(), (
        "run: python tools/gen_chart.py"
    )
    assert (CHART / "README.md").read_text(encoding="utf-8") == gen_chart.readme_text(), (
        "run: python tools/gen_chart.py"
    )


def test_each_value_is_described() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

    assert list(leaves(values)) == list(DESCRIBED)


@dataclass
class Found:
    """What earlier values have shown.

    texts: each base, rendered.
    base_of: the last base in which a value of a section had an effect. It is tried first for the next one.
    """

    texts: dict[int, str] = field(default_factory=dict)
    base_of: dict[str, int] = field(default_factory=dict)


@pytest.mark.parametrize("path", [path for path in DESCRIBED if not path.startswith(NEEDS_FILES)])
def test_every_value_has_an_effect(helm: Renderer, path: str, found: Found) -> None:
    default, section = DESCRIBED[path], path.partition(".")[0]
    for number in sorted(range(len(BASES)), key=lambda number: number != found.base_of.get(section, 0)):
        base = merged(SECRETS, BASES[number])
        if number not in found.texts:
            found.texts[number] = helm.text(base)
        is_on = value_at(base, path, default)
        value = not is_on if isinstance(default, bool) else other_than(path, default)
        try:
            has_effect = helm.text(merged(base, at(path, value))) != found.texts[number]
        except RenderError as refused:  # a value that only another base can have, or a switch that has to be on
            has_effect = isinstance(default, bool) and refused.mentions(path)
        if has_effect:
            found.base_of[section] = number
            return
    pytest.fail(f"{path} changes nothing")


@pytest.fixture(scope="module")
def found() -> Found:
    return Found()


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_repeat_no_defaults(example: str) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    said = yaml.safe_load((CHART / f"values-{example}.yaml").read_text(encoding="utf-8"))
    same = [path for path in leaves_of(said) if path in DESCRIBED and value_at(said, path) == value_at(values, path)]

    assert same == []


def leaves_of(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in values.items():
        below = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            yield from leaves_of(value, below)
        else:
            yield below


def value_at(values: Any, path: str, missing: Any = None) -> Any:
    for name in path.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return missing
        values = values[name]
    return values


def test_alerts_and_dashboards_are_read_from_files(helm: Renderer, tmp_path_factory: pytest.TempPathFactory) -> None:
    import shutil

    chart = tmp_path_factory.mktemp("chart") / "baton"
    shutil.copytree(CHART, chart)
    for kind, name, text in (
        (
            "rules",
            "some.yaml",
            'groups:\n  - name: some\n    rules:\n      - alert: Some\n        expr: "baton_open_requests > {{ 1 }}"\n',
        ),
        ("dashboards", "some.json", '{"title": "{{ $labels.worker }}"}\n'),
    ):
        (chart / "files" / kind).mkdir(parents=True, exist_ok=True)
        (chart / "files" / kind / name).write_text(text)
    on = {name: {"enabled": True, "labels": {"some": "label"}} for name in ("prometheusRule", "dashboards")}
    docs = helm.docs({"metrics": on}, chart=chart)
    rule = next(doc for doc in of_kind(docs, "PrometheusRule") if doc["metadata"]["name"] == "rel-baton-some")
    board = next(doc for doc in of_kind(docs, "ConfigMap") if doc["metadata"]["name"] == "rel-baton-dashboard-some")

    assert rule["spec"]["groups"][0]["rules"] == [{"alert": "Some", "expr": "baton_open_requests > {{ 1 }}"}]
    assert board["data"]["some.json"].strip() == '{"title": "{{ $labels.worker }}"}'
    assert rule["metadata"]["labels"]["some"] == board["metadata"]["labels"]["some"] == "label"
    assert of_kind(helm.docs({}, chart=chart), "PrometheusRule") == []
