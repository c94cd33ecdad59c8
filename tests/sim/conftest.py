"""Fixtures of the simulation's tests."""

import gc
from collections.abc import Iterator

import pytest

YOUNG_OBJECTS = 50_000
"""New objects after which garbage is collected. With Python's 700, collections take a tenth of a storm."""


@pytest.fixture(scope="module", autouse=True)
def few_collections() -> Iterator[None]:
    """Collect garbage less often: a simulation creates many objects and leaves few in cycles."""
    threshold = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *threshold[1:])
    yield
    gc.set_threshold(*threshold)
