"""The files that hosts and editors read are valid, and name commands that exist."""

import json
import re
import sys
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import yaml

from tests.deploy.renderer import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "feature.yml")]


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("vendor.github-issue-forms", FORMS),
        ("vendor.github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
    ],
)
def test_files_for_the_host_are_valid(schema: str, files: list[Path]) -> None:
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    done = run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_hooks_are_valid() -> None:
    done = run(
        [sys.executable, "-m", "pre_commit", "validate-config", str(ROOT / ".pre-commit-config.yaml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_workflows_and_container_call_targets_of_the_makefile() -> None:
    commands = [step["run"] for workflow in WORKFLOWS for step in steps(workflow) if "run" in step]
    commands.append(json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())["postCreateCommand"])
    called = {target for command in commands for target in re.findall(r"\bmake ([a-z-]+)", command)}
    assert called == {"check", "test", "test-long", "nemesis", "setup"}
    assert called <= make_targets()


def test_workflows_may_only_read_and_end_by_themselves() -> None:
    for workflow in WORKFLOWS:
        parsed = yaml.safe_load(workflow.read_text())
        assert parsed["permissions"] == {"contents": "read"}, workflow
        assert all(job["timeout-minutes"] <= 120 for job in parsed["jobs"].values()), workflow


def test_container_has_the_ports_of_the_gateway() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert container["forwardPorts"] == [8000, 8001, 8002]
