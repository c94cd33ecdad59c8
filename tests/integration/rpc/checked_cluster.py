"""A cluster whose internal ports get invalid input, with the checks that must hold after each case."""

import json
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import httpx
import psutil

from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import token_ids
from baton.core.kv.kv_layout import KvLayout
from baton.core.messages.jobs import SessionHello
from baton.core.messages.peer_messages import PeerHello
from baton.rpc.channel import channel_options
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.mappers.peer_mapper import to_reader_message
from baton.rpc.mappers.worker_mapper import to_gateway_message
from tests import grpc_methods
from tests.cluster import ProcessCluster
from tests.grpc_methods import CallEnd, call
from tests.unit.worker.scripted_gateway import Gateway

MAX_GROWTH_BYTES = 300 * 2**20
"""Bound for the growth of one process over all tests. A few of the larger inputs would exceed it if kept."""
SESSION, EXCHANGE, REPORT = (
    "/baton.wire.v1.Worker/Session",
    "/baton.wire.v1.Peer/Exchange",
    "/baton.wire.v1.Scheduler/Report",
)
PLACE, FINISHED = "/baton.wire.v1.Scheduler/Place", "/baton.wire.v1.Scheduler/Finished"
INTERNAL = [method for method in grpc_methods.all_methods() if method.service.startswith("baton.wire.")]
NAMES = ("h0", "scheduler", "gateway")
GOOD_PROMPT = token_ids(range(10, 60))


class CheckedCluster:
    """A cluster, channels to its internal ports, and the checks after each case."""

    def __init__(self, cluster: ProcessCluster, worker: WorkerRef) -> None:
        self.cluster = cluster
        self.worker = worker
        self.ports = {"h0": port_of(worker.address), "scheduler": port_of(cluster.children["scheduler"].address)}
        self.admin_ports = {
            name: port_of(
                next(json.loads(line)["address"] for line in log_lines(cluster, name) if '"admin_started"' in line)
            )
            for name in NAMES
        }
        self.network = GrpcNetwork(heartbeat_s=30.0, dial_s=60.0, call_s=60.0)
        self.http = httpx.AsyncClient(base_url=cluster.url, timeout=60)
        self.channels = {
            name: grpc.aio.insecure_channel(f"127.0.0.1:{port}", channel_options(30.0, 2**30))
            for name, port in self.ports.items()
        }
        self.processes = {name: psutil.Process(cluster.pid(name)) for name in NAMES}
        self.before_bytes: dict[str, int] = {}
        self.expected_tokens: list[int] = []
        self.layout: KvLayout
        self.served: dict[str, str] = {}
        """The name of the process that serves a method, by the method's path."""

    async def start(self) -> None:
        gateway = Gateway(self.network, self.worker, "first")
        self.layout = (await gateway.connect()).layout
        await gateway.break_off()
        for method in INTERNAL:
            answers = {name: await self.call(name, method.path, b"\xff", wait_s=20) for name in self.ports}
            served_by = [
                name for name, answered in answers.items() if answered.code is not grpc.StatusCode.UNIMPLEMENTED
            ]
            assert len(served_by) == 1, f"{method.path}: {answers}; add the channel of a new service here"
            self.served[method.path] = served_by[0]
        self.expected_tokens = await self._run_valid_request()
        self.before_bytes = {name: process.memory_info().rss for name, process in self.processes.items()}

    async def check(self) -> None:
        self.cluster.check_alive()
        assert await self._run_valid_request() == self.expected_tokens
        growth_mib = {
            name: (process.memory_info().rss - self.before_bytes[name]) >> 20
            for name, process in self.processes.items()
        }
        assert max(growth_mib.values()) < MAX_GROWTH_BYTES >> 20, f"memory growth in MiB: {growth_mib}"

    async def send(self, path: str, *raw: bytes, **options: Any) -> CallEnd:
        return await self.call(self.served[path], path, *raw, **options)

    async def call(
        self, name: str, path: str, *raw: bytes, wait_s: float = 10.0, max_replies: int = 1000, keep_open: bool = False
    ) -> CallEnd:
        return await call(self.channels[name], path, raw, wait_s=wait_s, max_replies=max_replies, keep_open=keep_open)

    def hello(self, **changes: Any) -> bytes:
        hello = SessionHello(gateway_id="x", session_id="x", last_seq=0, expected=self.worker)
        return to_gateway_message(replace(hello, **changes)).SerializeToString()

    def peer_hello(self, **changes: Any) -> bytes:
        reader = WorkerRef(worker_id="reader", worker_epoch=7, address="127.0.0.1:9")
        hello = PeerHello(reader=reader, owner=self.worker, layout=self.layout)
        return to_reader_message(replace(hello, **changes)).SerializeToString()

    async def aclose(self) -> None:
        await self.http.aclose()
        await self.network.aclose()
        for channel in self.channels.values():
            await channel.close()

    async def _run_valid_request(self) -> list[int]:
        body = {
            "prompt": list(GOOD_PROMPT),
            "max_tokens": 6,
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def log_lines(cluster: ProcessCluster, name: str) -> list[str]:
    return [
        line for file in (cluster.directory / "logs" / name).glob("*.log") for line in file.read_text().splitlines()
    ]
