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
    UNSUPPORTED_FIELD = "unsupported_field"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    BODY_TOO_LARGE = "body_too_large"
    QUEUE_FULL = "queue_full"
    TENANT_QUOTA = "tenant_quota"
    INVALID_API_KEY = "invalid_api_key"
    FORBIDDEN = "forbidden"
    NO_CAPACITY = "no_capacity"
    TTFT_SLO = "ttft_slo"
    TPOT_SLO = "tpot_slo"
    NO_WORKERS = "no_workers"
    DRAINING = "draining"
    SCHEDULER_LOST = "scheduler_lost"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    WORKER_LOST = "worker_lost"
    WRONG_EPOCH = "wrong_epoch"
    LAYOUT_MISMATCH = "layout_mismatch"
    PROTOCOL_VERSION = "protocol_version"
    NO_FREE_BLOCKS = "no_free_blocks"
    LEASE_LOST = "lease_lost"
    TRANSFER_FAILED = "transfer_failed"
    TRANSFER_TIMEOUT = "transfer_timeout"
    VALIDATION_FAILED = "validation_failed"
    NUMERICAL_ERROR = "numerical_error"
    SLOW_READER = "slow_reader"
    POISON = "poison"
    STORE_UNAVAILABLE = "store_unavailable"
    INTERNAL = "internal"


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
