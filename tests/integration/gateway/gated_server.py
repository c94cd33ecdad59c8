"""A gRPC server of a gateway with gates, and stub workers behind it."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

from baton.core.errors import Code, Failure, Reason, Refused
from baton.gateway.grpc.inference_service import InferenceService
from baton.rpc import client_writer
from baton.rpc.gates.keyless_gate import READ_S, WAIT_S, KeylessGate
from baton.rpc.gates.receive_gate import ReceiveGate
from baton.rpc.grpc_server import GrpcServer
from baton.runtime.process.byte_budget import Account
from tests.unit.gateway.fakes import LONG_LIMITS, Cluster, cluster

MESSAGE_BYTES = 7 * 2**20


def check(authorization: str) -> None:
    """Accept only "Bearer right". Raises Refused."""
    if authorization != "Bearer right":
        failure = Failure(code=Code.UNAUTHENTICATED, reason=Reason.INVALID_API_KEY, message="the API key is wrong")
        raise Refused(failure)


@asynccontextmanager
async def served(
    *,
    receive_s: float = 30.0,
    wait_s: float = WAIT_S,
    read_s: float = READ_S,
    client_read_s: float = client_writer.READ_S,
    max_message_bytes: int = 2 * MESSAGE_BYTES,
    limits: Mapping[Account, int] = MappingProxyType({}),
) -> AsyncIterator[tuple[int, list[Failure], Cluster]]:
    """Serve the inference API behind a gate that receives two messages at a time.

    Its keepalive is long, because connections of raw bytes answer no pings. Yields (port, refused calls,
    cluster).
    """
    refused: list[Failure] = []
    memory_limits = {Account.RECEIVING: 2 * max_message_bytes, **limits}
    async with cluster(("h0", "hybrid"), memory_limits=memory_limits, **LONG_LIMITS) as c:
        gate = ReceiveGate(
            check,
            budget=c.gateway.budget,
            max_message_bytes=max_message_bytes,
            receive_s=receive_s,
            on_refused=refused.append,
        )
        gates = gate, KeylessGate(c.gateway.budget, wait_s=wait_s, read_s=read_s)
        server = GrpcServer(
            heartbeat_s=60.0, max_message_bytes=2 * MESSAGE_BYTES, gates=gates, max_streams=20, read_s=client_read_s
        )
        server.add_inference(InferenceService(c.gateway))
        port = await server.start("127.0.0.1", 0)
        try:
            yield port, refused, c
        finally:
            await server.stop(0.0)
