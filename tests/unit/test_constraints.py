"""constraints.txt pins what setup installs, and pins accept the first release of all supported Pythons."""

import platform
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("embedded", "test")
"""What `make setup` installs."""
FIRST_RELEASES = tuple(
    f"3.{minor}.0" for minor in range(30) if f"3.{minor}.0" in SpecifierSet(PROJECT["requires-python"])
)
"""Distributions such as Debian keep an early release of a Python version for years."""
CUDA = re.compile(r"nvidia-|cuda-|triton$")
"""Packages of torch's builds for GPUs, of which setup takes what the chosen build of torch names."""


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = (line.partition("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version for name, _, version in found}


def installed(path: Sequence[str] | None = None) -> dict[str, Distribution]:
    found = distributions() if path is None else distributions(path=list(path))
    return {canonicalize_name(each.metadata["Name"]): each for each in found}


def refusals(packages: dict[str, Distribution]) -> list[str]:
    """Return each package that refuses a first release, with its version and the Pythons it accepts."""
    return [
        f"{name} {package.version} needs Python {accepted}"
        for name, package in packages.items()
        if (accepted := package.metadata.get("Requires-Python"))
        and not all(release in SpecifierSet(accepted) for release in FIRST_RELEASES)
    ]


def needed_names(packages: dict[str, Distribution]) -> set[str]:
    """Return the names of all packages that setup installs with any of the first releases."""
    own = [*PROJECT["dependencies"], *(text for extra in EXTRAS for text in PROJECT["optional-dependencies"][extra])]
    todo, seen = [Requirement(text) for text in own], set()
    while todo:
        one = todo.pop()
        new = {(canonicalize_name(one.name), extra) for extra in ("", *one.extras)} - seen
        seen |= new
        todo += [more for name, extra in new for more in requirements_of(packages.get(name), extra)]
    return {name for name, _ in seen}


def requirements_of(package: Distribution | None, extra: str) -> Iterator[Requirement]:
    for text in package.requires or () if package is not None else ():
        one = Requirement(text)
        if one.marker is None or any(one.marker.evaluate(environment(each, extra)) for each in FIRST_RELEASES):
            yield one


def environment(release: str, extra: str) -> dict[str, str]:
    return {"python_full_version": release, "python_version": release.rpartition(".")[0], "extra": extra}


def test_supported_pythons_are_the_classified_ones() -> None:
    classified = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text]
    assert [f"{version}.0" for version in classified] == list(FIRST_RELEASES)


def test_pinned_packages_accept_the_first_release_of_each_supported_python() -> None:
    versions = pins()
    checked = {name: one for name, one in installed().items() if versions.get(name) == one.version.partition("+")[0]}
    assert len(checked) > len(versions) / 2, "few packages have the version of constraints.txt; run `make setup`"
    assert refusals(checked) == []


def test_clients_under_test_accept_the_first_release_of_each_supported_python() -> None:
    paths = [str(path) for path in (ROOT / ".venv-clients").glob("lib/python*/site-packages")]
    if not paths:
        pytest.skip("`make clients` has not installed the clients")
    assert refusals(installed(paths)) == []


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="pins are those of Linux on x86-64"
)
def test_every_package_that_setup_installs_is_pinned_and_no_other() -> None:
    needed, pinned = needed_names(installed()), set(pins())
    assert sorted(name for name in needed - pinned if not CUDA.match(name)) == []
    assert sorted(pinned - needed) == []
