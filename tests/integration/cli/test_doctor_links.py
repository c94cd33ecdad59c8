"""The ways of moving KV as `baton doctor` tries them: between two real processes."""

import sys

import pytest

from baton.fleet.doctor.doctor_links import measure

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "way",
    ["local", pytest.param("nixl", marks=pytest.mark.skipif(sys.platform != "linux", reason="NIXL is for Linux"))],
)
def test_a_way_is_measured_between_two_processes(way: str) -> None:
    found = measure(way)
    assert found.problem == ""
    assert found.transport
    assert found.bytes_per_s > 0


def test_a_way_that_there_is_not_is_a_problem_in_words() -> None:
    assert "carrier-pigeon" in measure("carrier-pigeon").problem
