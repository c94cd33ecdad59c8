"""Converts the messages of the Scheduler service between core and protobuf."""

import json

from baton.core.cluster.cache_stats import CacheStats, TokenReuse
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import Candidate, DecisionRecord, MissingPrefix, MissingReason, SessionTurn
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.cluster.worker_command import CommandKind, WorkerCommand
from baton.core.cluster.worker_report import (
    BlockCounts,
    LinkReport,
    ReloadCounts,
    TierReport,
    WorkerReport,
    WorkerRole,
    WorkerState,
)
from baton.core.errors import invalid
from baton.core.ids import DecisionId
from baton.core.request import RequestActuals, Slo
from baton.core.step_cost import StepCostModel
from baton.rpc.mappers import common_mapper as c
from baton.rpc.mappers.kv_mapper import from_kv_layout, to_kv_layout
from baton.rpc.mappers.message_mapping import MessageMapping, checked, nested, repeated
from baton.wire.v1 import scheduler_pb2 as pb

ROLES = c.EnumMap(WorkerRole, pb.WorkerRole)
STATES = c.EnumMap(WorkerState, pb.WorkerState)
COMMAND_KINDS = c.EnumMap(CommandKind, pb.CommandKind)
MAX_AVOID = 1024
"""Maximum number of workers that a query avoids; an attempt adds at most two."""

_NAME, _SECONDS, _AMOUNT = checked(c.name), checked(c.seconds), checked(c.amount)
_REF = nested(c.to_worker_ref, c.from_worker_ref)
_OPTIONAL_REF = nested(c.to_worker_ref, c.from_worker_ref, optional=True)
_REASON = nested(c.REASONS.to_wire, c.REASONS.from_wire)
_COUNTS = nested(dict, dict)

_SLO = MessageMapping(Slo, pb.Slo, {"ttft_s": _SECONDS, "tpot_s": _SECONDS})
_QUERY = MessageMapping(
    PlacementQuery,
    pb.PlacementQuery,
    {
        **dict.fromkeys(("request_id", "model", "tenant", "hash_scheme", "model_fingerprint"), _NAME),
        **dict.fromkeys(("session_key", "trace_context", "prefix_key"), _NAME),
        **dict.fromkeys(("deadline_s", "waited_s", "answer_within_s"), _SECONDS),
        "block_hashes": nested(c.to_hash_bytes, c.from_hash_bytes),
        "slo": nested(_SLO.to_wire, _SLO.from_wire),
        "avoid": repeated(c.to_worker_ref, c.from_worker_ref),
    },
)

to_placement_query = _QUERY.to_wire


def from_placement_query(message: pb.PlacementQuery) -> PlacementQuery:
    """Convert a query. Raises Refused also if its request id is missing or it avoids too many workers."""
    if not message.request_id:
        raise invalid("a query's request_id is missing")
    if len(message.avoid) > MAX_AVOID:
        raise invalid(f"a query avoids {len(message.avoid)} workers; at most {MAX_AVOID} are allowed")
    return _QUERY.from_wire(message)


_PLACEMENT = MessageMapping(
    Placement,
    pb.Placement,
    {
        "prefill": _OPTIONAL_REF,
        "decode": _OPTIONAL_REF,
        "prefix_source": nested(c.to_prefix_source, c.from_prefix_source, optional=True),
        "waiting_s": _SECONDS,
    },
)
_REJECTION = MessageMapping(Rejection, pb.Rejection, {"reason": _REASON, "retry_after_s": _SECONDS})

to_placement, from_placement = _PLACEMENT.to_wire, _PLACEMENT.from_wire


def to_place_reply(answer: Placement | Rejection | StillWaiting) -> pb.PlaceReply:
    """Convert the scheduler's answer to a query."""
    if isinstance(answer, Placement):
        return pb.PlaceReply(placement=to_placement(answer))
    if isinstance(answer, StillWaiting):
        return pb.PlaceReply(still_waiting=pb.StillWaiting(num_waiting=answer.num_waiting))
    return pb.PlaceReply(rejection=_REJECTION.to_wire(answer))


def from_place_reply(message: pb.PlaceReply) -> Placement | Rejection | StillWaiting:
    """Convert the scheduler's answer to a query. Raises Refused if it is of no known kind."""
    match message.WhichOneof("kind"):
        case "placement":
            return from_placement(message.placement)
        case "rejection":
            return _REJECTION.from_wire(message.rejection)
        case "still_waiting":
            return StillWaiting(num_waiting=message.still_waiting.num_waiting)
        case _:
            raise invalid("the scheduler's answer is of no known kind")


_ACTUALS = MessageMapping(
    RequestActuals,
    pb.RequestActuals,
    {
        "decision_id": _NAME,
        "outcome": _NAME,
        "legs": repeated(c.to_leg_timeline, c.from_leg_timeline),
        "cached_tokens_by_tier": _COUNTS,
    },
)

to_request_actuals, from_request_actuals = _ACTUALS.to_wire, _ACTUALS.from_wire

_COSTS = MessageMapping(StepCostModel, pb.StepCostModel)


def _from_step_costs(message: pb.StepCostModel) -> StepCostModel | None:
    """Convert step costs; None if this release cannot use them, as if the worker had not measured itself."""
    costs = _COSTS.from_wire(message)
    return costs if costs.is_usable else None


_BLOCKS = MessageMapping(BlockCounts, pb.BlockCounts)
_LINK = MessageMapping(
    LinkReport,
    pb.LinkReport,
    {
        "peer": _REF,
        "transport": _NAME,
        "problem": _NAME,
        "choice": _NAME,
        "pull_s": _AMOUNT,
        "exposed_s": _AMOUNT,
        "dial_s": _AMOUNT,
    },
)
_TIER = MessageMapping(TierReport, pb.TierReport, {"tier": _NAME})
_RELOADS = MessageMapping(ReloadCounts, pb.ReloadCounts)
_REPORT = MessageMapping(
    WorkerReport,
    pb.WorkerReport,
    {
        "worker": _REF,
        "role": nested(ROLES.to_wire, ROLES.from_wire),
        "state": nested(STATES.to_wire, STATES.from_wire),
        "model": _NAME,
        "layout": nested(to_kv_layout, from_kv_layout),
        "blocks": nested(_BLOCKS.to_wire, _BLOCKS.from_wire),
        "host": _NAME,
        "links": repeated(_LINK.to_wire, _LINK.from_wire),
        "tiers": repeated(_TIER.to_wire, _TIER.from_wire),
        "reloads": nested(_RELOADS.to_wire, _RELOADS.from_wire),
        "counted_decision_ids": repeated(str, lambda value: DecisionId(c.name(value, "decision_id"))),
        "costs": nested(_COSTS.to_wire, _from_step_costs, optional=True),
        "mean_output_tokens": _AMOUNT,
        "target_step_s": _AMOUNT,
        "tokens_per_step": _AMOUNT,
        "ttft_target_factor": _AMOUNT,
        "tpot_target_factor": _AMOUNT,
        "recent_prefill_share": checked(c.share),
        "evicted_reuse": checked(c.share),
    },
)

to_worker_report, from_worker_report = _REPORT.to_wire, _REPORT.from_wire

_UPDATE = MessageMapping(
    ClusterUpdate, pb.ClusterUpdate, {"reports": repeated(to_worker_report, from_worker_report), "host": _NAME}
)

to_cluster_update, from_cluster_update = _UPDATE.to_wire, _UPDATE.from_wire

_COMMAND = MessageMapping(
    WorkerCommand,
    pb.Command,
    {
        "kind": nested(COMMAND_KINDS.to_wire, COMMAND_KINDS.from_wire),
        "peer": _OPTIONAL_REF,
        "tenant_salt": _NAME,
    },
)

to_command, from_command = _COMMAND.to_wire, _COMMAND.from_wire


def _to_json(value: dict[str, object]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _from_json(text: str) -> dict[str, object]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid(f"actuals_json is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid("actuals_json is not a JSON object")
    return value


def _from_missing_reason(text: str) -> MissingReason:
    try:
        return MissingReason(text)
    except ValueError as error:
        raise invalid(f"the reason of a missing prefix is {text[:50]!r}, which this release does not know") from error


_MISSING = MessageMapping(
    MissingPrefix,
    pb.MissingPrefix,
    {"reason": nested(lambda reason: reason.value, _from_missing_reason), "worker_id": _NAME, "ago_s": _SECONDS},
)
_SESSION = MessageMapping(SessionTurn, pb.SessionTurn, dict.fromkeys(("gap_s", "median_gap_s", "attained_s"), _SECONDS))
_CANDIDATE = MessageMapping(Candidate, pb.Candidate, {"worker": _REF, "terms": _COUNTS})
_RECORD = MessageMapping(
    DecisionRecord,
    pb.DecisionRecord,
    {
        "query": nested(to_placement_query, from_placement_query),
        "placement": nested(to_placement, from_placement, optional=True),
        "rejection": nested(_REJECTION.to_wire, _REJECTION.from_wire, optional=True),
        "candidates": repeated(_CANDIDATE.to_wire, _CANDIDATE.from_wire),
        "session": nested(_SESSION.to_wire, _SESSION.from_wire, optional=True),
        "missing": nested(_MISSING.to_wire, _MISSING.from_wire, optional=True),
        "num_excluded": _COUNTS,
        "actuals": nested(_to_json, _from_json),
    },
    renamed={"actuals": "actuals_json"},
)

to_decision_record, from_decision_record = _RECORD.to_wire, _RECORD.from_wire

_CACHE_USE = MessageMapping(TokenReuse, pb.CacheUse, {"worker_id": _NAME, "cached_tokens": _COUNTS})
_CACHE_STATS = MessageMapping(
    CacheStats,
    pb.CacheStatsReply,
    {
        "since_s": _SECONDS,
        "total": nested(_CACHE_USE.to_wire, _CACHE_USE.from_wire),
        "workers": repeated(_CACHE_USE.to_wire, _CACHE_USE.from_wire),
        "ceiling_tokens": _AMOUNT,
        "sampled_share": checked(c.share),
    },
)

to_cache_stats, from_cache_stats = _CACHE_STATS.to_wire, _CACHE_STATS.from_wire
