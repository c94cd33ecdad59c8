"""Error codes, reasons and exceptions shared by all services, with the HTTP and gRPC status of each."""

from dataclasses import dataclass
from enum import Enum

from baton.core.ids import WorkerRef


class Code(Enum):
    """Class of a failure. `http` and `grpc` are the statuses that the gateway's two APIs return for it."""

    INVALID_ARGUMENT = (400, "INVALID_ARGUMENT")
    UNAUTHENTICATED = (401, "UNAUTHENTICATED")
    PERMISSION_DENIED = (403, "PERMISSION_DENIED")
    NOT_FOUND = (404, "NOT_FOUND")
    RECEIVE_TIMEOUT = (408, "DEADLINE_EXCEEDED")
    BODY_TOO_LARGE = (413, "INVALID_ARGUMENT")
    UNSUPPORTED_MEDIA_TYPE = (415, "INVALID_ARGUMENT")
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


class Reason(Enum):
    """Exact cause of a failure. The value appears in responses, logs and metric labels."""

    INVALID_REQUEST = "invalid_request"
    """A field is missing, malformed or out of range."""
    UNSUPPORTED_FIELD = "unsupported_field"
    """A field would change the response and is not implemented."""
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    """The prompt, or prompt and `max_tokens` together, exceed the context length of the model."""
    MODEL_NOT_FOUND = "model_not_found"
    """No worker serves a model of this name."""
    BODY_TOO_LARGE = "body_too_large"
    """The request body exceeds `--max-body-bytes`."""
    QUEUE_FULL = "queue_full"
    """The queue of the scheduler or of the chosen workers is full."""
    TENANT_QUOTA = "tenant_quota"
    """The API key has reached its own limit."""
    INVALID_API_KEY = "invalid_api_key"
    """The API key is missing or wrong."""
    FORBIDDEN = "forbidden"
    """The API key does not allow this call."""
    NO_CAPACITY = "no_capacity"
    """No worker has, or will soon have, the KV blocks or batch slots that the request needs."""
    TTFT_SLO = "ttft_slo"
    """The predicted TTFT exceeds the SLO of the request."""
    TPOT_SLO = "tpot_slo"
    """The predicted TPOT exceeds the SLO of the request."""
    NO_WORKERS = "no_workers"
    """A role has no healthy worker."""
    DRAINING = "draining"
    """The service is shutting down and takes no new requests."""
    SCHEDULER_LOST = "scheduler_lost"
    """No scheduler answered in time."""
    DEADLINE = "deadline"
    """The deadline of the request has passed."""
    CANCELLED = "cancelled"
    """The client or the gateway cancelled the request."""
    SUPERSEDED = "superseded"
    """A higher attempt of the same request has replaced this job."""
    WORKER_LOST = "worker_lost"
    """The worker died or cannot be reached."""
    WRONG_EPOCH = "wrong_epoch"
    """The message was meant for another incarnation of the worker."""
    LAYOUT_MISMATCH = "layout_mismatch"
    """Two workers have different KV layouts."""
    PROTOCOL_VERSION = "protocol_version"
    """Two services speak incompatible versions of the protocol."""
    NO_FREE_BLOCKS = "no_free_blocks"
    """The decode worker had no free KV blocks within `--pull-wait-s`."""
    LEASE_LOST = "lease_lost"
    """The lease of a transfer ended before its blocks were read."""
    TRANSFER_FAILED = "transfer_failed"
    """A read of KV failed."""
    TRANSFER_TIMEOUT = "transfer_timeout"
    """A read of KV passed its deadline."""
    VALIDATION_FAILED = "validation_failed"
    """A read of KV did not see the announced blocks, twice."""
    NUMERICAL_ERROR = "numerical_error"
    """The model computed logits that are not finite."""
    SLOW_READER = "slow_reader"
    """The client left too much of its stream unread."""
    POISON = "poison"
    """Several workers died while they ran this request."""
    STORE_UNAVAILABLE = "store_unavailable"
    """Redis cannot be reached."""
    INTERNAL = "internal"
    """A bug in Baton. The log of the gateway has the details."""


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
