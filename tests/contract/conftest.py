"""Fixtures that several contract suites share."""

from collections.abc import AsyncIterator, Iterator

import pytest

import baton.rpc  # noqa: F401 - before grpc is loaded
from tests.contract.networks import HARNESSES, NetworkHarness, open_harness
from tests.redis_server import RunningRedis, running_redis


@pytest.fixture(scope="session")
def redis() -> Iterator[RunningRedis]:
    """Start one server for all tests. Each test uses the keys of its own cluster."""
    with running_redis() as server:
        yield server


@pytest.fixture(params=HARNESSES)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[NetworkHarness]:
    async with open_harness(request.param) as harness:
        yield harness
