"""Runs each process of a cluster on a machine of its own in a `FaultyNetwork`. Needs root."""

from pathlib import Path

from baton.store.redis.private_redis import RedisCommand, redis_command
from tests.cluster_network import ClusterNetwork, Place
from tests.integration.transfer.faulty_network import Faults, FaultyNetwork
from tests.netns import Netns, tool

HTTP_PORT, GRPC_PORT, RPC_PORT, ADMIN_PORT = 8000, 8001, 9000, 9100
KV_PORTS = (20_000, 20_999)
"""Ports of KV reads, so that a fault can hit only the data path."""


class FaultyLinks(ClusterNetwork):
    """Implements `ClusterNetwork` on a running `FaultyNetwork`, to which this process is connected."""

    def __init__(self, network: FaultyNetwork, *names: str) -> None:
        """`names`: the processes of the cluster."""
        self.network = network
        self._machines = {name: network.add() for name in names}
        network.join_this_process()

    def place(self, name: str) -> Place:
        machine = self._machines[name]
        ports = {} if name.startswith("gateway") else {"rpc_port": RPC_PORT}
        return Place(
            settings={
                "host": machine.address,
                "admin_port": ADMIN_PORT,
                "kv_port_range": f"{KV_PORTS[0]}-{KV_PORTS[1]}",
                **ports,
            },
            argv=(tool("ip"), "netns", "exec", machine.name),
            environ={"UCX_TLS": "tcp"},  # the processes share a kernel, so that UCX would use shared memory
        )

    def redis(self, directory: Path) -> RedisCommand:
        machine = self._machines["redis"]
        return machine.call(lambda: redis_command(directory, host=machine.address))

    def client_ports(self, name: str) -> tuple[str, int, int]:
        return self._machines[name].address, HTTP_PORT, GRPC_PORT

    def machine(self, name: str) -> Netns:
        """Return the machine of a process."""
        return self._machines[name]

    def set_data_path(self, a: str, b: str, faults: Faults | None) -> None:
        """Set the faults of KV reads between two workers; None: those of the network."""
        self.network.set_link(self._machines[a].address, self._machines[b].address, faults)
