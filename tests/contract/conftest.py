"""What several contract suites need."""

from collections.abc import Iterator

import pytest

import baton.rpc  # noqa: F401 - before grpc is loaded
from tests.redis_server import RunningRedis, running_redis


@pytest.fixture(scope="session")
def redis() -> Iterator[RunningRedis]:
    """One server for all tests; each uses keys of a cluster of its own."""
    with running_redis() as server:
        yield server
