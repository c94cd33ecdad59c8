"""One call of a client, validated: the requests that it becomes, and what its answer has to look like."""

from dataclasses import dataclass
from enum import Enum

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.request import GenerateRequest


class Endpoint(Enum):
    """The value is the metric label."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    GRPC = "grpc"

    @property
    def is_chat(self) -> bool:
        return self is Endpoint.CHAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a caller is, by its API key. `cache_salt`: of its tenant. Limits of None do not limit;
    `min_priority`: lower numbers go first."""

    name: str = ""
    tenant: str = "default"
    cache_salt: bytes = b""
    is_admin: bool = False
    max_open_requests: int | None = None
    requests_per_minute: int | None = None
    min_priority: int | None = None


ANYBODY = Identity(is_admin=True)
"""Where there are no keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the answer is made from tokens and written."""

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    timeline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCall:
    """`requests`: one a prompt, each with `n` samples; choice `p * n + s` of the answer is sample s of prompt
    p. `received_s` is loop time."""

    endpoint: Endpoint
    model: str
    requests: tuple[GenerateRequest, ...]
    n: int
    shape: Shape
    received_s: float
    identity: Identity = ANYBODY

    @property
    def request_id(self) -> bytes:
        """What the client is told: the id of its first prompt's request."""
        return self.requests[0].request_id

    @property
    def num_logprobs(self) -> int | None:
        return self.requests[0].sampling.num_logprobs


class InvalidField(Refused):
    """The client's mistake in one field; `param` is its name, as OpenAI's errors have it."""

    def __init__(
        self, param: str, message: str, reason: Reason = Reason.INVALID_REQUEST, code: Code = Code.INVALID_ARGUMENT
    ) -> None:
        super().__init__(Failure(code=code, reason=reason, message=message))
        self.param = param
