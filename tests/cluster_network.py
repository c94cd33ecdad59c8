"""Addresses of the processes of a test cluster: on the loopback interface, or on simulated machines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.store.redis.private_redis import RedisCommand, redis_command
from tests.free_port import free_port

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place in which one process runs.

    settings: settings of the service that depend on the place, such as its address.
    argv: words before its command line, such as those that enter a network namespace.
    environ: environment variables in addition to those of this process.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


class ClusterNetwork:
    """Runs all processes at 127.0.0.1, which is what most tests need. Subclasses separate the processes."""

    def place(self, name: str) -> Place:
        """Return the place of a process. It is the same after each restart."""
        return Place()

    def redis(self, directory: Path) -> RedisCommand:
        """Return the command of the cluster's Redis."""
        return redis_command(directory)

    def client_ports(self, name: str) -> tuple[str, int, int]:
        """Choose (host, HTTP port, gRPC port) of a gateway."""
        http_port, grpc_port = (free_port(HOST) for _ in range(2))
        return HOST, http_port, grpc_port

    async def aclose(self) -> None:
        """Release what the network needs, after all processes have ended."""
