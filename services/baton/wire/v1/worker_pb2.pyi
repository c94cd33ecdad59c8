from baton.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GatewayMessage(_message.Message):
    __slots__ = ("hello", "prefill", "decode", "cancel", "ack", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    prefill: PrefillJob
    decode: DecodeJob
    cancel: Cancel
    ack: Ack
    ping: Ping
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., prefill: _Optional[_Union[PrefillJob, _Mapping]] = ..., decode: _Optional[_Union[DecodeJob, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("protocol_version", "gateway_id", "session_id", "last_seq", "expected")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    gateway_id: str
    session_id: str
    last_seq: int
    expected: _common_pb2.WorkerRef
    def __init__(self, protocol_version: _Optional[int] = ..., gateway_id: _Optional[str] = ..., session_id: _Optional[str] = ..., last_seq: _Optional[int] = ..., expected: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("job", "token_ids", "num_prompt_tokens", "sampling", "sample_indices", "deadline_s", "priority", "cache_salt", "decision_id", "trace_context", "tpot_slo_s", "ttft_slo_s", "waited_s", "hints")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TPOT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    job: _common_pb2.JobId
    token_ids: bytes
    num_prompt_tokens: int
    sampling: _common_pb2.Sampling
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    deadline_s: float
    priority: int
    cache_salt: bytes
    decision_id: str
    trace_context: str
    tpot_slo_s: float
    ttft_slo_s: float
    waited_s: float
    hints: SessionHints
    def __init__(self, job: _Optional[_Union[_common_pb2.JobId, _Mapping]] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., sample_indices: _Optional[_Iterable[int]] = ..., deadline_s: _Optional[float] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., decision_id: _Optional[str] = ..., trace_context: _Optional[str] = ..., tpot_slo_s: _Optional[float] = ..., ttft_slo_s: _Optional[float] = ..., waited_s: _Optional[float] = ..., hints: _Optional[_Union[SessionHints, _Mapping]] = ...) -> None: ...

class SessionHints(_message.Message):
    __slots__ = ("tenant", "session", "retain_s", "next_in_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RETAIN_S_FIELD_NUMBER: _ClassVar[int]
    NEXT_IN_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session: str
    retain_s: float
    next_in_s: float
    def __init__(self, tenant: _Optional[str] = ..., session: _Optional[str] = ..., retain_s: _Optional[float] = ..., next_in_s: _Optional[float] = ...) -> None: ...

class PrefillJob(_message.Message):
    __slots__ = ("job", "reader", "prefix_source")
    JOB_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    job: Job
    reader: _common_pb2.WorkerRef
    prefix_source: _common_pb2.PrefixSource
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., reader: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., prefix_source: _Optional[_Union[_common_pb2.PrefixSource, _Mapping]] = ...) -> None: ...

class DecodeJob(_message.Message):
    __slots__ = ("job", "follow", "local", "prefix_source")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    job: Job
    follow: FollowOwner
    local: Local
    prefix_source: _common_pb2.PrefixSource
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., follow: _Optional[_Union[FollowOwner, _Mapping]] = ..., local: _Optional[_Union[Local, _Mapping]] = ..., prefix_source: _Optional[_Union[_common_pb2.PrefixSource, _Mapping]] = ...) -> None: ...

class FollowOwner(_message.Message):
    __slots__ = ("owner",)
    OWNER_FIELD_NUMBER: _ClassVar[int]
    owner: _common_pb2.WorkerRef
    def __init__(self, owner: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ...) -> None: ...

class Local(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("job", "sample_indices", "reason")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job: _common_pb2.JobId
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    reason: _common_pb2.FailureReason
    def __init__(self, job: _Optional[_Union[_common_pb2.JobId, _Mapping]] = ..., sample_indices: _Optional[_Iterable[int]] = ..., reason: _Optional[_Union[_common_pb2.FailureReason, str]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello_reply", "step", "heartbeat")
    HELLO_REPLY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello_reply: SessionHelloReply
    step: Step
    heartbeat: Heartbeat
    def __init__(self, hello_reply: _Optional[_Union[SessionHelloReply, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class SessionHelloReply(_message.Message):
    __slots__ = ("protocol_version", "worker", "layout", "resumed", "oldest_seq")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SEQ_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker: _common_pb2.WorkerRef
    layout: _common_pb2.KvLayout
    resumed: bool
    oldest_seq: int
    def __init__(self, protocol_version: _Optional[int] = ..., worker: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., resumed: _Optional[bool] = ..., oldest_seq: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("seq", "deltas", "failures")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    seq: int
    deltas: _containers.RepeatedCompositeFieldContainer[TokenDelta]
    failures: _containers.RepeatedCompositeFieldContainer[JobFailure]
    def __init__(self, seq: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[TokenDelta, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[JobFailure, _Mapping]]] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("job", "sample_index", "output_index", "token_ids", "logprobs", "finish", "usage", "timeline", "is_last", "prompt_logprobs")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    job: _common_pb2.JobId
    sample_index: int
    output_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    finish: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    timeline: _common_pb2.LegTimeline
    is_last: bool
    prompt_logprobs: _common_pb2.PromptLogprobs
    def __init__(self, job: _Optional[_Union[_common_pb2.JobId, _Mapping]] = ..., sample_index: _Optional[int] = ..., output_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., timeline: _Optional[_Union[_common_pb2.LegTimeline, _Mapping]] = ..., is_last: _Optional[bool] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class JobFailure(_message.Message):
    __slots__ = ("job", "failure")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    job: _common_pb2.JobId
    failure: _common_pb2.Failure
    def __init__(self, job: _Optional[_Union[_common_pb2.JobId, _Mapping]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("seq", "steps_done", "step_age_s", "draining")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STEPS_DONE_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    seq: int
    steps_done: int
    step_age_s: float
    draining: bool
    def __init__(self, seq: _Optional[int] = ..., steps_done: _Optional[int] = ..., step_age_s: _Optional[float] = ..., draining: _Optional[bool] = ...) -> None: ...

class PrefixRequest(_message.Message):
    __slots__ = ("export_prefix", "import_prefix", "part", "next")
    EXPORT_PREFIX_FIELD_NUMBER: _ClassVar[int]
    IMPORT_PREFIX_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    export_prefix: ExportPrefix
    import_prefix: ImportPrefix
    part: FilePart
    next: NextPart
    def __init__(self, export_prefix: _Optional[_Union[ExportPrefix, _Mapping]] = ..., import_prefix: _Optional[_Union[ImportPrefix, _Mapping]] = ..., part: _Optional[_Union[FilePart, _Mapping]] = ..., next: _Optional[_Union[NextPart, _Mapping]] = ...) -> None: ...

class PrefixReply(_message.Message):
    __slots__ = ("offer", "part", "next", "imported")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    IMPORTED_FIELD_NUMBER: _ClassVar[int]
    offer: PrefixOffer
    part: FilePart
    next: NextPart
    imported: ImportedBlocks
    def __init__(self, offer: _Optional[_Union[PrefixOffer, _Mapping]] = ..., part: _Optional[_Union[FilePart, _Mapping]] = ..., next: _Optional[_Union[NextPart, _Mapping]] = ..., imported: _Optional[_Union[ImportedBlocks, _Mapping]] = ...) -> None: ...

class ExportPrefix(_message.Message):
    __slots__ = ("block_hashes", "tenant_root")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TENANT_ROOT_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    tenant_root: bytes
    def __init__(self, block_hashes: _Optional[bytes] = ..., tenant_root: _Optional[bytes] = ...) -> None: ...

class ImportPrefix(_message.Message):
    __slots__ = ("tenant_root",)
    TENANT_ROOT_FIELD_NUMBER: _ClassVar[int]
    tenant_root: bytes
    def __init__(self, tenant_root: _Optional[bytes] = ...) -> None: ...

class PrefixOffer(_message.Message):
    __slots__ = ("num_blocks", "num_bytes")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_bytes: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class FilePart(_message.Message):
    __slots__ = ("data", "is_last")
    DATA_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    is_last: bool
    def __init__(self, data: _Optional[bytes] = ..., is_last: _Optional[bool] = ...) -> None: ...

class NextPart(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ImportedBlocks(_message.Message):
    __slots__ = ("num_blocks", "num_cached_before", "num_file_blocks")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    NUM_FILE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_cached_before: int
    num_file_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_cached_before: _Optional[int] = ..., num_file_blocks: _Optional[int] = ...) -> None: ...
