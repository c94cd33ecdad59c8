"""Commands, variables and files that the containers of the chart get."""

import sys

import pytest
import trustme

from tests.deploy.conftest import Rendered
from tests.deploy.objects import named
from tests.deploy.rehearsal.cluster import issued
from tests.deploy.rehearsal.pods import Files, Pod, Scratch, image_environ, pod_of, secret
from tests.deploy.rehearsal.values import RAY_REDIS_PASSWORD, VALUES
from tests.deploy.renderer import Doc, Renderer

ADDRESS = "10.0.0.9"


@pytest.fixture(scope="module")
def docs(helm: Renderer) -> list[Doc]:
    rendered = helm.docs(VALUES)
    return [*rendered, *issued(rendered, trustme.CA())]


def pod(docs: list[Doc], part: str) -> Pod:
    name = f"rel-baton-{part}"
    return pod_of(named(docs, "Deployment", name)["spec"]["template"], docs, name=f"{name}-1", address=ADDRESS)


def test_variables_come_from_fields_secrets_and_earlier_variables(docs: list[Doc]) -> None:
    (gateway,) = pod(docs, "gateway").containers
    password = secret(docs, "rel-baton-redis")["password"].decode()

    assert gateway.argv == ("baton", "gateway", "--config", "/etc/baton/config/gateway.yaml")
    assert gateway.environ["BATON_ADVERTISE_HOST"] == ADDRESS
    assert gateway.environ["BATON_REDIS_URL"] == f"redis://:{password}@rel-baton-redis:6379/0"
    assert gateway.environ["PATH"] == "/opt/baton/bin:/usr/local/bin:/usr/bin:/bin"
    assert gateway.environ.items() >= {"RAY_USAGE_STATS_ENABLED": "0", "HOME": "/tmp"}.items()


def test_commands_expand_variables(docs: list[Doc]) -> None:
    (head,) = pod(docs, "ray-head").containers

    assert f"--node-ip-address={ADDRESS}" in head.argv
    assert f"--redis-password={RAY_REDIS_PASSWORD}" in head.argv
    assert not [word for word in head.argv if "$" in word]


def test_shell_variables_are_not_expanded(docs: list[Doc]) -> None:
    (redis,) = pod(docs, "redis").containers

    assert '"$REDIS_PASSWORD"' in redis.argv[2]
    assert secret(docs, "rel-baton-redis")["password"].decode() not in redis.argv


def test_volumes_become_files_and_scratch_directories(docs: list[Doc]) -> None:
    gateway = pod(docs, "gateway")
    volumes = {volume.path: volume for volume in gateway.volumes}
    keys, tls, tmp = volumes["/etc/baton/api-keys"], volumes["/etc/baton/tls"], volumes["/tmp"]

    assert isinstance(keys, Files)
    assert isinstance(tls, Files)
    assert keys.contents == {"keys.yaml": secret(docs, "rel-baton-api-keys")["keys.yaml"]}
    assert keys.mode == 0o440
    assert tls.contents.keys() == {"tls.crt", "tls.key", "ca.crt"}
    assert tmp == Scratch(path="/tmp", max_bytes=2 * 2**30)
    assert (gateway.user, gateway.group, gateway.grace_s, gateway.shares_processes) == (10001, 10001, 75, False)


def test_sidecars_probes_and_hooks_are_resolved(docs: list[Doc]) -> None:
    fleet, worker = pod(docs, "fleet"), pod(docs, "worker-decode")
    (node,) = fleet.sidecars
    (container,) = worker.containers

    assert fleet.shares_processes
    assert node.startup is not None
    assert node.startup["tcpSocket"] == {"port": 6381}
    assert container.readiness is not None
    assert container.readiness["httpGet"] == {"path": "/ready", "port": 9000}
    assert container.pre_stop is not None
    assert container.pre_stop[:2] == ("baton", "drain")


def test_missing_object_or_key_raises(docs: list[Doc]) -> None:
    without = [doc for doc in docs if doc["metadata"]["name"] != "rel-baton-tls" or doc["kind"] != "Secret"]

    with pytest.raises(KeyError, match="there is no Secret rel-baton-tls"):
        pod(without, "gateway")


def test_certificates_are_issued_for_the_requested_names(rendered: Rendered) -> None:
    made = {doc["metadata"]["name"]: doc["data"].keys() for doc in issued(rendered("all-on"), trustme.CA())}

    assert made == {name: {"tls.crt", "tls.key", "ca.crt"} for name in ("rel-baton-tls", "rel-baton-front-tls")}


def test_environment_of_the_image_is_read_from_the_dockerfile() -> None:
    environ = image_environ()

    assert environ["XDG_CACHE_HOME"] == "/var/cache/baton"
    assert environ["PYTHONDONTWRITEBYTECODE"] == "1"
    assert sys.prefix not in environ["PATH"]
