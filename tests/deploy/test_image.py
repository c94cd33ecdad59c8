"""Tests the files of the image everywhere. Builds and runs it where a container tool is installed.

`BASE` and `TORCH_INDEX_URL` in the environment go to the build, for machines without the defaults.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from baton.runtime.config.settings import ClusterConfig
from tests.deploy.renderer import ROOT
from tests.deploy.test_config import parse_command
from tools import gen_image_lock

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
LOCK = ROOT / "deploy" / "requirements.lock"
COMPOSE = ROOT / "deploy" / "compose.yaml"
TAG = "baton-test:cpu"
BUILD_LIMIT_S, RUN_LIMIT_S = 3000.0, 600.0


def instructions() -> list[tuple[str, str]]:
    """Yield (instruction, arguments), with continued lines joined and comments removed."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [
        (word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word
    ]


def stages() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (base, instructions) of each stage."""
    found: list[tuple[str, list[tuple[str, str]]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append((rest, []))
        elif found:
            found[-1][1].append((word, rest))
    return found


def test_every_stage_has_a_known_base() -> None:
    names = {"${BASE}", "${VARIANT}"}
    for source, _ in stages():
        base, *named = source.split(" AS ")
        assert base in names, source
        names |= set(named)
    defaults = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG" and "=" in rest)
    assert {"cpu", "cuda"} <= names
    assert defaults["VARIANT"] == "cpu"
    assert re.fullmatch(r"python:3\.1[123]-slim-\w+", defaults["BASE"])


def test_copied_files_exist_and_are_not_ignored() -> None:
    left_in = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")
    }
    copied = set()
    for _, steps in stages():
        for word, rest in steps:
            if word == "COPY" and "--from=" not in rest:
                *sources, _ = [part for part in rest.split() if not part.startswith("--")]
                copied |= set(sources)
    assert copied == left_in
    assert all((ROOT / source).exists() for source in copied)


def test_image_runs_as_another_user_than_root_in_small_layers() -> None:
    _, last = stages()[-1]
    said = dict(last)
    assert said["USER"] == "10001:10001"
    assert json.loads(said["ENTRYPOINT"]) == ["tini", "--", "baton"]
    assert "HEALTHCHECK" in said
    parse_command(json.loads(said["CMD"]))
    for _, steps in stages():
        for word, rest in steps:
            assert word != "ADD"
            if "apt-get install" in rest:
                assert "--no-install-recommends" in rest
                assert "rm -rf /var/lib/apt/lists" in rest
            if "pip install" in rest:
                assert "--no-cache-dir" in rest
                assert "--constraint constraints.txt" in rest or "--require-hashes" in rest


def test_default_command_serves_on_the_loopback_only() -> None:
    _, last = stages()[-1]
    command = json.loads(dict(last)["CMD"])
    assert command == ["up"]
    assert ClusterConfig().host == "127.0.0.1"


def test_base_image_can_be_pinned_by_digest() -> None:
    bases = {source.partition(" AS ")[0] for source, _ in stages()}
    before_first_stage = [rest for word, rest in instructions() if word == "ARG"][:2]
    assert "${BASE}" in bases
    assert not any(":" in base or "/" in base for base in bases), "every image comes from a build argument"
    assert any(rest.startswith("BASE=") for rest in before_first_stage)


def test_locked_packages_have_hashes_and_the_versions_of_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    needed = gen_image_lock.with_transitive(gen_image_lock.requirements())
    assert gen_image_lock.problems(LOCK.read_text(encoding="utf-8"), needed, constraints) == []


@pytest.mark.parametrize("name", ["h11", "idna", "setuptools"])
def test_lock_without_a_package_that_another_one_needs_is_refused(name: str) -> None:
    entries = list(gen_image_lock.entries(LOCK.read_text(encoding="utf-8")))
    lock = "\n".join(entry for entry in entries if not entry.startswith(f"{name}=="))
    needed = gen_image_lock.with_transitive(gen_image_lock.requirements())
    assert gen_image_lock.problems(lock, needed, "") == [f"{name} is missing"]


def test_everything_but_torch_is_installed_from_the_lock() -> None:
    installs = [step for _, steps in stages() for word, step in steps if word == "RUN" and "pip install" in step]
    locked, torch, own = installs
    assert "--require-hashes" in locked
    assert torch.split(";")[0].endswith(" torch")
    assert {"--no-deps", "--no-build-isolation"} <= set(own.split())


@pytest.mark.parametrize(
    ("lock", "problem"),
    [
        ("", "click is missing"),
        (f"click==8.5.0 \\\n    --hash=sha256:{'0' * 64}", "click is 8.5.0, constraints.txt says 8.5.1"),
        ("click==8.5.1", "click has no version or no sha256 hash"),
        (f"torch==2.13.0 \\\n    --hash=sha256:{'0' * 64}", "torch must not be locked"),
        ("--index-url https://index.example.com", "it has an address"),
    ],
)
def test_problem_of_a_lock_is_named(lock: str, problem: str) -> None:
    assert problem in gen_image_lock.problems(lock, ["click>=8.4"], "click==8.5.1\n")


def test_writable_paths_of_pods_are_image_volumes() -> None:
    _, last = stages()[-1]

    assert json.loads(dict(last)["VOLUME"]) == ["/tmp", "/var/cache/baton"]


def test_compose_file_uses_existing_commands() -> None:
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    for name, service in services.items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        if name != "redis":
            parse_command(service["command"])
    assert {service["command"][0] for service in services.values()} == {
        "valkey-server",
        "scheduler",
        "worker",
        "gateway",
    }
    assert all(port.startswith("127.0.0.1:") for port in services["gateway"]["ports"])
    assert [name for name, service in services.items() if "ports" in service] == ["gateway"]


def test_compose_builds_the_image_if_there_is_none() -> None:
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    builds = [service["build"] for name, service in services.items() if name != "redis"]
    assert all(build == builds[0] for build in builds)
    assert (COMPOSE.parent / builds[0]["context"]).resolve() == ROOT
    assert ROOT / builds[0]["dockerfile"] == DOCKERFILE
    declared = {rest.partition("=")[0] for word, rest in instructions() if word == "ARG"}
    assert builds[0]["args"].keys() <= declared


def test_image_file_passes_its_linter() -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if linter is None:
        pytest.skip("hadolint is not installed: run `make setup`")
    done = subprocess.run([linter, "--no-color", str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A program that builds and runs images: `docker` with a running engine, `podman`, or `buildah`."""

    program: str

    @property
    def is_buildah(self) -> bool:
        return Path(self.program).name == "buildah"

    def build(self) -> None:
        arguments = [
            f"--build-arg={name}={os.environ[name]}" for name in ("BASE", "TORCH_INDEX_URL") if name in os.environ
        ]
        isolation = ["--isolation", "chroot", "--network", "host"] if self.is_buildah else []
        self._call(["build", *isolation, *arguments, "-f", str(DOCKERFILE), "-t", TAG, str(ROOT)], BUILD_LIMIT_S)

    def run(self, *command: str, entrypoint: str = "") -> str:
        """Return the output of a command, run read-only, without a network, as the image's user."""
        if not self.is_buildah:
            own = ["--entrypoint", entrypoint] if entrypoint else []
            return self._call(
                ["run", "--rm", "--read-only", "--network", "none", "--shm-size", "1g", *own, TAG, *command],
                RUN_LIMIT_S,
            )
        container = self._call(["from", TAG], RUN_LIMIT_S).strip()
        try:
            program = [entrypoint] if entrypoint else ["tini", "--", "baton"]
            return self._call(
                [
                    "run",
                    "--isolation",
                    "chroot",
                    "--network",
                    "none",
                    "--user",
                    "10001:10001",
                    container,
                    "--",
                    *program,
                    *command,
                ],
                RUN_LIMIT_S,
            )
        finally:
            self._call(["rm", container], RUN_LIMIT_S)

    def _call(self, arguments: list[str], limit_s: float) -> str:
        done = subprocess.run([self.program, *arguments], capture_output=True, text=True, timeout=limit_s)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout


def _engine() -> Engine | None:
    if buildah := shutil.which("buildah"):
        return Engine(program=buildah)
    for program in filter(None, map(shutil.which, ("docker", "podman"))):
        if subprocess.run([program, "version"], capture_output=True, timeout=30).returncode == 0:
            return Engine(program=program)
    return None


@pytest.fixture(scope="module")
def engine() -> Engine:
    found = _engine()
    if found is None:
        pytest.skip("image: no buildah or podman, and no docker with a running engine")
    found.build()
    return found


@pytest.mark.long
@pytest.mark.timeout(BUILD_LIMIT_S + 2 * RUN_LIMIT_S)
def test_image_serves_without_network_root_and_writable_root_file_system(engine: Engine) -> None:
    answer = engine.run("up", "--first-prompt", "What does os.path.join do?", "--once")

    assert "os.path.join" in answer


@pytest.mark.long
@pytest.mark.timeout(BUILD_LIMIT_S + 2 * RUN_LIMIT_S)
def test_image_has_no_root_user_and_no_installer(engine: Engine) -> None:
    said = engine.run(
        "-c",
        "import os, shutil as s; from importlib import util; "
        "print(os.getuid(), s.which('pip'), util.find_spec('pip'), s.which('g++'))",
        entrypoint="python3",
    )

    assert said.split() == ["10001", "None", "None", "/usr/bin/g++"]
