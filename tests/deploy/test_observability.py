"""Prometheus and Grafana beside `baton up`: valid files, mounted where the programs look for them."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.dashboard_queries import FILE, dashboard
from tests.deploy.renderer import ROOT

DIRECTORY = ROOT / "deploy" / "observability"
COMPOSE = [DIRECTORY / "compose.yaml", ROOT / "deploy" / "compose.yaml"]


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def mounts(service: str) -> dict[str, Path]:
    """Return the files and directories that a service mounts, by their path in the container."""
    volumes = [volume.split(":") for volume in read(COMPOSE[0])["services"][service]["volumes"]]
    return {volume[1]: (DIRECTORY / volume[0]).resolve() for volume in volumes if volume[0].startswith(".")}


def test_compose_files_are_valid_by_their_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *map(str, COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_programs_find_what_their_configuration_names() -> None:
    prometheus, grafana = mounts("prometheus"), mounts("grafana")
    assert all(path.exists() for path in (*prometheus.values(), *grafana.values()))
    (rules,) = read(prometheus["/etc/prometheus/prometheus.yaml"])["rule_files"]
    assert [*prometheus[str(Path(rules).parent)].glob(Path(rules).name)]
    (provider,) = read(grafana["/etc/grafana/provisioning/dashboards"] / "baton.yaml")["providers"]
    assert grafana[provider["options"]["path"]] == FILE.parent
    home = read(COMPOSE[0])["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert grafana[str(Path(home).parent)] / Path(home).name == FILE


def test_dashboard_finds_its_data_source() -> None:
    (source,) = read(mounts("grafana")["/etc/grafana/provisioning/datasources"] / "prometheus.yaml")["datasources"]
    (variable,) = [each for each in dashboard()["templating"]["list"] if each["type"] == "datasource"]
    assert source["type"] == variable["query"] == "prometheus"
    assert source["isDefault"]
    command = read(COMPOSE[0])["services"]["prometheus"]["command"]
    assert f"--web.listen-address={source['url'].removeprefix('http://')}" in command


def test_only_the_loopback_serves_and_a_login_does_not_exist() -> None:
    services = read(COMPOSE[0])["services"]
    assert not any("ports" in service for service in services.values())
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert services["grafana"]["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert services["grafana"]["environment"]["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert all(service["cap_drop"] == ["ALL"] and service["read_only"] for service in services.values())


def test_prometheus_accepts_its_configuration() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(
        [promtool, "check", "config", "--syntax-only", str(DIRECTORY / "prometheus.yaml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
