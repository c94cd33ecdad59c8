"""Tables of all conversions between core types and protobuf messages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.core.client_api import ClusterStatus, GenerateChunk, ModelInfo
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection
from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import Failure
from baton.core.messages.jobs import GatewayMessage, WorkerMessage
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.request import RequestActuals
from baton.rpc.mappers import client_mapper, common_mapper, peer_mapper, scheduler_mapper, worker_mapper
from baton.v1 import admin_pb2, inference_pb2
from baton.wire.v1 import common_pb2, peer_pb2, scheduler_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class Conversion:
    """Converts values of the core type `kind` to protobuf messages with `to`, and back with `back`."""

    kind: Any
    message: Any
    to: Callable[[Any], Any]
    back: Callable[[Any], Any]

    def round_trip(self, value: Any) -> Any:
        return self.back(self.message.FromString(self.to(value).SerializeToString()))


INTERNAL = {
    "failure": Conversion(Failure, common_pb2.Failure, common_mapper.to_failure, common_mapper.from_failure),
    "gateway": Conversion(
        GatewayMessage, worker_pb2.GatewayMessage, worker_mapper.to_gateway_message, worker_mapper.from_gateway_message
    ),
    "worker": Conversion(
        WorkerMessage, worker_pb2.WorkerMessage, worker_mapper.to_worker_message, worker_mapper.from_worker_message
    ),
    "reader": Conversion(
        ReaderMessage, peer_pb2.ReaderMessage, peer_mapper.to_reader_message, peer_mapper.from_reader_message
    ),
    "owner": Conversion(
        OwnerMessage, peer_pb2.OwnerMessage, peer_mapper.to_owner_message, peer_mapper.from_owner_message
    ),
    "query": Conversion(
        PlacementQuery,
        scheduler_pb2.PlacementQuery,
        scheduler_mapper.to_placement_query,
        scheduler_mapper.from_placement_query,
    ),
    "reply": Conversion(
        Placement | Rejection,
        scheduler_pb2.PlaceReply,
        scheduler_mapper.to_place_reply,
        scheduler_mapper.from_place_reply,
    ),
    "actuals": Conversion(
        RequestActuals,
        scheduler_pb2.RequestActuals,
        scheduler_mapper.to_request_actuals,
        scheduler_mapper.from_request_actuals,
    ),
    "update": Conversion(
        ClusterUpdate,
        scheduler_pb2.ClusterUpdate,
        scheduler_mapper.to_cluster_update,
        scheduler_mapper.from_cluster_update,
    ),
    "report": Conversion(
        WorkerReport, scheduler_pb2.WorkerReport, scheduler_mapper.to_worker_report, scheduler_mapper.from_worker_report
    ),
    "command": Conversion(
        WorkerCommand, scheduler_pb2.Command, scheduler_mapper.to_command, scheduler_mapper.from_command
    ),
    "record": Conversion(
        DecisionRecord,
        scheduler_pb2.DecisionRecord,
        scheduler_mapper.to_decision_record,
        scheduler_mapper.from_decision_record,
    ),
}
"""Conversions of messages between services."""

CLIENT = {
    "chunk": Conversion(
        GenerateChunk,
        inference_pb2.GenerateResponse,
        client_mapper.to_generate_response,
        client_mapper.from_generate_response,
    ),
    "status": Conversion(ClusterStatus, admin_pb2.StatusResponse, client_mapper.to_status, client_mapper.from_status),
    "model": Conversion(ModelInfo, inference_pb2.Model, client_mapper.to_model, client_mapper.from_model),
    "records": Conversion(
        tuple[DecisionRecord, ...],
        admin_pb2.ExplainResponse,
        client_mapper.to_explain_response,
        client_mapper.from_explain_response,
    ),
}
"""Conversions of messages between clients and the gateway."""
