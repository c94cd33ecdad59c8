"""Every way in which Baton says no, with the status a client sees. See the status contract in
docs/architecture.md."""

from dataclasses import dataclass
from enum import Enum

from baton.core.ids import WorkerRef


class Code(Enum):
    """What class of failure this is; `http` and `grpc` are the statuses that both front doors answer with."""

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
        return self.value[0]

    @property
    def grpc(self) -> str:
        return self.value[1]


class Reason(Enum):
    """Why exactly; the value is the machine-readable word in responses, logs and metric labels."""

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
    """A failure as it crosses a process boundary. `retriable`: another attempt elsewhere may succeed.
    `blamed`: the worker at fault where it is not the sender, so that the gateway can avoid it."""

    code: Code
    reason: Reason
    message: str
    retry_after_s: float | None = None
    retriable: bool = False
    blamed: WorkerRef | None = None


class BatonError(Exception):
    """Base of every error that Baton raises on purpose. The message names what to do."""


class ConfigError(BatonError):
    """A flag, environment variable or config key is unknown or has a value that cannot be used."""


class ModelError(BatonError):
    """A model cannot be served; the message names what it has or lacks."""


class IllegalTransition(BatonError):
    """A lifecycle was asked for a move that its table does not allow: a bug in the caller."""


class LayoutMismatch(BatonError):
    """Two workers do not share one `KvLayout`; the message names the field."""


class StreamBroken(BatonError):
    """The other end of a stream is gone, or the stream's bounded buffer is full. Nothing sent since the last
    acknowledgement is known to have arrived. `failure`: why the other end ended it, where it said so."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class StoreUnavailable(BatonError):
    """Redis cannot be reached or does not answer in time. Nothing on the path of a request waits for it."""


class Refused(BatonError):
    """The request or job is answered with a `Failure` instead of a result."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def invalid(message: str, reason: Reason = Reason.INVALID_REQUEST) -> Refused:
    """The client's mistake (HTTP 400); the message says which field and what would be right."""
    return Refused(Failure(code=Code.INVALID_ARGUMENT, reason=reason, message=message))
