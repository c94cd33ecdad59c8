"""Servicer and client of the Peer service, the stream between the reader and the owner of KV blocks."""

from typing import Any

import grpc
import grpc.aio

from baton.core.interfaces import WorkerService
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.rpc.mappers.peer_mapper import from_owner_message, from_reader_message, to_owner_message, to_reader_message
from baton.rpc.streams.grpc_streams import ClientDuplex, Codec, dial, serve
from baton.rpc.streams.stream_limits import StreamLimits
from baton.runtime.process.awake_timeout import TimeLimit
from baton.wire.v1 import peer_pb2 as pb
from baton.wire.v1 import peer_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["Peer"].full_name
OWNER_SIDE: Codec[OwnerMessage, ReaderMessage] = Codec(to_owner_message, from_reader_message)
READER_SIDE: Codec[ReaderMessage, OwnerMessage] = Codec(to_reader_message, from_owner_message)


class PeerServicer(pb_grpc.PeerServicer):
    """Serves the owner side of peer streams over gRPC."""

    def __init__(self, service: WorkerService, limits: StreamLimits) -> None:
        self._service = service
        self._limits = limits

    async def Exchange(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # noqa: N802 - grpc's name
        await serve(context, OWNER_SIDE, self._service.peer, self._limits)


async def open_peer(
    channel: grpc.aio.Channel, address: str, limits: StreamLimits, limit: TimeLimit
) -> ClientDuplex[ReaderMessage, OwnerMessage]:
    """Open a peer stream to an owner and take ownership of `channel`. Raises StreamBroken."""
    return await dial(
        channel, lambda c: pb_grpc.PeerStub(c).Exchange(), READER_SIDE, limits=limits, limit=limit, address=address
    )
