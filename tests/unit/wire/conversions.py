"""Every pair of conversions between core and protobuf, as (core type, message, to, from)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.core.cluster import ClusterUpdate, Command, DecisionRecord, Placement, PlacementQuery, Rejection, WorkerReport
from baton.core.errors import Failure
from baton.core.front import ClusterStatus, GenerateChunk, ModelInfo
from baton.core.jobs import GatewayMessage, WorkerMessage
from baton.core.peer import OwnerMessage, ReaderMessage
from baton.core.request import RequestActuals
from baton.v1 import admin_pb2, inference_pb2
from baton.wire import convert, convert_front, convert_peer, convert_scheduler, convert_worker
from baton.wire.v1 import common_pb2, peer_pb2, scheduler_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class Conversion:
    kind: Any
    message: Any
    to: Callable[[Any], Any]
    back: Callable[[Any], Any]

    def over_the_wire(self, value: Any) -> Any:
        return self.back(self.message.FromString(self.to(value).SerializeToString()))


WIRE = {
    "failure": Conversion(Failure, common_pb2.Failure, convert.to_failure, convert.from_failure),
    "gateway": Conversion(
        GatewayMessage, worker_pb2.GatewayMessage, convert_worker.to_gateway_message, convert_worker.from_gateway_message
    ),
    "worker": Conversion(WorkerMessage, worker_pb2.WorkerMessage, convert_worker.to_worker_message, convert_worker.from_worker_message),
    "reader": Conversion(ReaderMessage, peer_pb2.ReaderMessage, convert_peer.to_reader_message, convert_peer.from_reader_message),
    "owner": Conversion(OwnerMessage, peer_pb2.OwnerMessage, convert_peer.to_owner_message, convert_peer.from_owner_message),
    "query": Conversion(
        PlacementQuery, scheduler_pb2.PlacementQuery, convert_scheduler.to_placement_query, convert_scheduler.from_placement_query
    ),
    "reply": Conversion(
        Placement | Rejection, scheduler_pb2.PlaceReply, convert_scheduler.to_place_reply, convert_scheduler.from_place_reply
    ),
    "actuals": Conversion(
        RequestActuals, scheduler_pb2.RequestActuals, convert_scheduler.to_request_actuals, convert_scheduler.from_request_actuals
    ),
    "update": Conversion(
        ClusterUpdate, scheduler_pb2.ClusterUpdate, convert_scheduler.to_cluster_update, convert_scheduler.from_cluster_update
    ),
    "report": Conversion(
        WorkerReport, scheduler_pb2.WorkerReport, convert_scheduler.to_worker_report, convert_scheduler.from_worker_report
    ),
    "command": Conversion(Command, scheduler_pb2.Command, convert_scheduler.to_command, convert_scheduler.from_command),
    "record": Conversion(
        DecisionRecord, scheduler_pb2.DecisionRecord, convert_scheduler.to_decision_record, convert_scheduler.from_decision_record
    ),
}
"""Between services."""

FRONT = {
    "chunk": Conversion(
        GenerateChunk, inference_pb2.GenerateResponse, convert_front.to_generate_response, convert_front.from_generate_response
    ),
    "status": Conversion(ClusterStatus, admin_pb2.StatusResponse, convert_front.to_status, convert_front.from_status),
    "model": Conversion(ModelInfo, inference_pb2.Model, convert_front.to_model, convert_front.from_model),
    "records": Conversion(
        tuple[DecisionRecord, ...], admin_pb2.ExplainResponse, convert_front.to_explain_response, convert_front.from_explain_response
    ),
}
"""With clients."""
