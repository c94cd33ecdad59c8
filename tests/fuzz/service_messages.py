"""Fuzz target: messages between services. Each is refused with a typed error, or survives a round trip.

The first byte of an input chooses the message.
"""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from baton.core.errors import Refused
from baton.rpc.mappers import common_mapper, peer_mapper, scheduler_mapper, worker_mapper
from baton.wire.v1 import common_pb2, peer_pb2, scheduler_pb2, worker_pb2

_CONVERTERS: tuple[tuple[Any, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (worker_pb2.GatewayMessage, worker_mapper.from_gateway_message, worker_mapper.to_gateway_message),
    (worker_pb2.WorkerMessage, worker_mapper.from_worker_message, worker_mapper.to_worker_message),
    (peer_pb2.ReaderMessage, peer_mapper.from_reader_message, peer_mapper.to_reader_message),
    (peer_pb2.OwnerMessage, peer_mapper.from_owner_message, peer_mapper.to_owner_message),
    (scheduler_pb2.PlacementQuery, scheduler_mapper.from_placement_query, scheduler_mapper.to_placement_query),
    (scheduler_pb2.PlaceReply, scheduler_mapper.from_place_reply, scheduler_mapper.to_place_reply),
    (scheduler_pb2.WorkerReport, scheduler_mapper.from_worker_report, scheduler_mapper.to_worker_report),
    (scheduler_pb2.DecisionRecord, scheduler_mapper.from_decision_record, scheduler_mapper.to_decision_record),
    (common_pb2.Failure, common_mapper.from_failure, common_mapper.to_failure),
)


def run_one(data: bytes) -> None:
    kind, raw = data[:1] or b"\0", data[1:]
    message_class, from_wire, to_wire = _CONVERTERS[kind[0] % len(_CONVERTERS)]
    try:
        value = from_wire(message_class.FromString(raw))
    except (DecodeError, Refused):
        return
    sent = to_wire(value).SerializeToString(deterministic=True)
    again = to_wire(from_wire(message_class.FromString(sent))).SerializeToString(deterministic=True)
    assert again == sent
