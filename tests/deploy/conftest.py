"""Fixtures that render the chart. Each set of values is rendered once per process and shared by all tests."""

from collections.abc import Callable

import pytest

from tests.deploy import renderer
from tests.deploy.renderer import Doc, Renderer
from tests.deploy.value_sets import SETS

Rendered = Callable[[str], tuple[Doc, ...]]


@pytest.fixture(scope="session")
def helm() -> Renderer:
    """The renderer. Tests are skipped where Helm's library is not available."""
    found = renderer.find()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(scope="session")
def rendered(helm: Renderer) -> Rendered:
    """A function that returns the objects of a named set of values."""
    known: dict[str, tuple[Doc, ...]] = {}

    def render(name: str) -> tuple[Doc, ...]:
        if name not in known:
            known[name] = helm.docs(SETS[name].values, files=SETS[name].files)
        return known[name]

    return render
