"""The output of `helm install`, and the program of `helm test`."""

import ast
import re
import shlex

import pytest
import yaml

from tests.deploy.conftest import Rendered
from tests.deploy.objects import named
from tests.deploy.renderer import Renderer
from tests.deploy.test_config import parse_command
from tests.deploy.value_sets import SETS


def notes(helm: Renderer, name: str) -> str:
    return helm.notes(SETS[name].values, files=SETS[name].files)


@pytest.mark.parametrize("name", SETS)
def test_notes_contain_a_first_request(helm: Renderer, name: str) -> None:
    text = notes(helm, name)

    assert "/v1/completions" in text
    assert "<no value>" not in text
    assert ("BATON_API_KEY=$(kubectl" in text) == (SETS[name].values.get("apiKeys", {}).get("enabled", True))


@pytest.mark.parametrize("name", SETS)
def test_status_command_connects_to_localhost_in_the_pod(helm: Renderer, name: str) -> None:
    """The name in the certificate is verified, but need not resolve to the pod."""
    (command,) = re.findall(r"baton status [^']*", notes(helm, name))
    arguments = shlex.split(re.sub(r"\$\(.*?\)", "system", command))[1:]
    parse_command(arguments)
    assert arguments[arguments.index("--gateway") + 1].startswith("localhost:")
    assert ("--gateway-name" in arguments) == SETS[name].values.get("frontTls", {}).get("enabled", False)


def test_notes_of_the_defaults_list_changes_for_production(helm: Renderer) -> None:
    text = notes(helm, "default")
    for value in (
        "config.model",
        "redis.existingSecret",
        "apiKeys.existingSecret",
        "tls.enabled",
        "gateway.replicas",
        "ray.gcsFaultTolerance",
    ):
        assert f"- {value}" in text


def test_notes_of_a_production_setup_list_no_changes(helm: Renderer) -> None:
    assert "Change before production" not in notes(helm, "8p8d-rdma")


def test_notes_warn_about_gpus_without_rdma(helm: Renderer) -> None:
    assert "KV is transferred over TCP" in notes(helm, "gpu-node")
    assert "KV is transferred over TCP" not in notes(helm, "8p8d-rdma")


def test_helm_test_is_valid_python(rendered: Rendered) -> None:
    pod = named(rendered("front-tls"), "Pod", "rel-baton-test")
    (container,) = pod["spec"]["containers"]
    ast.parse(container["args"][0])
    names = {variable["name"] for variable in container["env"]}

    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert names >= {"HOST", "PORT", "TLS_NAME", "MODEL", "BATON_API_KEY"}


def test_requests_use_the_served_model_name(rendered: Rendered) -> None:
    (container,) = named(rendered("8p8d-rdma"), "Pod", "rel-baton-test")["spec"]["containers"]
    model = next(variable["value"] for variable in container["env"] if variable["name"] == "MODEL")
    config = yaml.safe_load(named(rendered("8p8d-rdma"), "ConfigMap", "rel-baton-config")["data"]["gateway.yaml"])

    assert model == config["served_model_name"] == "llama3-8b"
