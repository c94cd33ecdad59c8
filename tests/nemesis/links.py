"""Networks whose links between two processes can be cut.

Between processes of one machine, a proxy stands in front of each scheduler and worker, and drops nothing but
delivers nothing either while a link is cut. In network namespaces, packets are lost.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from baton.store.redis.private_redis import RedisCommand, redis_command
from tests.cluster_network import HOST, ClusterNetwork, Place
from tests.free_port import free_port
from tests.netns import Netns, Network, tool, unavailable_reason

CHUNK_BYTES = 64 * 1024
HTTP_PORT, GRPC_PORT, RPC_PORT, ADMIN_PORT, REDIS_PORT = 8000, 8001, 9000, 9100, 6379
_CLIENT_NUMBER = 250
HTTP2_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What an HTTP/2 client sends first: preface and empty settings. A server answers with its own settings."""


class CuttableNetwork(Protocol):
    """A `ClusterNetwork` whose links can be cut in both directions, and healed."""

    def cut(self, a: str, b: str) -> None:
        """Cut the link between two processes."""
        ...

    def heal(self, a: str, b: str) -> None:
        """Undo `cut`."""
        ...

    async def passes(self, a: str, b: str, within_s: float) -> bool:
        """Open a connection between two processes. Return True if an answer comes within `within_s`."""
        ...

    def strangers(self) -> list[str]:
        """Return connections that a cut would not have held back, because their process is not known."""
        ...

    def metrics_address(self, name: str) -> str:
        """Return `HOST:PORT` of a process's metrics."""
        ...


class Gate:
    """Lets bytes of one link pass, or holds them back."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self._is_open.set()

    def close(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    async def passed(self) -> None:
        """Wait until the gate is open."""
        await self._is_open.wait()


class LoopbackLinks(ClusterNetwork):
    """All processes on the loopback interface, each scheduler and worker behind a proxy.

    A service listens at 127.0.0.1 and advertises an address of its own in 127.0.0.0/8, at which the proxy
    listens. The proxy knows the process that connects by its source address, which `preloaded.c` sets. KV
    that is read from shared memory does not pass the proxy; the messages about it do.
    """

    def __init__(self, environs: Mapping[str, Mapping[str, str]]) -> None:
        """`environs`: environment variables by process, which must load `preloaded.c`."""
        base = f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self._inside = {name: f"{base}.{100 + number}" for number, name in enumerate(environs)}
        self._outside = {name: f"{base}.{1 + number}" for number, name in enumerate(environs)}
        self._environs = environs
        self._places: dict[str, Place] = {}
        self._ports: dict[str, int] = {}  # of the proxies
        self._gates: dict[frozenset[str], Gate] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: set[str] = set()

    async def open(self, names: tuple[str, ...]) -> None:
        """Open a proxy for each of these processes."""
        for name in names:
            port = free_port(HOST)
            self._ports[name] = port
            self._servers.append(await asyncio.start_server(self._accept(name, port), self._outside[name], port))
            self._places[name] = self._new_place(name, rpc_port=port, advertise_host=self._outside[name])

    def place(self, name: str) -> Place:
        if name == "redis":
            return Place()
        if name not in self._places:
            self._places[name] = self._new_place(name)
        return self._places[name]

    def _new_place(self, name: str, **settings: str | int) -> Place:
        return Place(
            settings={"admin_port": free_port(HOST), **settings},
            environ={**self._environs[name], "SOURCE_ADDRESS": self._inside[name]},
        )

    def metrics_address(self, name: str) -> str:
        return f"{HOST}:{self.place(name).settings['admin_port']}"

    def cut(self, a: str, b: str) -> None:
        self._gate(a, b).close()

    def heal(self, a: str, b: str) -> None:
        self._gate(a, b).open()

    async def passes(self, a: str, b: str, within_s: float) -> bool:
        """One of the two must be a worker or scheduler. The connection comes from the other one's address."""
        server, client = (a, b) if a in self._ports else (b, a)
        try:
            async with asyncio.timeout(within_s):
                reader, writer = await asyncio.open_connection(
                    self._outside[server], self._ports[server], local_addr=(self._inside[client], 0)
                )
                try:
                    writer.write(HTTP2_BEGIN)
                    return bool(await reader.read(1))
                finally:
                    writer.transport.abort()
        except OSError:  # TimeoutError, too
            return False

    def strangers(self) -> list[str]:
        return sorted(self._strangers)

    async def aclose(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _gate(self, a: str, b: str) -> Gate:
        return self._gates.setdefault(frozenset((a, b)), Gate())

    def _accept(self, name: str, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.get_running_loop().create_task(self._serve(name, port, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return accept

    async def _serve(self, name: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = writer.get_extra_info("peername")[0]
        client = next((n for n, address in self._inside.items() if address == source), "")
        if not client:
            self._strangers.add(f"{name} was reached from {source}, which is the address of no process")
        gate = self._gate(name, client)
        behind: asyncio.StreamWriter | None = None
        try:
            await gate.passed()
            behind_reader, behind = await asyncio.open_connection(HOST, port)
            await asyncio.gather(_pass_on(reader, behind, gate), _pass_on(behind_reader, writer, gate))
        except OSError:
            pass
        finally:
            for each in (writer, behind):
                if each is not None:
                    each.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: Gate) -> None:
    """Copy bytes until the end. Also the end of a stream, and an error of its sender, wait for the gate."""
    try:
        while True:
            chunk = await reader.read(CHUNK_BYTES)
            await gate.passed()
            if not chunk:
                break
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()
    except OSError:
        await gate.passed()
        writer.transport.abort()


class NamespaceLinks(ClusterNetwork):
    """Each process on a simulated machine with a network of its own. Needs root.

    The processes share a kernel, so UCX is told to use TCP instead of shared memory.
    """

    def __init__(self, names: tuple[str, ...], environs: Mapping[str, Mapping[str, str]]) -> None:
        """`environs`: further environment variables by process."""
        self._environs = environs
        self._stack = ExitStack()
        number = os.getpid() % 60_000
        with ExitStack() as stack:
            network = Network(f"10.{200 + number // 256 % 50}.{number % 256}", stack)
            self._machines = {name: network.add() for name in names}
            network.join_this_process(_CLIENT_NUMBER)
            self._stack = stack.pop_all()

    def place(self, name: str) -> Place:
        machine = self._machines[name]
        ports = {} if name.startswith("gateway") else {"rpc_port": RPC_PORT}
        return Place(
            settings={"host": machine.address, "admin_port": ADMIN_PORT, **ports},
            # Unlike `nsenter`, it mounts the /sys of the namespace, where UCX finds the network devices.
            argv=(tool("ip"), "netns", "exec", machine.name),
            environ={"UCX_TLS": "tcp", **self._environs.get(name, {})},
        )

    def redis(self, directory: Path) -> RedisCommand:
        machine = self._machines["redis"]
        return machine.call(lambda: redis_command(directory, host=machine.address))

    def client_ports(self, name: str) -> tuple[str, int, int]:
        return self._machines[name].address, HTTP_PORT, GRPC_PORT

    def metrics_address(self, name: str) -> str:
        return f"{self._machines[name].address}:{ADMIN_PORT}"

    def cut(self, a: str, b: str) -> None:
        for here, there in self._both_directions(a, b):
            here.drop_packets_to(there.address)

    def heal(self, a: str, b: str) -> None:
        for here, there in self._both_directions(a, b):
            here.deliver_packets_to(there.address)

    async def passes(self, a: str, b: str, within_s: float) -> bool:
        here, there = self._machines[a], self._machines[b]

        def connect() -> bool:
            try:
                socket.create_connection((there.address, ADMIN_PORT), timeout=within_s).close()
            except OSError:
                return False
            return True

        return await asyncio.to_thread(here.call, connect)

    def strangers(self) -> list[str]:
        return []  # packets are lost whoever has sent them

    async def aclose(self) -> None:
        self._stack.close()

    def _both_directions(self, a: str, b: str) -> Iterator[tuple[Netns, Netns]]:
        yield self._machines[a], self._machines[b]
        yield self._machines[b], self._machines[a]


def namespaces_unavailable_reason() -> str:
    """Return why `NamespaceLinks` cannot be used on this machine, or an empty string."""
    return unavailable_reason()
