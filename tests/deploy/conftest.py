"""Each set of values is rendered once, and shared by all tests of a process."""

from collections.abc import Callable

import pytest

from tests.deploy import renderer
from tests.deploy.renderer import Doc, Renderer
from tests.deploy.value_sets import SETS

Rendered = Callable[[str], tuple[Doc, ...]]


@pytest.fixture(scope="session")
def helm() -> Renderer:
    found = renderer.find()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(scope="session")
def chartrender() -> Renderer:
    """For what `helm template` cannot show: NOTES.txt, and what `lookup` finds."""
    found = renderer.own()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(scope="session")
def rendered(helm: Renderer) -> Rendered:
    """The objects of a set of values, by its name."""
    known: dict[str, tuple[Doc, ...]] = {}

    def render(name: str) -> tuple[Doc, ...]:
        if name not in known:
            known[name] = helm.docs(SETS[name].values, files=SETS[name].files)
        return known[name]

    return render
