"""The wheel works outside of the checkout: in an empty environment, another directory and an empty home."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

import baton
from baton.model.kernels.cpu.kernel_build import KernelsUnavailable
from baton.model.kernels.cpu.kernel_build import build as build_kernels
from tests.scale import IS_LONG

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "What does os.path.join do?"
pytest.importorskip("setuptools_scm", reason="setuptools-scm builds the wheel: run `make setup`")


def build(source: Path, out: Path, **environment: str) -> Path:
    """Build the wheel of a source tree without an index, and return it."""
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(out)!r}))"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SETUPTOOLS_SCM_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=source, env={**clean, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def git(directory: Path, *arguments: str) -> str:
    own = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *own, *arguments], cwd=directory, capture_output=True, text=True, check=True)
    return done.stdout


def tracked_files() -> list[str]:
    """Return the files of both packages, as the wheel names them."""
    found = git(ROOT, "ls-files", "services/baton", "loadgen").splitlines()
    return [name.removeprefix("services/") for name in found]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files, without git history: building in the checkout would write into it."""
    directory = tmp_path_factory.mktemp("source")
    names = [*git(ROOT, "ls-files", "services", "loadgen").splitlines(), "pyproject.toml", "README.md", "LICENSE"]
    for name in names:
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes((ROOT / name).read_bytes())
    return directory


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("dist"), SETUPTOOLS_SCM_PRETEND_VERSION_FOR_BATON_SERVE="9.8.7")


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the wheel. Only its dependencies come from this one."""
    directory = tmp_path_factory.mktemp("environment")
    python = directory / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    # A path in a .pth file makes packages importable, and does not run the .pth files there: so not the
    # editable installation of the checkout.
    here = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(here))
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    return directory


def run(environment: Path, directory: Path, *command: str) -> str:
    """Run a program of the environment in another directory, as a user without caches and settings."""
    home = directory / "home"
    home.mkdir(exist_ok=True)
    settings = {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "HOME": str(home), "COLUMNS": "100"}
    done = subprocess.run(command, cwd=directory, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def give_kernels(home: Path) -> list[str]:
    """Copy the compiled kernels of the checkout to the cache of a user, and return their file name, if any.

    The name contains a hash of the sources: only a wheel with the same ones uses the file.
    """
    cache = home / ".cache" / "baton" / "kernels"
    cache.mkdir(parents=True)
    try:
        return [Path(shutil.copy(build_kernels(), cache)).name]
    except KernelsUnavailable:
        return []


def test_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    """Kernel sources, the demo model with its licence, the report's scripts, and the version."""
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert [name for name in tracked_files() if name not in packed and (ROOT / "services" / name).exists()] == []
    assert {"baton/version.txt", "baton/demo/model.safetensors", "baton/demo/LICENSE", "baton/py.typed"} <= packed


def test_installed_cluster_answers_from_another_directory(environment: Path, tmp_path: Path) -> None:
    where = "import baton, loadgen; print(baton.__file__, loadgen.__file__)"
    assert all(path.startswith(str(environment)) for path in run(environment, tmp_path, "python", "-c", where).split())
    assert run(environment, tmp_path, "baton", "--version") == "baton 9.8.7\n"
    assert "capacity" in run(environment, tmp_path, "loadgen", "--help")
    # One thread: on a busy machine, two threads wait for each other in each step of the backend's verification.
    sized = ["--prefill", "0", "--decode", "0", "--hybrid", "1", "--threads-per-worker", "1"]
    sized += ["--kv-memory", "64MiB", "--max-model-len", "1024", "--http-port", "0", "--grpc-port", "0"]
    given = [] if IS_LONG else give_kernels(tmp_path / "home")
    output = run(environment, tmp_path, "baton", "up", "--first-prompt", QUESTION, "--once", *sized)
    assert "Join two or more" in output
    kernels = [path.name for path in (tmp_path / "home").rglob("kernels-*.so")]
    assert kernels or "native decoder" not in output, "kernels are compiled at the first start"
    assert IS_LONG or kernels == given, "the wheel has the kernel sources of the checkout"


@pytest.mark.parametrize(
    ("tags", "commits_after", "version"),
    [
        (["v0.2.0"], 0, r"0\.2\.0"),
        (["v0.2.0"], 2, r"0\.2\.1\.dev2\+g\w+"),
        ([], 0, r"0\.1\.0\.dev1\+g\w+"),
        (None, 0, re.escape(baton.WITHOUT_HISTORY)),
    ],
    ids=["at a tag", "after a tag", "without a tag", "without history"],
)
def test_version_follows_from_the_git_tags(
    tmp_path: Path, tags: list[str] | None, commits_after: int, version: str
) -> None:
    tree = tmp_path / "tree"
    (tree / "services/baton").mkdir(parents=True)
    (tree / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tree / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    if tags is not None:
        git(tree, "init", "--quiet")
        git(tree, "add", "-A")
        git(tree, "commit", "--quiet", "--allow-empty", "-m", "first")
        for tag in tags:
            git(tree, "tag", tag)
        for number in range(commits_after):
            git(tree, "commit", "--quiet", "--allow-empty", "-m", str(number))
    found = subprocess.run(
        [sys.executable, "-m", "setuptools_scm"], cwd=tree, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert re.fullmatch(version, found), found
    assert Version(found) < Version("9")


def test_fallback_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools_scm"]["fallback_version"] == baton.WITHOUT_HISTORY
