"""Error codes, reasons and exceptions shared by all services, with the HTTP and gRPC status of each."""

from dataclasses import dataclass
from enum import Enum
from typing import Self

from baton.core.ids import WorkerRef

QUEUE_FULL_RETRY_S = 1.0
"""Seconds after which a client should retry if a queue is full."""


class Code(Enum):
    """Class of a failure. `http` and `grpc` are the statuses that the gateway's two APIs return for it."""

    INVALID_ARGUMENT = (400, "INVALID_ARGUMENT")
    UNAUTHENTICATED = (401, "UNAUTHENTICATED")
    PERMISSION_DENIED = (403, "PERMISSION_DENIED")
    NOT_FOUND = (404, "NOT_FOUND")
    RECEIVE_TIMEOUT = (408, "DEADLINE_EXCEEDED")
    BODY_TOO_LARGE = (413, "INVALID_ARGUMENT")
    UNSUPPORTED_MEDIA_TYPE = (415, "INVALID_ARGUMENT")
    UNPROCESSABLE = (422, "FAILED_PRECONDITION")
    RESOURCE_EXHAUSTED = (429, "RESOURCE_EXHAUSTED")
    CANCELLED = (499, "CANCELLED")
    INTERNAL = (500, "INTERNAL")
    UNAVAILABLE = (503, "UNAVAILABLE")
    DEADLINE_EXCEEDED = (504, "DEADLINE_EXCEEDED")

    @property
    def http(self) -> int:
        """The HTTP status."""
        return self.value[0]

    @property
    def grpc(self) -> str:
        """The name of the gRPC status."""
        return self.value[1]


class ReasonFamily(Enum):
    """Group of related reasons. The value is the heading of the group on the errors page."""

    REQUEST = "Invalid requests"
    API_KEY = "API keys"
    OVERLOAD = "Overload"
    CLUSTER = "Cluster not ready"
    WORKER = "Lost workers and failed KV transfers"
    CLIENT = "Deadlines and cancellation"
    INTERNAL = "Failures of the model or of Baton"


class Reason(Enum):
    """Exact cause of a failure. The value appears in responses, logs and metric labels.

    `codes` are the codes with which a client can receive the reason, the usual one first. The text below a
    member has two parts: what happened, and what the client or the operator does about it. The errors page is
    generated from them.
    """

    _value_: str
    family: ReasonFamily
    codes: tuple[Code, ...]

    def __new__(cls, value: str, family: ReasonFamily, *codes: Code) -> Self:
        member = object.__new__(cls)
        member._value_ = value
        member.family = family
        member.codes = codes
        return member

    INVALID_REQUEST = (
        "invalid_request",
        ReasonFamily.REQUEST,
        Code.INVALID_ARGUMENT,
        Code.NOT_FOUND,
        Code.UNSUPPORTED_MEDIA_TYPE,
    )
    """A field, header, path or id is missing, malformed, out of range or unknown. A wrong method gets 405.

    Do not retry. Fix what the message names.
    """
    UNSUPPORTED_FIELD = "unsupported_field", ReasonFamily.REQUEST, Code.INVALID_ARGUMENT
    """A field would change the response and is not implemented, or is unknown and `--strict-fields` is set.

    Do not retry. Remove the field; the message names an alternative if there is one.
    """
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded", ReasonFamily.REQUEST, Code.INVALID_ARGUMENT
    """The prompt, or prompt and `max_tokens` together, exceed the context length of the model.

    Do not retry. Shorten the prompt or lower `max_tokens`. The limit is `--max-model-len`.
    """
    MODEL_NOT_FOUND = "model_not_found", ReasonFamily.REQUEST, Code.NOT_FOUND
    """No worker serves a model of this name.

    Do not retry. Use a name from `/v1/models`. The name is set by `--served-model-name`.
    """
    INVALID_GRAMMAR = "invalid_grammar", ReasonFamily.REQUEST, Code.INVALID_ARGUMENT
    """A JSON schema, regular expression or grammar is invalid, not supported or too large.

    Do not retry. The message says where.
    """
    NO_TOKEN_LEFT = "no_token_left", ReasonFamily.REQUEST, Code.UNPROCESSABLE
    """The rules of a request together allow no token at some position: its grammar, `allowed_token_ids`,
    `bad_words`, `logit_bias` and `min_tokens`. Or the grammar is too expensive to follow.

    Do not retry. Relax one of them.
    """
    BODY_TOO_LARGE = "body_too_large", ReasonFamily.REQUEST, Code.BODY_TOO_LARGE
    """The request body exceeds `--max-body-bytes`, or the HTTP headers exceed 64 KiB.

    Do not retry. Send less, or raise `--max-body-bytes`.
    """
    INVALID_API_KEY = "invalid_api_key", ReasonFamily.API_KEY, Code.UNAUTHENTICATED
    """The API key is missing or wrong.

    Do not retry. Send a valid key. `baton key` adds one to the file of `--api-keys`.
    """
    FORBIDDEN = "forbidden", ReasonFamily.API_KEY, Code.PERMISSION_DENIED
    """The API key does not allow this call.

    Do not retry. Use a key with `admin: true`.
    """
    TENANT_QUOTA = "tenant_quota", ReasonFamily.API_KEY, Code.RESOURCE_EXHAUSTED
    """The API key has reached its limit of open requests or of requests per minute.

    Retry after `Retry-After`: 1 s, or the time until the rate allows the next request. The operator can raise
    the limits of the key.
    """
    QUEUE_FULL = "queue_full", ReasonFamily.OVERLOAD, Code.RESOURCE_EXHAUSTED
    """The gateway, its connections, the queue of the scheduler or the queue of the chosen workers is full.

    Retry after `Retry-After`: 1 s, or the predicted time until the queue is short enough. If it lasts, add
    workers. The limits are `--max-open-requests`, `--max-connections`, `--max-queued-requests`,
    `--max-worker-queue-s` and `--max-queued-jobs`.
    """
    MEMORY_BUDGET = "memory_budget", ReasonFamily.OVERLOAD, Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT
    """The request needs more memory of a gateway, scheduler or worker than its `--memory-budget` leaves.

    Retry after `Retry-After` (1 s). Without that header the request never fits: lower `max_tokens`, `n` or
    `top_logprobs`, or raise the setting that the message names. It has the arithmetic.
    """
    NO_CAPACITY = "no_capacity", ReasonFamily.OVERLOAD, Code.RESOURCE_EXHAUSTED
    """No worker has, or will soon have, the KV blocks or batch slots that the request needs.

    Retry after `Retry-After` (1 s). Without that header the request fits no worker: lower `max_tokens` or
    `n`, or raise `--kv-memory` or `--max-num-seqs`.
    """
    TTFT_SLO = "ttft_slo", ReasonFamily.OVERLOAD, Code.RESOURCE_EXHAUSTED
    """The predicted TTFT exceeds the SLO of the request, or the request has waited for as long as its SLO
    allows.

    Retry after `Retry-After`: the predicted excess (at most 60 s), or the time waited. Otherwise relax
    `slo.ttft_ms`, or add prefill workers. `--admission off` disables this reason.
    """
    TPOT_SLO = "tpot_slo", ReasonFamily.OVERLOAD, Code.RESOURCE_EXHAUSTED
    """The predicted TPOT exceeds the SLO of the request.

    Retry after `Retry-After` (at most 60 s). Otherwise relax `slo.tpot_ms`, or add decode workers.
    `--admission off` disables this reason.
    """
    NO_FREE_BLOCKS = "no_free_blocks", ReasonFamily.OVERLOAD, Code.RESOURCE_EXHAUSTED
    """The decode worker had no free KV blocks within `--pull-wait-s`.

    Retry. If it lasts, add decode workers or raise `--kv-memory`.
    """
    NO_WORKERS = "no_workers", ReasonFamily.CLUSTER, Code.UNAVAILABLE
    """A role has no healthy worker.

    Retry after `Retry-After` (1 s). `baton status` shows which role is missing.
    """
    DRAINING = "draining", ReasonFamily.CLUSTER, Code.UNAVAILABLE
    """The service is shutting down and takes no new requests.

    Retry after `Retry-After` (1 s), on a new connection.
    """
    SCHEDULER_LOST = "scheduler_lost", ReasonFamily.CLUSTER, Code.UNAVAILABLE
    """No scheduler answered within `--scheduler-wait-s`.

    Retry after `Retry-After` (at least 1 s). The operator restarts the scheduler or repairs its network.
    """
    STORE_UNAVAILABLE = "store_unavailable", ReasonFamily.CLUSTER, Code.UNAVAILABLE
    """Redis cannot be reached. Only decision records and other admin calls depend on it.

    Retry later. The operator restores Redis (`--redis-url`).
    """
    WORKER_LOST = "worker_lost", ReasonFamily.WORKER, Code.UNAVAILABLE
    """Workers died or could not be reached, in `--max-attempts` attempts.

    Retry after `Retry-After` (1 s). The operator looks for crashes in the logs of the workers.
    """
    WRONG_EPOCH = "wrong_epoch", ReasonFamily.WORKER, Code.UNAVAILABLE
    """The message was meant for an earlier incarnation of the worker.

    Retry.
    """
    SUPERSEDED = "superseded", ReasonFamily.WORKER, Code.CANCELLED
    """A higher attempt of the same request has replaced this job.

    None. The higher attempt continues the request.
    """
    LAYOUT_MISMATCH = "layout_mismatch", ReasonFamily.WORKER, Code.UNAVAILABLE
    """Two services have different KV layouts or samplers.

    Retry after `Retry-After` (1 s). The operator gives all workers the same model, `--dtype`,
    `--block-size-tokens` and release.
    """
    PROTOCOL_VERSION = "protocol_version", ReasonFamily.WORKER, Code.UNAVAILABLE
    """Two services speak incompatible versions of the protocol.

    Retry after `Retry-After` (1 s). The operator upgrades the older services.
    """
    LEASE_LOST = "lease_lost", ReasonFamily.WORKER, Code.UNAVAILABLE
    """The lease of a transfer ended before its blocks were read.

    Retry. If it lasts, check the link in `baton status` or raise `--lease-s`.
    """
    TRANSFER_FAILED = "transfer_failed", ReasonFamily.WORKER, Code.UNAVAILABLE
    """A read of KV failed.

    Retry. If it lasts, check the link in `baton status`.
    """
    TRANSFER_TIMEOUT = "transfer_timeout", ReasonFamily.WORKER, Code.UNAVAILABLE
    """A read of KV passed its deadline.

    Retry. If it lasts, check the link in `baton status`, or raise `--transfer-deadline-min-s` and
    `--transfer-deadline-max-s`.
    """
    VALIDATION_FAILED = "validation_failed", ReasonFamily.WORKER, Code.UNAVAILABLE
    """A read of KV did not see the announced blocks, twice.

    Retry. If it lasts, look at `baton_validation_failures_total` by `field`.
    """
    DEADLINE = "deadline", ReasonFamily.CLIENT, Code.DEADLINE_EXCEEDED, Code.RECEIVE_TIMEOUT
    """The deadline of the request has passed. With 408 the request was not received within
    `--receive-deadline-s`.

    Raise `x-baton-timeout-ms` (default `--request-timeout-s`), or ask for fewer tokens, then retry. With
    `Retry-After` no worker was free in time.
    """
    CANCELLED = "cancelled", ReasonFamily.CLIENT, Code.CANCELLED
    """The client or the gateway cancelled the request. After a disconnect only logs and metrics show it.

    None.
    """
    SLOW_READER = "slow_reader", ReasonFamily.CLIENT, Code.CANCELLED
    """The client left more than `--stream-buffer-bytes` of its stream unread.

    Read the stream continuously, then retry.
    """
    NUMERICAL_ERROR = "numerical_error", ReasonFamily.INTERNAL, Code.INTERNAL
    """The model computed logits that are not finite.

    Do not retry the same request. The operator tries another `--dtype` and checks the weights.
    """
    POISON = "poison", ReasonFamily.INTERNAL, Code.INTERNAL
    """Three workers in a row died while they ran this request, the last one while it ran alone.

    Do not retry. The operator finds the cause in the logs of these workers.
    """
    INTERNAL = "internal", ReasonFamily.INTERNAL, Code.INTERNAL, Code.UNAVAILABLE
    """A bug in Baton. The log of the gateway has the details.

    Retry once. Report it with the log if it lasts.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure as it is sent between processes.

    message: text for people; names the value, the rule and the remedy.
    retry_after_s: seconds after which a client should retry; None if a retry does not help.
    retriable: another attempt on other workers may succeed.
    blamed: the worker at fault if it is not the sender, so that the gateway can avoid it.
    """

    code: Code
    reason: Reason
    message: str
    retry_after_s: float | None = None
    retriable: bool = False
    blamed: WorkerRef | None = None


class BatonError(Exception):
    """Base class of every error that Baton raises deliberately. The message says how to fix the problem."""


class ConfigError(BatonError):
    """A flag, environment variable or config key is unknown or has an invalid value."""


class ModelError(BatonError):
    """A model cannot be served. The message names the file or property that is missing or unsupported."""


class IllegalTransition(BatonError):
    """A state machine was asked for a transition that its table does not contain. This is a bug in the
    caller."""


class LayoutMismatch(BatonError):
    """Two workers have different `KvLayout`s. The message names the field that differs."""


class StreamBroken(BatonError):
    """The other end of a stream is gone, or the stream's bounded buffer is full.

    Messages sent since the last acknowledgement may or may not have arrived. `failure` is the reason that the
    other end gave, or None.
    """

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class StoreUnavailable(BatonError):
    """Redis cannot be reached or does not answer in time. The request path never waits for Redis."""


class Refused(BatonError):
    """A request or job is rejected; `failure` is sent instead of a result."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def invalid(message: str, reason: Reason = Reason.INVALID_REQUEST) -> Refused:
    """Return a `Refused` for a client error (HTTP 400). `message` names the field, the rule and the
    remedy."""
    return Refused(Failure(code=Code.INVALID_ARGUMENT, reason=reason, message=message))
