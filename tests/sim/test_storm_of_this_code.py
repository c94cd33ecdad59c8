"""Storms whose seeds follow from the hash of the code, so that every change explores new ones."""

import logging
from collections.abc import Iterator

import pytest

from baton.sim.chaos.run import run_seed
from tests.sim.storm_seeds import drawn_seeds

pytestmark = [pytest.mark.sim, pytest.mark.slow]


@pytest.fixture(autouse=True)
def no_logs() -> Iterator[None]:
    """Keep the services from logging."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.fault("F-51")
@pytest.mark.parametrize("seed", drawn_seeds())
def test_storm_with_a_drawn_seed_breaks_no_invariant(seed: int) -> None:
    run_seed(seed)
