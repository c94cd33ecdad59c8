"""The scheduler's messages between core and protobuf."""

import json
from typing import Any

from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import Candidate, DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.cluster.worker_command import CommandKind, WorkerCommand
from baton.core.cluster.worker_report import BlockCounts, LinkReport, WorkerReport, WorkerRole, WorkerState
from baton.core.errors import invalid
from baton.core.ids import DecisionId
from baton.core.request import RequestActuals, Slo
from baton.core.step_cost import StepCostModel
from baton.rpc.mappers import common_mapper as c
from baton.wire.v1 import scheduler_pb2 as pb

ROLES = c.EnumMap(WorkerRole, pb.WorkerRole)
STATES = c.EnumMap(WorkerState, pb.WorkerState)
COMMAND_KINDS = c.EnumMap(CommandKind, pb.CommandKind)
MAX_AVOID = 1024
"""Workers that failed a request: an attempt names two at most."""
_COST_FIELDS = tuple(field.name for field in pb.StepCostModel.DESCRIPTOR.fields)


def to_placement_query(query: PlacementQuery) -> pb.PlacementQuery:
    return pb.PlacementQuery(
        request_id=query.request_id,
        attempt=query.attempt,
        model=query.model,
        tenant=query.tenant,
        block_hashes=c.to_hash_bytes(query.block_hashes),
        hash_scheme=query.hash_scheme,
        model_fingerprint=query.model_fingerprint,
        num_prompt_tokens=query.num_prompt_tokens,
        num_output_tokens=query.num_output_tokens,
        max_tokens=query.max_tokens,
        sample_count=query.sample_count,
        slo=pb.Slo(ttft_s=query.slo.ttft_s, tpot_s=query.slo.tpot_s),
        priority=query.priority,
        deadline_s=query.deadline_s,
        avoid=[c.to_worker_ref(worker) for worker in query.avoid],
        session_key=query.session_key,
        waited_s=query.waited_s,
        answer_within_s=query.answer_within_s,
        trace_context=query.trace_context,
    )


def from_placement_query(message: pb.PlacementQuery) -> PlacementQuery:
    if not message.request_id:
        raise invalid("a query's request_id is missing")
    if len(message.avoid) > MAX_AVOID:
        raise invalid(f"a query avoids {len(message.avoid)} workers; at most {MAX_AVOID} are allowed")
    return PlacementQuery(
        request_id=c.name(message.request_id, "request_id"),
        attempt=message.attempt,
        model=c.name(message.model, "model"),
        tenant=c.name(message.tenant, "tenant"),
        block_hashes=c.from_hash_bytes(message.block_hashes),
        hash_scheme=c.name(message.hash_scheme, "hash_scheme"),
        model_fingerprint=c.name(message.model_fingerprint, "model_fingerprint"),
        num_prompt_tokens=message.num_prompt_tokens,
        num_output_tokens=message.num_output_tokens,
        max_tokens=message.max_tokens,
        sample_count=message.sample_count,
        slo=Slo(ttft_s=c.optional_seconds(message.slo, "ttft_s"), tpot_s=c.optional_seconds(message.slo, "tpot_s")),
        priority=message.priority,
        deadline_s=c.seconds(message.deadline_s, "deadline_s"),
        avoid=tuple(c.from_worker_ref(worker) for worker in message.avoid),
        session_key=c.name(message.session_key, "session_key"),
        waited_s=c.seconds(message.waited_s, "waited_s"),
        answer_within_s=c.seconds(message.answer_within_s, "answer_within_s"),
        trace_context=c.name(message.trace_context, "trace_context"),
    )


def to_place_reply(answer: Placement | Rejection | StillWaiting) -> pb.PlaceReply:
    if isinstance(answer, Placement):
        return pb.PlaceReply(placement=to_placement(answer))
    if isinstance(answer, StillWaiting):
        return pb.PlaceReply(still_waiting=pb.StillWaiting(num_waiting=answer.num_waiting))
    return pb.PlaceReply(rejection=to_rejection(answer))


def from_place_reply(message: pb.PlaceReply) -> Placement | Rejection | StillWaiting:
    match message.WhichOneof("kind"):
        case "placement":
            return from_placement(message.placement)
        case "rejection":
            return from_rejection(message.rejection)
        case "still_waiting":
            return StillWaiting(num_waiting=message.still_waiting.num_waiting)
        case _:
            raise invalid("the scheduler's answer is of no known kind")


def to_placement(placement: Placement) -> pb.Placement:
    return pb.Placement(
        decision_id=placement.decision_id,
        scheduler_id=placement.scheduler_id,
        policy=placement.policy,
        prefill=None if placement.prefill is None else c.to_worker_ref(placement.prefill),
        decode=None if placement.decode is None else c.to_worker_ref(placement.decode),
        prefix_source=None if placement.prefix_source is None else c.to_prefix_source(placement.prefix_source),
        queue_s=placement.queue_s,
        prefix_pull_s=placement.prefix_pull_s,
        prefill_s=placement.prefill_s,
        transfer_s=placement.transfer_s,
        ttft_s=placement.ttft_s,
        tpot_s=placement.tpot_s,
        prefill_overlap_blocks=placement.prefill_overlap_blocks,
        decode_overlap_blocks=placement.decode_overlap_blocks,
        waiting_s=placement.waiting_s,
    )


def from_placement(message: pb.Placement) -> Placement:
    return Placement(
        decision_id=DecisionId(message.decision_id),
        scheduler_id=message.scheduler_id,
        policy=message.policy,
        prefill=c.from_worker_ref(message.prefill) if message.HasField("prefill") else None,
        decode=c.from_worker_ref(message.decode) if message.HasField("decode") else None,
        prefix_source=c.from_prefix_source(message.prefix_source) if message.HasField("prefix_source") else None,
        queue_s=_optional(message, "queue_s"),
        prefix_pull_s=_optional(message, "prefix_pull_s"),
        prefill_s=_optional(message, "prefill_s"),
        transfer_s=_optional(message, "transfer_s"),
        ttft_s=_optional(message, "ttft_s"),
        tpot_s=_optional(message, "tpot_s"),
        prefill_overlap_blocks=message.prefill_overlap_blocks,
        decode_overlap_blocks=message.decode_overlap_blocks,
        waiting_s=c.seconds(message.waiting_s, "waiting_s"),
    )


def to_rejection(rejection: Rejection) -> pb.Rejection:
    return pb.Rejection(
        reason=c.REASONS.to_wire(rejection.reason),
        message=rejection.message,
        retry_after_s=rejection.retry_after_s,
        term=rejection.term,
        predicted_s=rejection.predicted_s,
        limit_s=rejection.limit_s,
    )


def from_rejection(message: pb.Rejection) -> Rejection:
    return Rejection(
        reason=c.REASONS.from_wire(message.reason),
        message=message.message,
        retry_after_s=c.seconds(message.retry_after_s, "retry_after_s"),
        term=message.term,
        predicted_s=_optional(message, "predicted_s"),
        limit_s=_optional(message, "limit_s"),
    )


def to_request_actuals(actuals: RequestActuals) -> pb.RequestActuals:
    return pb.RequestActuals(
        decision_id=actuals.decision_id,
        outcome=actuals.outcome,
        ttft_s=actuals.ttft_s,
        tpot_s=actuals.tpot_s,
        num_output_tokens=actuals.num_output_tokens,
        num_cached_tokens=actuals.num_cached_tokens,
        legs=[c.to_leg_timeline(leg) for leg in actuals.legs],
    )


def from_request_actuals(message: pb.RequestActuals) -> RequestActuals:
    return RequestActuals(
        decision_id=DecisionId(c.name(message.decision_id, "decision_id")),
        outcome=c.name(message.outcome, "outcome"),
        ttft_s=_optional(message, "ttft_s"),
        tpot_s=_optional(message, "tpot_s"),
        num_output_tokens=message.num_output_tokens,
        num_cached_tokens=message.num_cached_tokens,
        legs=tuple(c.from_leg_timeline(leg) for leg in message.legs),
    )


def to_cluster_update(update: ClusterUpdate) -> pb.ClusterUpdate:
    return pb.ClusterUpdate(
        scheduler_id=update.scheduler_id,
        reports=[to_worker_report(report) for report in update.reports],
        pid=update.pid,
        host=update.host,
    )


def from_cluster_update(message: pb.ClusterUpdate) -> ClusterUpdate:
    return ClusterUpdate(
        scheduler_id=message.scheduler_id,
        reports=tuple(from_worker_report(report) for report in message.reports),
        pid=message.pid,
        host=c.name(message.host, "host"),
    )


def to_worker_report(report: WorkerReport) -> pb.WorkerReport:
    return pb.WorkerReport(
        worker=c.to_worker_ref(report.worker),
        report_seq=report.report_seq,
        role=ROLES.to_wire(report.role),
        state=STATES.to_wire(report.state),
        model=report.model,
        layout=c.to_kv_layout(report.layout),
        blocks=pb.BlockCounts(
            total=report.blocks.total,
            free=report.blocks.free,
            cached=report.blocks.cached,
            used=report.blocks.used,
            receiving=report.blocks.receiving,
            quarantined=report.blocks.quarantined,
            held_for_others=report.blocks.held_for_others,
        ),
        max_model_len=report.max_model_len,
        max_num_seqs=report.max_num_seqs,
        pid=report.pid,
        host=report.host,
        waiting_prefill_tokens=report.waiting_prefill_tokens,
        waiting_seqs=report.waiting_seqs,
        running_seqs=report.running_seqs,
        running_context_tokens=report.running_context_tokens,
        open_leases=report.open_leases,
        links=[
            pb.LinkReport(
                peer=c.to_worker_ref(link.peer),
                bytes_per_s=link.bytes_per_s,
                inflight_bytes=link.inflight_bytes,
                broken=link.broken,
                transport=link.transport,
            )
            for link in report.links
        ],
        event_seq=report.event_seq,
        counted_decision_ids=report.counted_decision_ids,
        needs_replacement=report.needs_replacement,
        costs=None if report.costs is None else to_step_costs(report.costs),
        max_num_batched_tokens=report.max_num_batched_tokens,
        waiting_prefill_attended_tokens=report.waiting_prefill_attended_tokens,
        mean_output_tokens=report.mean_output_tokens,
        slo_step_s=report.slo_step_s,
    )


def to_step_costs(costs: StepCostModel) -> pb.StepCostModel:
    return pb.StepCostModel(**{name: getattr(costs, name) for name in _COST_FIELDS})


def from_step_costs(message: pb.StepCostModel) -> StepCostModel | None:
    """None for one that cannot be used, such as that of another release: its worker is then as one that has
    not measured itself."""
    costs = StepCostModel(**c.values_of(message))
    return costs if costs.is_usable else None


def from_worker_report(message: pb.WorkerReport) -> WorkerReport:
    blocks = message.blocks
    return WorkerReport(
        worker=c.from_worker_ref(message.worker),
        report_seq=message.report_seq,
        role=ROLES.from_wire(message.role),
        state=STATES.from_wire(message.state),
        model=c.name(message.model, "model"),
        layout=c.from_kv_layout(message.layout),
        blocks=BlockCounts(
            total=blocks.total,
            free=blocks.free,
            cached=blocks.cached,
            used=blocks.used,
            receiving=blocks.receiving,
            quarantined=blocks.quarantined,
            held_for_others=blocks.held_for_others,
        ),
        max_model_len=message.max_model_len,
        max_num_seqs=message.max_num_seqs,
        pid=message.pid,
        host=c.name(message.host, "host"),
        waiting_prefill_tokens=message.waiting_prefill_tokens,
        waiting_seqs=message.waiting_seqs,
        running_seqs=message.running_seqs,
        running_context_tokens=message.running_context_tokens,
        open_leases=message.open_leases,
        links=tuple(
            LinkReport(
                peer=c.from_worker_ref(link.peer),
                bytes_per_s=link.bytes_per_s,
                inflight_bytes=link.inflight_bytes,
                broken=link.broken,
                transport=c.name(link.transport, "transport"),
            )
            for link in message.links
        ),
        event_seq=message.event_seq,
        counted_decision_ids=tuple(
            DecisionId(c.name(decision_id, "decision_id")) for decision_id in message.counted_decision_ids
        ),
        needs_replacement=message.needs_replacement,
        costs=from_step_costs(message.costs) if message.HasField("costs") else None,
        max_num_batched_tokens=message.max_num_batched_tokens,
        waiting_prefill_attended_tokens=message.waiting_prefill_attended_tokens,
        mean_output_tokens=c.amount(message.mean_output_tokens, "mean_output_tokens"),
        slo_step_s=c.amount(message.slo_step_s, "slo_step_s"),
    )


def to_command(command: WorkerCommand) -> pb.Command:
    return pb.Command(
        kind=COMMAND_KINDS.to_wire(command.kind),
        peer=None if command.peer is None else c.to_worker_ref(command.peer),
        node_shutting_down=command.node_shutting_down,
    )


def from_command(message: pb.Command) -> WorkerCommand:
    return WorkerCommand(
        kind=COMMAND_KINDS.from_wire(message.kind),
        peer=c.from_worker_ref(message.peer) if message.HasField("peer") else None,
        node_shutting_down=message.node_shutting_down,
    )


def to_decision_record(record: DecisionRecord) -> pb.DecisionRecord:
    return pb.DecisionRecord(
        decision_id=record.decision_id,
        scheduler_id=record.scheduler_id,
        policy=record.policy,
        request_id=record.request_id,
        attempt=record.attempt,
        query=to_placement_query(record.query),
        placement=None if record.placement is None else to_placement(record.placement),
        rejection=None if record.rejection is None else to_rejection(record.rejection),
        candidates=[
            pb.Candidate(
                worker=c.to_worker_ref(candidate.worker),
                side=candidate.side,
                terms=candidate.terms,
                excluded=candidate.excluded,
            )
            for candidate in record.candidates
        ],
        num_excluded=record.num_excluded,
        actuals_json=json.dumps(record.actuals, separators=(",", ":")),
        inputs=record.inputs,
    )


def from_decision_record(message: pb.DecisionRecord) -> DecisionRecord:
    return DecisionRecord(
        decision_id=DecisionId(message.decision_id),
        scheduler_id=message.scheduler_id,
        policy=message.policy,
        request_id=message.request_id,
        attempt=message.attempt,
        query=from_placement_query(message.query),
        placement=from_placement(message.placement) if message.HasField("placement") else None,
        rejection=from_rejection(message.rejection) if message.HasField("rejection") else None,
        candidates=tuple(
            Candidate(
                worker=c.from_worker_ref(candidate.worker),
                side=candidate.side,
                terms=dict(candidate.terms),
                excluded=candidate.excluded,
            )
            for candidate in message.candidates
        ),
        num_excluded=dict(message.num_excluded),
        actuals=_from_json_object(message.actuals_json, "actuals_json"),
        inputs=message.inputs,
    )


def _from_json_object(text: str, field: str) -> dict[str, object]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid(f"{field} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid(f"{field} is not a JSON object")
    return value


def _optional(message: Any, field: str) -> float | None:
    return getattr(message, field) if message.HasField(field) else None
