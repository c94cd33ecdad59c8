"""Kubernetes waits as long as a pod may take to drain: preStop, the process's own drain, and what follows
it."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import Rendered
from tests.deploy.objects import Workload, named, selects, workloads
from tests.deploy.value_sets import SETS

HAND_OVER_S = 5
END_S = 10
PROPAGATION_S = 5


def settings(rendered: Rendered, name: str, service: str) -> dict[str, Any]:
    data = named(rendered(name), "ConfigMap", f"{fullname(rendered, name)}-config")["data"]
    return yaml.safe_load(data[f"{service}.yaml"])


def fullname(rendered: Rendered, name: str) -> str:
    return next(
        doc["metadata"]["name"].removesuffix("-config")
        for doc in rendered(name)
        if doc["metadata"]["name"].endswith("-config")
    )


def drain_s(rendered: Rendered, name: str, workload: Workload) -> float:
    """Return the longest drain in seconds, computed from the services' settings."""
    if workload.component in ("gateway", "scheduler"):
        return settings(rendered, name, workload.component)["drain_s"]
    fleet = settings(rendered, name, "fleet")
    role = workload.labels["baton.internal/role"]
    return fleet["drain_s"] + (HAND_OVER_S if role != "prefill" else 0) + (fleet["lease_s"] if role != "decode" else 0)


@pytest.mark.parametrize("name", SETS)
def test_grace_period_covers_the_drain(rendered: Rendered, name: str) -> None:
    draining = [
        workload for workload in workloads(rendered(name)) if workload.component in ("gateway", "scheduler", "worker")
    ]
    assert len(draining) >= 3
    for workload in draining:
        needed_s = PROPAGATION_S + drain_s(rendered, name, workload) + END_S

        assert needed_s <= workload.spec["terminationGracePeriodSeconds"] <= math.ceil(needed_s) + 2, workload.name


@pytest.mark.parametrize("name", SETS)
def test_gateways_wait_for_endpoints_and_workers_drain_before_ray_stops(rendered: Rendered, name: str) -> None:
    for workload in workloads(rendered(name)):
        if workload.component in ("gateway", "scheduler"):
            (container,) = workload.containers
            assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(PROPAGATION_S)]
        if workload.component == "worker":
            container = workload.container("worker")
            *command, limit_s = container["lifecycle"]["preStop"]["exec"]["command"]
            assert command == ["baton", "drain", "--here", "--wait", "--limit-s"]
            assert (
                drain_s(rendered, name, workload)
                <= int(limit_s)
                <= workload.spec["terminationGracePeriodSeconds"] - END_S
            )
            assert {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "0"} in container["env"]
            values = {variable["name"]: variable.get("value") for variable in container["env"]}
            assert str(Path(values["BATON_DRAIN_SOCKET"]).parent) in {
                mount["mountPath"] for mount in container["volumeMounts"]
            }


@pytest.mark.parametrize("name", SETS)
def test_pool_never_surges(rendered: Rendered, name: str) -> None:
    for doc in rendered(name):
        if doc["kind"] == "Deployment" and doc["metadata"]["labels"]["app.kubernetes.io/component"] == "worker":
            assert doc["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


@pytest.mark.parametrize("name", SETS)
def test_startup_timeout_covers_the_model_load(rendered: Rendered, name: str) -> None:
    for workload in workloads(rendered(name)):
        if workload.component == "worker":
            probe = workload.container("worker")["startupProbe"]
            budget_s = probe["periodSeconds"] * probe["failureThreshold"]

            known = {"8p8d-rdma": (900,), "kuberay-8p8d": (900,), "gpu-node": (600,), "slow-models": (1800, 1200, 600)}
            assert budget_s in known.get(name, (300,))
            assert budget_s <= settings(rendered, name, "fleet")["worker_start_s"], (
                "or the fleet would give it up first"
            )


def test_liveness_probes_depend_on_no_other_process(rendered: Rendered) -> None:
    for workload in workloads(rendered("default")):
        for container in workload.containers:
            probe = container.get("livenessProbe", {})
            assert probe.get("httpGet", {}).get("path", "/health") == "/health", workload.name


@pytest.mark.parametrize("name", SETS)
def test_each_service_has_liveness_and_readiness_probes(rendered: Rendered, name: str) -> None:
    for workload in workloads(rendered(name)):
        if workload.component in ("gateway", "scheduler", "fleet"):
            container = workload.container(workload.component)
            admin = next(port["containerPort"] for port in container["ports"] if port["name"] == "admin")
            assert admin == settings(rendered, name, workload.component)["admin_port"]
            paths = {
                probe: container[f"{probe}Probe"].get("httpGet", {}).get("path")
                for probe in ("startup", "readiness", "liveness")
            }
            assert paths["startup"] == paths["liveness"] == "/health"
            assert paths["readiness"] == "/ready" or container["readinessProbe"]["grpc"]


def test_prometheus_scrapes_each_service_once(rendered: Rendered) -> None:
    docs = rendered("monitors")
    (monitor,) = (doc for doc in docs if doc["kind"] == "ServiceMonitor")
    found = [
        workload.component
        for service in docs
        if service["kind"] == "Service"
        and selects(monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
        for workload in workloads(docs)
        if selects(service["spec"]["selector"], workload.labels)
        if any(port["name"] == monitor["spec"]["endpoints"][0]["port"] for port in service["spec"]["ports"])
    ]
    assert sorted(found) == ["fleet", "gateway", "scheduler"]
