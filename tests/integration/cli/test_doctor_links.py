"""`baton doctor` measures transfer backends between two real processes."""

import sys

import pytest

from baton.fleet.doctor.doctor_links import measure

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "backend",
    [
        "local",
        pytest.param("collective", marks=pytest.mark.long),
        pytest.param("nixl", marks=pytest.mark.skipif(sys.platform != "linux", reason="NIXL is for Linux")),
    ],
)
def test_backend_is_measured_between_two_processes(backend: str) -> None:
    result = measure(backend)
    assert result.problem == ""
    assert result.transport
    assert result.bytes_per_s > 0


def test_unknown_backend_is_named_in_the_problem() -> None:
    assert "unknown-backend" in measure("unknown-backend").problem
