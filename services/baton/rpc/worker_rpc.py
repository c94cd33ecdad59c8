"""Servicer and client of the Worker service: sessions of gateways, and exports and imports of prefixes."""

from typing import Any

import grpc
import grpc.aio

from baton.core.interfaces import WorkerService
from baton.core.messages.jobs import GatewayMessage, ReceivedGatewayMessage, WorkerMessage
from baton.core.messages.prefix_messages import PrefixReply, PrefixRequest
from baton.rpc.mappers.prefix_copy_mapper import (
    from_prefix_reply,
    from_prefix_request,
    to_prefix_reply,
    to_prefix_request,
)
from baton.rpc.mappers.worker_mapper import (
    from_worker_message,
    received_gateway_message,
    to_gateway_message,
    to_worker_message,
)
from baton.rpc.streams.grpc_streams import ClientDuplex, Codec, dial, serve
from baton.rpc.streams.stream_limits import StreamLimits
from baton.runtime.process.awake_timeout import TimeLimit
from baton.wire.v1 import worker_pb2 as pb
from baton.wire.v1 import worker_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["Worker"].full_name
WORKER_SIDE: Codec[WorkerMessage, ReceivedGatewayMessage] = Codec(to_worker_message, received_gateway_message)
GATEWAY_SIDE: Codec[GatewayMessage, WorkerMessage] = Codec(to_gateway_message, from_worker_message)
COPYING_SIDE: Codec[PrefixReply, PrefixRequest] = Codec(to_prefix_reply, from_prefix_request)
ASKING_SIDE: Codec[PrefixRequest, PrefixReply] = Codec(to_prefix_request, from_prefix_reply)


class WorkerServicer(pb_grpc.WorkerServicer):
    """Serves gateway sessions, exports and imports of a worker over gRPC."""

    def __init__(self, service: WorkerService, limits: StreamLimits) -> None:
        self._service = service
        self._limits = limits

    async def Session(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # noqa: N802 - grpc's name
        await serve(context, WORKER_SIDE, self._service.session, self._limits)

    async def CopyPrefix(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # noqa: N802
        await serve(context, COPYING_SIDE, self._service.copy_prefix, self._limits)


async def open_session(
    channel: grpc.aio.Channel, address: str, limits: StreamLimits, limit: TimeLimit
) -> ClientDuplex[GatewayMessage, WorkerMessage]:
    """Open a session with a worker and take ownership of `channel`. Raises StreamBroken."""
    return await dial(
        channel, lambda c: pb_grpc.WorkerStub(c).Session(), GATEWAY_SIDE, limits=limits, limit=limit, address=address
    )


async def open_prefix_copy(
    channel: grpc.aio.Channel, address: str, limits: StreamLimits, limit: TimeLimit
) -> ClientDuplex[PrefixRequest, PrefixReply]:
    """Open a stream for an export or import and take ownership of `channel`. Raises StreamBroken."""
    return await dial(
        channel, lambda c: pb_grpc.WorkerStub(c).CopyPrefix(), ASKING_SIDE, limits=limits, limit=limit, address=address
    )
