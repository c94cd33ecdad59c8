from baton.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReaderMessage(_message.Message):
    __slots__ = ("hello", "follow", "renew", "will_read", "release", "abandon", "group")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    WILL_READ_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    hello: PeerHello
    follow: Follow
    renew: Renew
    will_read: WillRead
    release: Release
    abandon: Abandon
    group: GroupMessage
    def __init__(self, hello: _Optional[_Union[PeerHello, _Mapping]] = ..., follow: _Optional[_Union[Follow, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., will_read: _Optional[_Union[WillRead, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., abandon: _Optional[_Union[Abandon, _Mapping]] = ..., group: _Optional[_Union[GroupMessage, _Mapping]] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("protocol_version", "reader", "owner", "layout", "max_regions", "transfers")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_REGIONS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    reader: _common_pb2.WorkerRef
    owner: _common_pb2.WorkerRef
    layout: _common_pb2.KvLayout
    max_regions: int
    transfers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., reader: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., owner: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., max_regions: _Optional[int] = ..., transfers: _Optional[_Iterable[str]] = ...) -> None: ...

class HashRange(_message.Message):
    __slots__ = ("hashes", "cache_salt", "moving_session", "reload_within_s")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MOVING_SESSION_FIELD_NUMBER: _ClassVar[int]
    RELOAD_WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    cache_salt: bytes
    moving_session: SessionKey
    reload_within_s: float
    def __init__(self, hashes: _Optional[bytes] = ..., cache_salt: _Optional[bytes] = ..., moving_session: _Optional[_Union[SessionKey, _Mapping]] = ..., reload_within_s: _Optional[float] = ...) -> None: ...

class SessionKey(_message.Message):
    __slots__ = ("tenant", "session")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session: str
    def __init__(self, tenant: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class Follow(_message.Message):
    __slots__ = ("transfer_id", "job", "hash_range", "have_blocks", "resume_from_block", "trace_context")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    HASH_RANGE_FIELD_NUMBER: _ClassVar[int]
    HAVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    job: _common_pb2.JobId
    hash_range: HashRange
    have_blocks: int
    resume_from_block: int
    trace_context: str
    def __init__(self, transfer_id: _Optional[int] = ..., job: _Optional[_Union[_common_pb2.JobId, _Mapping]] = ..., hash_range: _Optional[_Union[HashRange, _Mapping]] = ..., have_blocks: _Optional[int] = ..., resume_from_block: _Optional[int] = ..., trace_context: _Optional[str] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("renewal",)
    RENEWAL_FIELD_NUMBER: _ClassVar[int]
    renewal: int
    def __init__(self, renewal: _Optional[int] = ...) -> None: ...

class WillRead(_message.Message):
    __slots__ = ("transfer_id", "read_id", "block_ids")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    READ_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    read_id: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, transfer_id: _Optional[int] = ..., read_id: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GroupMessage(_message.Message):
    __slots__ = ("group", "key", "value")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    group: int
    key: str
    value: bytes
    def __init__(self, group: _Optional[int] = ..., key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("transfer_id", "outcome", "transfer_bytes", "duration_s")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    outcome: str
    transfer_bytes: int
    duration_s: float
    def __init__(self, transfer_id: _Optional[int] = ..., outcome: _Optional[str] = ..., transfer_bytes: _Optional[int] = ..., duration_s: _Optional[float] = ...) -> None: ...

class Abandon(_message.Message):
    __slots__ = ("transfer_id", "blocks_in_doubt")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IN_DOUBT_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    blocks_in_doubt: int
    def __init__(self, transfer_id: _Optional[int] = ..., blocks_in_doubt: _Optional[int] = ...) -> None: ...

class OwnerMessage(_message.Message):
    __slots__ = ("hello_reply", "ready", "renewed", "lost", "group")
    HELLO_REPLY_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    hello_reply: PeerHelloReply
    ready: KvReady
    renewed: Renewed
    lost: Lost
    group: GroupMessage
    def __init__(self, hello_reply: _Optional[_Union[PeerHelloReply, _Mapping]] = ..., ready: _Optional[_Union[KvReady, _Mapping]] = ..., renewed: _Optional[_Union[Renewed, _Mapping]] = ..., lost: _Optional[_Union[Lost, _Mapping]] = ..., group: _Optional[_Union[GroupMessage, _Mapping]] = ...) -> None: ...

class PeerHelloReply(_message.Message):
    __slots__ = ("protocol_version", "owner", "layout", "memory", "lease_s", "refusal")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    owner: _common_pb2.WorkerRef
    layout: _common_pb2.KvLayout
    memory: _containers.RepeatedCompositeFieldContainer[_common_pb2.KvMemory]
    lease_s: float
    refusal: str
    def __init__(self, protocol_version: _Optional[int] = ..., owner: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., memory: _Optional[_Iterable[_Union[_common_pb2.KvMemory, _Mapping]]] = ..., lease_s: _Optional[float] = ..., refusal: _Optional[str] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("sample_index", "token_id", "logprobs", "finish", "prompt_logprobs")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    token_id: int
    logprobs: _common_pb2.TokenLogprobs
    finish: _common_pb2.FinishReason
    prompt_logprobs: _common_pb2.PromptLogprobs
    def __init__(self, sample_index: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ..., finish: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class KvReady(_message.Message):
    __slots__ = ("transfer_id", "shard", "first_block_index", "block_ids", "generations", "hashes", "num_computed_tokens", "final", "first_tokens", "timeline")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    shard: int
    first_block_index: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    hashes: bytes
    num_computed_tokens: int
    final: bool
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    timeline: _common_pb2.LegTimeline
    def __init__(self, transfer_id: _Optional[int] = ..., shard: _Optional[int] = ..., first_block_index: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., hashes: _Optional[bytes] = ..., num_computed_tokens: _Optional[int] = ..., final: _Optional[bool] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., timeline: _Optional[_Union[_common_pb2.LegTimeline, _Mapping]] = ...) -> None: ...

class Renewed(_message.Message):
    __slots__ = ("renewal", "lost")
    RENEWAL_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    renewal: int
    lost: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, renewal: _Optional[int] = ..., lost: _Optional[_Iterable[int]] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("transfer_id", "reason")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    reason: _common_pb2.FailureReason
    def __init__(self, transfer_id: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.FailureReason, str]] = ...) -> None: ...
