"""The services accept what the chart passes to them: config files with their loaders, commands with their
command line, keys with the gateway's own parser."""

import base64
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import baton
from baton.cli.main import cli
from baton.core.errors import ConfigError
from baton.fleet.ray.node_resources import ROLE_RESOURCES
from baton.fleet.ray.worker_actor import NODE_SETTINGS
from baton.gateway.auth.api_keys import key_digest, parse_keys
from baton.runtime.config.config_base import settings_of
from baton.runtime.config.settings import SERVICES, WorkerConfig, load_settings
from tests.deploy.conftest import Rendered
from tests.deploy.lint import references
from tests.deploy.objects import named, of_kind, workloads
from tests.deploy.renderer import CHART, ROOT, Renderer
from tests.deploy.value_sets import SETS

POD_IP = "10.1.2.3"
PLAIN = {"status.podIP": POD_IP}


def files_of(rendered: Rendered, name: str) -> Mapping[str, str]:
    """Return the config files of the three services by name."""
    (config,) = (doc for doc in of_kind(rendered(name), "ConfigMap") if doc["metadata"]["name"].endswith("-config"))
    return config["data"]


def environment_of(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a container. Each value from a Secret is `secret`."""
    found: dict[str, str] = {}
    for variable in container.get("env", ()):
        source = variable.get("valueFrom", {})
        value = variable.get("value", "")
        if "fieldRef" in source:
            value = PLAIN[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            value = "redis://:secret@redis:6379/0" if variable["name"] == "BATON_REDIS_URL" else "secret"
        for known, its_value in found.items():
            value = value.replace(f"$({known})", its_value)
        found[variable["name"]] = value
    return found


@pytest.mark.parametrize("name", SETS)
def test_each_service_loads_its_config_file(rendered: Rendered, tmp_path: Path, name: str) -> None:
    for file, text in files_of(rendered, name).items():
        service = file.removesuffix(".yaml")
        (tmp_path / file).write_text(text)
        workload = next(workload for workload in workloads(rendered(name)) if workload.component == service)
        loaded = load_settings(
            SERVICES[service], flags={}, environ=environment_of(workload.container(service)), file=tmp_path / file
        )
        written = yaml.safe_load(text)
        known = {item.name for item in settings_of(SERVICES[service])}

        assert loaded.warnings == ()
        assert set(written) - known <= {"model", "host", "served_model_name"}  # of `config`, which is for all
        assert getattr(loaded.config, "redis_url", None)
        for key in set(written) & known:
            assert loaded.sources[key] == f"{tmp_path / file}: {key}", "a variable of the pod goes before the file"


def test_services_advertise_their_pod_address(rendered: Rendered, tmp_path: Path) -> None:
    for file, text in files_of(rendered, "default").items():
        (tmp_path / file).write_text(text)
    for service in ("gateway", "scheduler", "fleet"):
        workload = next(workload for workload in workloads(rendered("default")) if workload.component == service)
        config: Any = load_settings(
            SERVICES[service],
            flags={},
            environ=environment_of(workload.container(service)),
            file=tmp_path / f"{service}.yaml",
        ).config

        assert (config.host, config.admin_port) == ("0.0.0.0", 9000)
        assert service == "fleet" or config.advertise_host == POD_IP


@pytest.mark.parametrize("service", ["gateway", "scheduler", "fleet"])
def test_renamed_setting_is_detected(rendered: Rendered, tmp_path: Path, service: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(files_of(rendered, "default")[f"{service}.yaml"].replace("drain_s:", "drain_seconds:"))

    with pytest.raises(ConfigError, match="drain_seconds"):
        load_settings(SERVICES[service], flags={}, environ={}, file=file)


@pytest.mark.parametrize("name", SETS)
def test_container_commands_are_valid_baton_commands(rendered: Rendered, name: str) -> None:
    seen = set()
    for workload in workloads(rendered(name)):
        for container in workload.containers:
            stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
            for command in ([*container.get("command", ()), *container.get("args", ())], stop):
                if command[:1] == ["baton"]:
                    parse_command(command[1:])
                    seen.add(command[1])

    assert seen - {"model"} == {"gateway", "scheduler", "fleet", "drain"}


def parse_command(arguments: list[str]) -> None:
    """Parse a `baton` command. Raises click.UsageError for an unknown command or flag."""
    command: click.Command = cli
    while isinstance(command, click.Group):
        name, *arguments = arguments
        if name not in command.commands:
            raise click.UsageError(f"no command {name}")
        command = command.commands[name]
    command.make_context(command.name, arguments)


def test_invalid_command_is_detected() -> None:
    for command in ("drain --there", "model fetch", "model get o/m", "drained"):
        with pytest.raises(click.UsageError):
            parse_command(shlex.split(command))


def test_prefetch_job_fills_the_cache_that_pods_use(rendered: Rendered) -> None:
    """The Job runs before all other pods and uses the same claim. Only the Job contacts the hub."""
    docs = rendered("hub-claim")
    (job,) = of_kind(docs, "Job")
    (fetch,) = (workload for workload in workloads(docs) if workload.component == "fetch")
    (container,) = fetch.containers
    environment = environment_of(container)
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert container["args"] == [
        "model",
        "fetch",
        yaml.safe_load(files_of(rendered, "hub-claim")["gateway.yaml"])["model"],
    ]
    assert (environment["HF_TOKEN"], "HF_HUB_OFFLINE" in environment) == ("secret", False)
    assert fetch.spec["serviceAccountName"] == "default"
    made = {doc["metadata"]["name"] for doc in docs}
    assert not {name for _, name, _ in references(fetch)} & made
    places = {
        (
            workload.component,
            environment_of(one)["HF_HOME"],
            next(m["mountPath"] for m in one["volumeMounts"] if m["name"] == "model"),
        )
        for workload in workloads(docs)
        for one in workload.containers
        if "HF_HOME" in environment_of(one)
    }
    assert {where for where, *_ in places} == {"fetch", "gateway", "worker"}
    assert {at for _, *at in map(tuple, places) for at in at} == {"/var/cache/baton/huggingface"}


def test_worker_pod_sets_only_node_settings(rendered: Rendered) -> None:
    for workload in workloads(rendered("default")):
        if workload.component == "worker":
            environment = environment_of(workload.container("worker"))
            items = {item.variable: item for item in settings_of(WorkerConfig)}
            for variable in environment.keys() & items.keys():
                assert items[variable].name in NODE_SETTINGS
                assert items[variable].problem(items[variable].parse(environment[variable])) == ""
            assert environment.keys() >= {"BATON_HOST", "BATON_RPC_PORT", "BATON_ADMIN_PORT"}


@pytest.mark.parametrize("name", SETS)
def test_nodes_offer_the_resources_that_workers_request(rendered: Rendered, name: str) -> None:
    fleet = yaml.safe_load(files_of(rendered, name)["fleet.yaml"])
    joins = [
        workload.container("ray-node")["args"]
        for workload in workloads(rendered(name))
        if workload.component == "fleet"
    ]
    assert [f"--address={fleet['ray_address']}" in arguments for arguments in joins] == [True]
    assert fleet["ray_placement"] == "role"
    asked = {role: fleet[role] for role in ROLE_RESOURCES if fleet[role]}
    scaled = {
        doc["spec"]["scaleTargetRef"]["name"]: doc["spec"]["minReplicaCount"]
        for doc in of_kind(rendered(name), "ScaledObject")
    }
    offered: dict[str, int] = {}
    for workload in workloads(rendered(name)):
        if workload.component == "worker":
            role = workload.labels["baton.internal/role"]
            if workload.kind == "Deployment":
                assert f'--resources={{"{ROLE_RESOURCES[role]}":1}}' in workload.container("worker")["args"]
                offered[role] = offered.get(role, 0) + (workload.replicas or scaled[workload.name])
    for cluster in of_kind(rendered(name), "RayCluster"):
        for group in cluster["spec"]["workerGroupSpecs"]:
            role = group["template"]["metadata"]["labels"]["baton.internal/role"]
            assert group["rayStartParams"]["resources"] == f"'{{\"{ROLE_RESOURCES[role]}\":1}}'"
            assert group["minReplicas"] == group["replicas"] == group["maxReplicas"], (
                "Ray's autoscaler would go to the maximum at once"
            )
            offered[role] = offered.get(role, 0) + group["replicas"]
        assert cluster["spec"]["enableInTreeAutoscaling"] is False

    assert offered == asked
    if scaled.keys() & {workload.name for workload in workloads(rendered(name)) if workload.component == "worker"}:
        assert fleet["scale_with_nodes"], "the pods above the least get workers, too"
    assert fleet["scale_with_nodes"] is not bool(of_kind(rendered(name), "RayCluster")), (
        "Ray's autoscaler goes by what is asked for"
    )


def test_head_and_fleet_nodes_offer_no_places(rendered: Rendered) -> None:
    for name in ("default", "8p8d-rdma"):
        for workload in workloads(rendered(name)):
            for container in workload.containers:
                if container["command"] == ["ray"]:
                    has_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
                    assert "--num-cpus=0" in container["args"]
                    assert f"--num-gpus={int(has_gpu)}" in container["args"]


def test_generated_key_file_is_valid(rendered: Rendered) -> None:
    secret = named(rendered("default"), "Secret", "rel-baton-api-keys")["stringData"]
    keys = parse_keys(yaml.safe_load(secret["keys.yaml"]))

    assert not keys[key_digest(secret["api-key"])].is_admin
    assert keys[key_digest(secret["admin-key"])].is_admin
    assert len(keys) == 2
    assert secret["api-key"] not in secret["keys.yaml"]


@pytest.mark.parametrize("name", SETS)
def test_no_pod_gets_an_unneeded_key(rendered: Rendered, name: str) -> None:
    """The gateway gets hashes, `helm test` a client's key, and no pod the admin key."""
    given = {
        (workload.component, key)
        for workload in workloads(rendered(name))
        for kind, secret, keys in references(workload)
        if kind == "secret" and secret in (f"{fullname_of(rendered, name)}-api-keys", "keys", "baton-keys")
        for key in keys or ["all"]
    }
    expected = {("gateway", "keys.yaml"), ("test", "api-key")} if name != "no-keys" else set()

    assert given == expected
    for workload in workloads(rendered(name)):
        if workload.component == "worker":
            assert (
                not {"BATON_API_KEY", "BATON_GATEWAY", "BATON_GATEWAY_CA"}
                & environment_of(workload.container("worker")).keys()
            )


def fullname_of(rendered: Rendered, name: str) -> str:
    (config,) = (doc for doc in of_kind(rendered(name), "ConfigMap") if doc["metadata"]["name"].endswith("-config"))
    return str(config["metadata"]["name"]).removesuffix("-config")


def test_each_release_generates_its_own_keys(helm: Renderer) -> None:
    first, second = (named(helm.docs({}), "Secret", "rel-baton-api-keys")["stringData"] for _ in range(2))

    assert not set(first.values()) & set(second.values())
    assert first["keys.yaml"].splitlines()[0] != second["keys.yaml"].splitlines()[0]


def test_upgrade_keeps_generated_secrets(helm: Renderer, rendered: Rendered) -> None:
    installed = [stored(secret) for secret in of_kind(rendered("default"), "Secret")]
    upgraded = helm.upgrade_docs({}, existing=installed)

    assert [secret["data"] for secret in of_kind(upgraded, "Secret")] == [secret["data"] for secret in installed]
    assert len(installed) == 3


def stored(secret: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Secret as Kubernetes stores it."""
    texts = {name: base64.b64encode(text.encode()).decode() for name, text in secret.get("stringData", {}).items()}
    return {key: secret[key] for key in ("apiVersion", "kind", "metadata")} | {
        "data": {**secret.get("data", {}), **texts}
    }


def test_pod_restarts_only_if_its_own_settings_change(helm: Renderer, rendered: Rendered) -> None:
    def checksums(docs: Any) -> dict[str, Mapping[str, str]]:
        return {workload.name: workload.annotations for workload in workloads(docs)}

    before = checksums(rendered("default"))
    changes: dict[str, tuple[dict[str, Any], set[str]]] = {
        "the gateway's": ({"gateway": {"config": {"max_open_requests": 5}}}, {"rel-baton-gateway"}),
        "all components'": (
            {"config": {"log_level": "debug"}},
            {f"rel-baton-{name}" for name in ("gateway", "scheduler", "fleet", "worker-prefill", "worker-decode")},
        ),
        "the workers'": (
            {"fleet": {"config": {"max_num_seqs": 5}}},
            {"rel-baton-fleet", "rel-baton-worker-prefill", "rel-baton-worker-decode"},
        ),
        "more workers": ({"poolDefaults": {"replicas": 3}}, {"rel-baton-fleet"}),
        "a larger model": ({"poolDefaults": {"modelLoadSeconds": 1800}}, {"rel-baton-fleet"}),
    }
    for what, (values, expected) in changes.items():
        after = checksums(helm.docs(values))
        assert {name for name in before if before[name] != after[name]} == expected, what


def test_chart_versions_equal_those_of_the_code() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert chart["appVersion"] == baton.WITHOUT_HISTORY
    assert chart["annotations"]["baton.internal/ray-version"] == pins["ray"]
