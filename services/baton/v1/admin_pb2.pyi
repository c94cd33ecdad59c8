from google.protobuf import struct_pb2 as _struct_pb2
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
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_ROLE_HYBRID: WorkerRole
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_UNHEALTHY: WorkerState

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("version", "model", "gateway", "scheduler", "workers", "open_requests")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    gateway: Process
    scheduler: Process
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    open_requests: int
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., gateway: _Optional[_Union[Process, _Mapping]] = ..., scheduler: _Optional[_Union[Process, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., open_requests: _Optional[int] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("id", "pid", "host", "address")
    ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    id: str
    pid: int
    host: str
    address: str
    def __init__(self, id: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("total", "free", "cached", "used", "landing", "quarantined", "held_for_others")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    LANDING_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    HELD_FOR_OTHERS_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    used: int
    landing: int
    quarantined: int
    held_for_others: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., used: _Optional[int] = ..., landing: _Optional[int] = ..., quarantined: _Optional[int] = ..., held_for_others: _Optional[int] = ...) -> None: ...

class Link(_message.Message):
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
    peer: WorkerId
    bytes_per_s: float
    inflight_bytes: int
    broken: bool
    transport: str
    problem: str
    pull_s: float
    exposed_s: float
    dial_s: float
    choice: str
    def __init__(self, peer: _Optional[_Union[WorkerId, _Mapping]] = ..., bytes_per_s: _Optional[float] = ..., inflight_bytes: _Optional[int] = ..., broken: _Optional[bool] = ..., transport: _Optional[str] = ..., problem: _Optional[str] = ..., pull_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., dial_s: _Optional[float] = ..., choice: _Optional[str] = ...) -> None: ...

class WorkerId(_message.Message):
    __slots__ = ("worker_id", "worker_epoch", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    worker_epoch: int
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "host", "pid", "role", "state", "model", "blocks", "block_size_tokens", "block_bytes", "waiting_seqs", "waiting_prefill_tokens", "running_seqs", "running_context_tokens", "open_leases", "links", "kv_dtype", "tiers", "reloads")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPEN_LEASES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    RELOADS_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerId
    host: str
    pid: int
    role: WorkerRole
    state: WorkerState
    model: str
    blocks: BlockCounts
    block_size_tokens: int
    block_bytes: int
    waiting_seqs: int
    waiting_prefill_tokens: int
    running_seqs: int
    running_context_tokens: int
    open_leases: int
    links: _containers.RepeatedCompositeFieldContainer[Link]
    kv_dtype: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    reloads: ReloadCounts
    def __init__(self, worker: _Optional[_Union[WorkerId, _Mapping]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., model: _Optional[str] = ..., blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., block_size_tokens: _Optional[int] = ..., block_bytes: _Optional[int] = ..., waiting_seqs: _Optional[int] = ..., waiting_prefill_tokens: _Optional[int] = ..., running_seqs: _Optional[int] = ..., running_context_tokens: _Optional[int] = ..., open_leases: _Optional[int] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., kv_dtype: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., reloads: _Optional[_Union[ReloadCounts, _Mapping]] = ...) -> None: ...

class ReloadCounts(_message.Message):
    __slots__ = ("complete", "incomplete", "late")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    complete: int
    incomplete: int
    late: int
    def __init__(self, complete: _Optional[int] = ..., incomplete: _Optional[int] = ..., late: _Optional[int] = ...) -> None: ...

class TierStatus(_message.Message):
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

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[_struct_pb2.Struct]
    def __init__(self, decisions: _Optional[_Iterable[_Union[_struct_pb2.Struct, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id", "node_leaves")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_LEAVES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    node_leaves: bool
    def __init__(self, worker_id: _Optional[str] = ..., node_leaves: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearTenantRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class ClearTenantResponse(_message.Message):
    __slots__ = ("worker_ids",)
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CacheStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheStatsResponse(_message.Message):
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

class ExportCacheRequest(_message.Message):
    __slots__ = ("tenant", "prompt_json")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_JSON_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    prompt_json: str
    def __init__(self, tenant: _Optional[str] = ..., prompt_json: _Optional[str] = ...) -> None: ...

class ExportCacheResponse(_message.Message):
    __slots__ = ("prefix", "part")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    prefix: ExportedPrefix
    part: bytes
    def __init__(self, prefix: _Optional[_Union[ExportedPrefix, _Mapping]] = ..., part: _Optional[bytes] = ...) -> None: ...

class ExportedPrefix(_message.Message):
    __slots__ = ("worker_id", "num_tokens", "num_prompt_tokens", "num_bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_bytes: int
    def __init__(self, worker_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ImportCacheRequest(_message.Message):
    __slots__ = ("target", "part")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    target: ImportTarget
    part: bytes
    def __init__(self, target: _Optional[_Union[ImportTarget, _Mapping]] = ..., part: _Optional[bytes] = ...) -> None: ...

class ImportTarget(_message.Message):
    __slots__ = ("tenant", "worker_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    worker_id: str
    def __init__(self, tenant: _Optional[str] = ..., worker_id: _Optional[str] = ...) -> None: ...

class ImportCacheResponse(_message.Message):
    __slots__ = ("worker_id", "num_tokens", "num_cached_before", "num_file_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    NUM_FILE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    num_tokens: int
    num_cached_before: int
    num_file_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_cached_before: _Optional[int] = ..., num_file_tokens: _Optional[int] = ...) -> None: ...
