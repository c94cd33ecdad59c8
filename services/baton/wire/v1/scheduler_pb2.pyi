from baton.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
    WORKER_ROLE_HYBRID: _ClassVar[WorkerRole]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_UNHEALTHY: _ClassVar[WorkerState]

class CommandKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMAND_KIND_UNSPECIFIED: _ClassVar[CommandKind]
    COMMAND_KIND_SNAPSHOT: _ClassVar[CommandKind]
    COMMAND_KIND_DRAIN: _ClassVar[CommandKind]
    COMMAND_KIND_PROBE_LINK: _ClassVar[CommandKind]
    COMMAND_KIND_CONNECT: _ClassVar[CommandKind]
    COMMAND_KIND_REPLACE: _ClassVar[CommandKind]
    COMMAND_KIND_CLEAR: _ClassVar[CommandKind]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_ROLE_HYBRID: WorkerRole
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_UNHEALTHY: WorkerState
COMMAND_KIND_UNSPECIFIED: CommandKind
COMMAND_KIND_SNAPSHOT: CommandKind
COMMAND_KIND_DRAIN: CommandKind
COMMAND_KIND_PROBE_LINK: CommandKind
COMMAND_KIND_CONNECT: CommandKind
COMMAND_KIND_REPLACE: CommandKind
COMMAND_KIND_CLEAR: CommandKind

class Slo(_message.Message):
    __slots__ = ("ttft_s", "tpot_s")
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    ttft_s: float
    tpot_s: float
    def __init__(self, ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ...) -> None: ...

class PlacementQuery(_message.Message):
    __slots__ = ("request_id", "attempt", "model", "tenant", "block_hashes", "hash_scheme", "model_fingerprint", "num_prompt_tokens", "num_output_tokens", "max_tokens", "sample_count", "slo", "priority", "deadline_s", "avoid", "session_key", "waited_s", "answer_within_s", "trace_context", "prefix_key")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_SCHEME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    ANSWER_WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_KEY_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    attempt: int
    model: str
    tenant: str
    block_hashes: bytes
    hash_scheme: str
    model_fingerprint: str
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    sample_count: int
    slo: Slo
    priority: int
    deadline_s: float
    avoid: _containers.RepeatedCompositeFieldContainer[_common_pb2.WorkerRef]
    session_key: str
    waited_s: float
    answer_within_s: float
    trace_context: str
    prefix_key: bytes
    def __init__(self, request_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., block_hashes: _Optional[bytes] = ..., hash_scheme: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., sample_count: _Optional[int] = ..., slo: _Optional[_Union[Slo, _Mapping]] = ..., priority: _Optional[int] = ..., deadline_s: _Optional[float] = ..., avoid: _Optional[_Iterable[_Union[_common_pb2.WorkerRef, _Mapping]]] = ..., session_key: _Optional[str] = ..., waited_s: _Optional[float] = ..., answer_within_s: _Optional[float] = ..., trace_context: _Optional[str] = ..., prefix_key: _Optional[bytes] = ...) -> None: ...

class PlaceReply(_message.Message):
    __slots__ = ("placement", "rejection", "still_waiting")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    STILL_WAITING_FIELD_NUMBER: _ClassVar[int]
    placement: Placement
    rejection: Rejection
    still_waiting: StillWaiting
    def __init__(self, placement: _Optional[_Union[Placement, _Mapping]] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ..., still_waiting: _Optional[_Union[StillWaiting, _Mapping]] = ...) -> None: ...

class StillWaiting(_message.Message):
    __slots__ = ("num_waiting",)
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    def __init__(self, num_waiting: _Optional[int] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("decision_id", "scheduler_id", "policy", "prefill", "decode", "prefix_source", "queue_s", "prefix_pull_s", "prefill_s", "transfer_s", "ttft_s", "tpot_s", "prefill_overlap_blocks", "decode_overlap_blocks", "waiting_s", "answer_s")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFIX_PULL_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_OVERLAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DECODE_OVERLAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_S_FIELD_NUMBER: _ClassVar[int]
    ANSWER_S_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    scheduler_id: str
    policy: str
    prefill: _common_pb2.WorkerRef
    decode: _common_pb2.WorkerRef
    prefix_source: _common_pb2.PrefixSource
    queue_s: float
    prefix_pull_s: float
    prefill_s: float
    transfer_s: float
    ttft_s: float
    tpot_s: float
    prefill_overlap_blocks: int
    decode_overlap_blocks: int
    waiting_s: float
    answer_s: float
    def __init__(self, decision_id: _Optional[str] = ..., scheduler_id: _Optional[str] = ..., policy: _Optional[str] = ..., prefill: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., decode: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., prefix_source: _Optional[_Union[_common_pb2.PrefixSource, _Mapping]] = ..., queue_s: _Optional[float] = ..., prefix_pull_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., prefill_overlap_blocks: _Optional[int] = ..., decode_overlap_blocks: _Optional[int] = ..., waiting_s: _Optional[float] = ..., answer_s: _Optional[float] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("reason", "message", "retry_after_s", "term", "predicted_s", "limit_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FailureReason
    message: str
    retry_after_s: float
    term: str
    predicted_s: float
    limit_s: float
    def __init__(self, reason: _Optional[_Union[_common_pb2.FailureReason, str]] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., term: _Optional[str] = ..., predicted_s: _Optional[float] = ..., limit_s: _Optional[float] = ...) -> None: ...

class RequestActuals(_message.Message):
    __slots__ = ("decision_id", "outcome", "ttft_s", "tpot_s", "num_output_tokens", "num_cached_tokens", "legs", "cached_tokens_by_tier")
    class CachedTokensByTierEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEGS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    outcome: str
    ttft_s: float
    tpot_s: float
    num_output_tokens: int
    num_cached_tokens: int
    legs: _containers.RepeatedCompositeFieldContainer[_common_pb2.LegTimeline]
    cached_tokens_by_tier: _containers.ScalarMap[str, int]
    def __init__(self, decision_id: _Optional[str] = ..., outcome: _Optional[str] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., num_output_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., legs: _Optional[_Iterable[_Union[_common_pb2.LegTimeline, _Mapping]]] = ..., cached_tokens_by_tier: _Optional[_Mapping[str, int]] = ...) -> None: ...

class FinishedRequest(_message.Message):
    __slots__ = ("actuals",)
    ACTUALS_FIELD_NUMBER: _ClassVar[int]
    actuals: _containers.RepeatedCompositeFieldContainer[RequestActuals]
    def __init__(self, actuals: _Optional[_Iterable[_Union[RequestActuals, _Mapping]]] = ...) -> None: ...

class FinishedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterUpdate(_message.Message):
    __slots__ = ("scheduler_id", "reports", "pid", "host")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    reports: _containers.RepeatedCompositeFieldContainer[WorkerReport]
    pid: int
    host: str
    def __init__(self, scheduler_id: _Optional[str] = ..., reports: _Optional[_Iterable[_Union[WorkerReport, _Mapping]]] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("total", "free", "cached", "used", "receiving", "quarantined", "held_for_others")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    RECEIVING_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    HELD_FOR_OTHERS_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    used: int
    receiving: int
    quarantined: int
    held_for_others: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., used: _Optional[int] = ..., receiving: _Optional[int] = ..., quarantined: _Optional[int] = ..., held_for_others: _Optional[int] = ...) -> None: ...

class LinkReport(_message.Message):
    __slots__ = ("peer", "bytes_per_s", "inflight_bytes", "broken", "transport", "problem", "pull_s", "exposed_s", "dial_s", "choice")
    PEER_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    DIAL_S_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    peer: _common_pb2.WorkerRef
    bytes_per_s: float
    inflight_bytes: int
    broken: bool
    transport: str
    problem: str
    pull_s: float
    exposed_s: float
    dial_s: float
    choice: str
    def __init__(self, peer: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., bytes_per_s: _Optional[float] = ..., inflight_bytes: _Optional[int] = ..., broken: _Optional[bool] = ..., transport: _Optional[str] = ..., problem: _Optional[str] = ..., pull_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., dial_s: _Optional[float] = ..., choice: _Optional[str] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("worker", "report_seq", "role", "state", "model", "layout", "blocks", "max_model_len", "max_num_seqs", "pid", "host", "waiting_prefill_tokens", "waiting_seqs", "running_seqs", "running_context_tokens", "open_leases", "links", "event_seq", "counted_decision_ids", "needs_replacement", "costs", "max_num_batched_tokens", "waiting_prefill_attended_tokens", "mean_output_tokens", "recent_prefill_share", "target_step_s", "ttft_target_factor", "tpot_target_factor", "announce_every", "tokens_per_step", "tiers", "reloads", "evicted_reuse")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REPORT_SEQ_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPEN_LEASES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    EVENT_SEQ_FIELD_NUMBER: _ClassVar[int]
    COUNTED_DECISION_IDS_FIELD_NUMBER: _ClassVar[int]
    NEEDS_REPLACEMENT_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_ATTENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEAN_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECENT_PREFILL_SHARE_FIELD_NUMBER: _ClassVar[int]
    TARGET_STEP_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_FACTOR_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_FACTOR_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_EVERY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    RELOADS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_REUSE_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerRef
    report_seq: int
    role: WorkerRole
    state: WorkerState
    model: str
    layout: _common_pb2.KvLayout
    blocks: BlockCounts
    max_model_len: int
    max_num_seqs: int
    pid: int
    host: str
    waiting_prefill_tokens: int
    waiting_seqs: int
    running_seqs: int
    running_context_tokens: int
    open_leases: int
    links: _containers.RepeatedCompositeFieldContainer[LinkReport]
    event_seq: int
    counted_decision_ids: _containers.RepeatedScalarFieldContainer[str]
    needs_replacement: bool
    costs: StepCostModel
    max_num_batched_tokens: int
    waiting_prefill_attended_tokens: int
    mean_output_tokens: float
    recent_prefill_share: float
    target_step_s: float
    ttft_target_factor: float
    tpot_target_factor: float
    announce_every: int
    tokens_per_step: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierReport]
    reloads: ReloadCounts
    evicted_reuse: float
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., report_seq: _Optional[int] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., model: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., waiting_prefill_tokens: _Optional[int] = ..., waiting_seqs: _Optional[int] = ..., running_seqs: _Optional[int] = ..., running_context_tokens: _Optional[int] = ..., open_leases: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkReport, _Mapping]]] = ..., event_seq: _Optional[int] = ..., counted_decision_ids: _Optional[_Iterable[str]] = ..., needs_replacement: _Optional[bool] = ..., costs: _Optional[_Union[StepCostModel, _Mapping]] = ..., max_num_batched_tokens: _Optional[int] = ..., waiting_prefill_attended_tokens: _Optional[int] = ..., mean_output_tokens: _Optional[float] = ..., recent_prefill_share: _Optional[float] = ..., target_step_s: _Optional[float] = ..., ttft_target_factor: _Optional[float] = ..., tpot_target_factor: _Optional[float] = ..., announce_every: _Optional[int] = ..., tokens_per_step: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierReport, _Mapping]]] = ..., reloads: _Optional[_Union[ReloadCounts, _Mapping]] = ..., evicted_reuse: _Optional[float] = ...) -> None: ...

class ReloadCounts(_message.Message):
    __slots__ = ("complete", "incomplete", "late")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    complete: int
    incomplete: int
    late: int
    def __init__(self, complete: _Optional[int] = ..., incomplete: _Optional[int] = ..., late: _Optional[int] = ...) -> None: ...

class TierReport(_message.Message):
    __slots__ = ("tier", "total", "held", "load_bytes_per_s", "loading_bytes", "load_overhead_s")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOADING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_OVERHEAD_S_FIELD_NUMBER: _ClassVar[int]
    tier: str
    total: int
    held: int
    load_bytes_per_s: float
    loading_bytes: int
    load_overhead_s: float
    def __init__(self, tier: _Optional[str] = ..., total: _Optional[int] = ..., held: _Optional[int] = ..., load_bytes_per_s: _Optional[float] = ..., loading_bytes: _Optional[int] = ..., load_overhead_s: _Optional[float] = ...) -> None: ...

class StepCostModel(_message.Message):
    __slots__ = ("version", "step_s", "prefill_token_s", "prefill_attended_s", "decode_seq_s", "decode_context_s", "prefill_factor", "decode_factor", "mixed_factor", "num_measured", "draft_token_s", "verify_factor")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ATTENDED_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQ_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FACTOR_FIELD_NUMBER: _ClassVar[int]
    DECODE_FACTOR_FIELD_NUMBER: _ClassVar[int]
    MIXED_FACTOR_FIELD_NUMBER: _ClassVar[int]
    NUM_MEASURED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    version: int
    step_s: float
    prefill_token_s: float
    prefill_attended_s: float
    decode_seq_s: float
    decode_context_s: float
    prefill_factor: float
    decode_factor: float
    mixed_factor: float
    num_measured: int
    draft_token_s: float
    verify_factor: float
    def __init__(self, version: _Optional[int] = ..., step_s: _Optional[float] = ..., prefill_token_s: _Optional[float] = ..., prefill_attended_s: _Optional[float] = ..., decode_seq_s: _Optional[float] = ..., decode_context_s: _Optional[float] = ..., prefill_factor: _Optional[float] = ..., decode_factor: _Optional[float] = ..., mixed_factor: _Optional[float] = ..., num_measured: _Optional[int] = ..., draft_token_s: _Optional[float] = ..., verify_factor: _Optional[float] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("kind", "peer", "node_shutting_down", "tenant_salt")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    NODE_SHUTTING_DOWN_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    kind: CommandKind
    peer: _common_pb2.WorkerRef
    node_shutting_down: bool
    tenant_salt: bytes
    def __init__(self, kind: _Optional[_Union[CommandKind, str]] = ..., peer: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., node_shutting_down: _Optional[bool] = ..., tenant_salt: _Optional[bytes] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    def __init__(self, request_id: _Optional[bytes] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[DecisionRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[DecisionRecord, _Mapping]]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("worker", "side", "terms", "excluded")
    class TermsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerRef
    side: str
    terms: _containers.ScalarMap[str, float]
    excluded: str
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., side: _Optional[str] = ..., terms: _Optional[_Mapping[str, float]] = ..., excluded: _Optional[str] = ...) -> None: ...

class DecisionRecord(_message.Message):
    __slots__ = ("decision_id", "scheduler_id", "policy", "request_id", "attempt", "query", "placement", "rejection", "candidates", "num_excluded", "actuals_json", "inputs", "missing", "session")
    class NumExcludedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    NUM_EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    ACTUALS_JSON_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    scheduler_id: str
    policy: str
    request_id: bytes
    attempt: int
    query: PlacementQuery
    placement: Placement
    rejection: Rejection
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    num_excluded: _containers.ScalarMap[str, int]
    actuals_json: str
    inputs: str
    missing: MissingPrefix
    session: SessionTurn
    def __init__(self, decision_id: _Optional[str] = ..., scheduler_id: _Optional[str] = ..., policy: _Optional[str] = ..., request_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., query: _Optional[_Union[PlacementQuery, _Mapping]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., num_excluded: _Optional[_Mapping[str, int]] = ..., actuals_json: _Optional[str] = ..., inputs: _Optional[str] = ..., missing: _Optional[_Union[MissingPrefix, _Mapping]] = ..., session: _Optional[_Union[SessionTurn, _Mapping]] = ...) -> None: ...

class SessionTurn(_message.Message):
    __slots__ = ("turn", "gap_s", "median_gap_s", "attained_s")
    TURN_FIELD_NUMBER: _ClassVar[int]
    GAP_S_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_GAP_S_FIELD_NUMBER: _ClassVar[int]
    ATTAINED_S_FIELD_NUMBER: _ClassVar[int]
    turn: int
    gap_s: float
    median_gap_s: float
    attained_s: float
    def __init__(self, turn: _Optional[int] = ..., gap_s: _Optional[float] = ..., median_gap_s: _Optional[float] = ..., attained_s: _Optional[float] = ...) -> None: ...

class MissingPrefix(_message.Message):
    __slots__ = ("num_blocks", "reason", "worker_id", "known_blocks", "ago_s")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    reason: str
    worker_id: str
    known_blocks: int
    ago_s: float
    def __init__(self, num_blocks: _Optional[int] = ..., reason: _Optional[str] = ..., worker_id: _Optional[str] = ..., known_blocks: _Optional[int] = ..., ago_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id", "node_shutting_down")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_SHUTTING_DOWN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    node_shutting_down: bool
    def __init__(self, worker_id: _Optional[str] = ..., node_shutting_down: _Optional[bool] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class ClearTenantRequest(_message.Message):
    __slots__ = ("tenant_salt",)
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    tenant_salt: bytes
    def __init__(self, tenant_salt: _Optional[bytes] = ...) -> None: ...

class ClearTenantReply(_message.Message):
    __slots__ = ("worker_ids",)
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CacheStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheStatsReply(_message.Message):
    __slots__ = ("since_s", "total", "workers", "ceiling_tokens", "sampled_share")
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CEILING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_SHARE_FIELD_NUMBER: _ClassVar[int]
    since_s: float
    total: CacheUse
    workers: _containers.RepeatedCompositeFieldContainer[CacheUse]
    ceiling_tokens: float
    sampled_share: float
    def __init__(self, since_s: _Optional[float] = ..., total: _Optional[_Union[CacheUse, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[CacheUse, _Mapping]]] = ..., ceiling_tokens: _Optional[float] = ..., sampled_share: _Optional[float] = ...) -> None: ...

class CacheUse(_message.Message):
    __slots__ = ("worker_id", "num_requests", "num_prompt_tokens", "cached_tokens")
    class CachedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    num_requests: int
    num_prompt_tokens: int
    cached_tokens: _containers.ScalarMap[str, int]
    def __init__(self, worker_id: _Optional[str] = ..., num_requests: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[_Mapping[str, int]] = ...) -> None: ...
