from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FailureCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_CODE_UNSPECIFIED: _ClassVar[FailureCode]
    FAILURE_CODE_INVALID_ARGUMENT: _ClassVar[FailureCode]
    FAILURE_CODE_UNAUTHENTICATED: _ClassVar[FailureCode]
    FAILURE_CODE_PERMISSION_DENIED: _ClassVar[FailureCode]
    FAILURE_CODE_NOT_FOUND: _ClassVar[FailureCode]
    FAILURE_CODE_RECEIVE_TIMEOUT: _ClassVar[FailureCode]
    FAILURE_CODE_BODY_TOO_LARGE: _ClassVar[FailureCode]
    FAILURE_CODE_UNSUPPORTED_MEDIA_TYPE: _ClassVar[FailureCode]
    FAILURE_CODE_RESOURCE_EXHAUSTED: _ClassVar[FailureCode]
    FAILURE_CODE_CANCELLED: _ClassVar[FailureCode]
    FAILURE_CODE_INTERNAL: _ClassVar[FailureCode]
    FAILURE_CODE_UNAVAILABLE: _ClassVar[FailureCode]
    FAILURE_CODE_DEADLINE_EXCEEDED: _ClassVar[FailureCode]
    FAILURE_CODE_UNPROCESSABLE: _ClassVar[FailureCode]

class FailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_REASON_UNSPECIFIED: _ClassVar[FailureReason]
    FAILURE_REASON_INVALID_REQUEST: _ClassVar[FailureReason]
    FAILURE_REASON_UNSUPPORTED_FIELD: _ClassVar[FailureReason]
    FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED: _ClassVar[FailureReason]
    FAILURE_REASON_MODEL_NOT_FOUND: _ClassVar[FailureReason]
    FAILURE_REASON_BODY_TOO_LARGE: _ClassVar[FailureReason]
    FAILURE_REASON_QUEUE_FULL: _ClassVar[FailureReason]
    FAILURE_REASON_TENANT_QUOTA: _ClassVar[FailureReason]
    FAILURE_REASON_NO_CAPACITY: _ClassVar[FailureReason]
    FAILURE_REASON_TTFT_SLO: _ClassVar[FailureReason]
    FAILURE_REASON_TPOT_SLO: _ClassVar[FailureReason]
    FAILURE_REASON_NO_WORKERS: _ClassVar[FailureReason]
    FAILURE_REASON_DRAINING: _ClassVar[FailureReason]
    FAILURE_REASON_SCHEDULER_LOST: _ClassVar[FailureReason]
    FAILURE_REASON_DEADLINE: _ClassVar[FailureReason]
    FAILURE_REASON_CANCELLED: _ClassVar[FailureReason]
    FAILURE_REASON_SUPERSEDED: _ClassVar[FailureReason]
    FAILURE_REASON_WORKER_LOST: _ClassVar[FailureReason]
    FAILURE_REASON_WRONG_EPOCH: _ClassVar[FailureReason]
    FAILURE_REASON_LAYOUT_MISMATCH: _ClassVar[FailureReason]
    FAILURE_REASON_PROTOCOL_VERSION: _ClassVar[FailureReason]
    FAILURE_REASON_NO_FREE_BLOCKS: _ClassVar[FailureReason]
    FAILURE_REASON_LEASE_LOST: _ClassVar[FailureReason]
    FAILURE_REASON_TRANSFER_FAILED: _ClassVar[FailureReason]
    FAILURE_REASON_TRANSFER_TIMEOUT: _ClassVar[FailureReason]
    FAILURE_REASON_VALIDATION_FAILED: _ClassVar[FailureReason]
    FAILURE_REASON_NUMERICAL_ERROR: _ClassVar[FailureReason]
    FAILURE_REASON_SLOW_READER: _ClassVar[FailureReason]
    FAILURE_REASON_POISON: _ClassVar[FailureReason]
    FAILURE_REASON_INTERNAL: _ClassVar[FailureReason]
    FAILURE_REASON_STORE_UNAVAILABLE: _ClassVar[FailureReason]
    FAILURE_REASON_INVALID_API_KEY: _ClassVar[FailureReason]
    FAILURE_REASON_FORBIDDEN: _ClassVar[FailureReason]
    FAILURE_REASON_MEMORY_BUDGET: _ClassVar[FailureReason]
    FAILURE_REASON_INVALID_GRAMMAR: _ClassVar[FailureReason]
    FAILURE_REASON_NO_TOKEN_LEFT: _ClassVar[FailureReason]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
FAILURE_CODE_UNSPECIFIED: FailureCode
FAILURE_CODE_INVALID_ARGUMENT: FailureCode
FAILURE_CODE_UNAUTHENTICATED: FailureCode
FAILURE_CODE_PERMISSION_DENIED: FailureCode
FAILURE_CODE_NOT_FOUND: FailureCode
FAILURE_CODE_RECEIVE_TIMEOUT: FailureCode
FAILURE_CODE_BODY_TOO_LARGE: FailureCode
FAILURE_CODE_UNSUPPORTED_MEDIA_TYPE: FailureCode
FAILURE_CODE_RESOURCE_EXHAUSTED: FailureCode
FAILURE_CODE_CANCELLED: FailureCode
FAILURE_CODE_INTERNAL: FailureCode
FAILURE_CODE_UNAVAILABLE: FailureCode
FAILURE_CODE_DEADLINE_EXCEEDED: FailureCode
FAILURE_CODE_UNPROCESSABLE: FailureCode
FAILURE_REASON_UNSPECIFIED: FailureReason
FAILURE_REASON_INVALID_REQUEST: FailureReason
FAILURE_REASON_UNSUPPORTED_FIELD: FailureReason
FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED: FailureReason
FAILURE_REASON_MODEL_NOT_FOUND: FailureReason
FAILURE_REASON_BODY_TOO_LARGE: FailureReason
FAILURE_REASON_QUEUE_FULL: FailureReason
FAILURE_REASON_TENANT_QUOTA: FailureReason
FAILURE_REASON_NO_CAPACITY: FailureReason
FAILURE_REASON_TTFT_SLO: FailureReason
FAILURE_REASON_TPOT_SLO: FailureReason
FAILURE_REASON_NO_WORKERS: FailureReason
FAILURE_REASON_DRAINING: FailureReason
FAILURE_REASON_SCHEDULER_LOST: FailureReason
FAILURE_REASON_DEADLINE: FailureReason
FAILURE_REASON_CANCELLED: FailureReason
FAILURE_REASON_SUPERSEDED: FailureReason
FAILURE_REASON_WORKER_LOST: FailureReason
FAILURE_REASON_WRONG_EPOCH: FailureReason
FAILURE_REASON_LAYOUT_MISMATCH: FailureReason
FAILURE_REASON_PROTOCOL_VERSION: FailureReason
FAILURE_REASON_NO_FREE_BLOCKS: FailureReason
FAILURE_REASON_LEASE_LOST: FailureReason
FAILURE_REASON_TRANSFER_FAILED: FailureReason
FAILURE_REASON_TRANSFER_TIMEOUT: FailureReason
FAILURE_REASON_VALIDATION_FAILED: FailureReason
FAILURE_REASON_NUMERICAL_ERROR: FailureReason
FAILURE_REASON_SLOW_READER: FailureReason
FAILURE_REASON_POISON: FailureReason
FAILURE_REASON_INTERNAL: FailureReason
FAILURE_REASON_STORE_UNAVAILABLE: FailureReason
FAILURE_REASON_INVALID_API_KEY: FailureReason
FAILURE_REASON_FORBIDDEN: FailureReason
FAILURE_REASON_MEMORY_BUDGET: FailureReason
FAILURE_REASON_INVALID_GRAMMAR: FailureReason
FAILURE_REASON_NO_TOKEN_LEFT: FailureReason
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason

class WorkerRef(_message.Message):
    __slots__ = ("worker_id", "worker_epoch", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    worker_epoch: int
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class JobId(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    attempt: int
    def __init__(self, request_id: _Optional[bytes] = ..., attempt: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "reason", "message", "retry_after_s", "retriable", "blamed")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    RETRIABLE_FIELD_NUMBER: _ClassVar[int]
    BLAMED_FIELD_NUMBER: _ClassVar[int]
    code: FailureCode
    reason: FailureReason
    message: str
    retry_after_s: float
    retriable: bool
    blamed: WorkerRef
    def __init__(self, code: _Optional[_Union[FailureCode, str]] = ..., reason: _Optional[_Union[FailureReason, str]] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., retriable: _Optional[bool] = ..., blamed: _Optional[_Union[WorkerRef, _Mapping]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "min_tokens", "ignore_eos", "stop_token_ids", "num_logprobs", "logit_bias", "sampler_version", "grammar", "allowed_token_ids", "bad_words", "num_prompt_logprobs")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: int
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    sampler_version: int
    grammar: str
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    num_prompt_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[int] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., sampler_version: _Optional[int] = ..., grammar: _Optional[str] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., num_prompt_logprobs: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("num_top", "chosen", "ranks", "top_token_ids", "top_logprobs")
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    num_top: int
    chosen: bytes
    ranks: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, num_top: _Optional[int] = ..., chosen: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_cached_tokens")
    class NumCachedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_cached_tokens: _containers.ScalarMap[str, int]
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LegTimeline(_message.Message):
    __slots__ = ("worker_id", "pid", "queue_s", "compute_s", "num_computed_tokens", "num_cached_tokens", "kv_wait_s", "kv_transfer_s", "kv_exposed_s", "kv_bytes", "transport", "decode_s", "kv_admission_s", "kv_early_bytes", "first_decode_s", "kv_exposed_wait_s", "num_draft_tokens", "num_accepted_tokens", "num_preemptions", "num_recomputed_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    KV_EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    KV_ADMISSION_S_FIELD_NUMBER: _ClassVar[int]
    KV_EARLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_DECODE_S_FIELD_NUMBER: _ClassVar[int]
    KV_EXPOSED_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pid: int
    queue_s: float
    compute_s: float
    num_computed_tokens: int
    num_cached_tokens: int
    kv_wait_s: float
    kv_transfer_s: float
    kv_exposed_s: float
    kv_bytes: int
    transport: str
    decode_s: float
    kv_admission_s: float
    kv_early_bytes: int
    first_decode_s: float
    kv_exposed_wait_s: float
    num_draft_tokens: int
    num_accepted_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., pid: _Optional[int] = ..., queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., num_computed_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., kv_wait_s: _Optional[float] = ..., kv_transfer_s: _Optional[float] = ..., kv_exposed_s: _Optional[float] = ..., kv_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., decode_s: _Optional[float] = ..., kv_admission_s: _Optional[float] = ..., kv_early_bytes: _Optional[int] = ..., first_decode_s: _Optional[float] = ..., kv_exposed_wait_s: _Optional[float] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ...) -> None: ...

class KvComponent(_message.Message):
    __slots__ = ("name", "num_kv_heads", "head_dim", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_kv_heads: int
    head_dim: int
    dtype: str
    def __init__(self, name: _Optional[str] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class LayerGroup(_message.Message):
    __slots__ = ("layer_begin", "num_layers", "components", "window")
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    layer_begin: int
    num_layers: int
    components: _containers.RepeatedCompositeFieldContainer[KvComponent]
    window: int
    def __init__(self, layer_begin: _Optional[int] = ..., num_layers: _Optional[int] = ..., components: _Optional[_Iterable[_Union[KvComponent, _Mapping]]] = ..., window: _Optional[int] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("layout_version", "model_fingerprint", "tokenizer_fingerprint", "block_size_tokens", "block_bytes", "groups", "hash_scheme", "sampler_version")
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    HASH_SCHEME_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_VERSION_FIELD_NUMBER: _ClassVar[int]
    layout_version: int
    model_fingerprint: str
    tokenizer_fingerprint: str
    block_size_tokens: int
    block_bytes: int
    groups: _containers.RepeatedCompositeFieldContainer[LayerGroup]
    hash_scheme: str
    sampler_version: int
    def __init__(self, layout_version: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., block_size_tokens: _Optional[int] = ..., block_bytes: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[LayerGroup, _Mapping]]] = ..., hash_scheme: _Optional[str] = ..., sampler_version: _Optional[int] = ...) -> None: ...

class KvMemory(_message.Message):
    __slots__ = ("owner", "shard", "layer_begin", "num_layers", "head_begin", "num_heads", "agent_name", "agent_metadata", "memory_kind", "device_id", "base_address", "block_stride_bytes", "num_blocks", "generation_table_address", "generation_entry_bytes", "ucx_environment", "transfer")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEAD_BEGIN_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TABLE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_ENTRY_BYTES_FIELD_NUMBER: _ClassVar[int]
    UCX_ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    owner: WorkerRef
    shard: int
    layer_begin: int
    num_layers: int
    head_begin: int
    num_heads: int
    agent_name: str
    agent_metadata: bytes
    memory_kind: str
    device_id: int
    base_address: int
    block_stride_bytes: int
    num_blocks: int
    generation_table_address: int
    generation_entry_bytes: int
    ucx_environment: str
    transfer: str
    def __init__(self, owner: _Optional[_Union[WorkerRef, _Mapping]] = ..., shard: _Optional[int] = ..., layer_begin: _Optional[int] = ..., num_layers: _Optional[int] = ..., head_begin: _Optional[int] = ..., num_heads: _Optional[int] = ..., agent_name: _Optional[str] = ..., agent_metadata: _Optional[bytes] = ..., memory_kind: _Optional[str] = ..., device_id: _Optional[int] = ..., base_address: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., generation_table_address: _Optional[int] = ..., generation_entry_bytes: _Optional[int] = ..., ucx_environment: _Optional[str] = ..., transfer: _Optional[str] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("worker", "num_blocks", "num_host_blocks", "num_disk_blocks")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    num_blocks: int
    num_host_blocks: int
    num_disk_blocks: int
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., num_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_disk_blocks: _Optional[int] = ...) -> None: ...
