"""A validated call of a client: its requests, the format of its response, and the caller's identity."""

from dataclasses import dataclass
from enum import Enum

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.request import GenerateRequest


class Endpoint(Enum):
    """API endpoint of a call. The value is the metric label."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    GRPC = "grpc"

    @property
    def is_chat(self) -> bool:
        """True for the chat completions endpoint."""
        return self is Endpoint.CHAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity and limits of a caller, from its API key. A limit of None means unlimited.

    cache_salt: salt of the tenant's block hashes.
    min_priority: lowest priority number that the caller may use; lower numbers are served first.
    """

    name: str = ""
    tenant: str = "default"
    cache_salt: bytes = b""
    is_admin: bool = False
    max_open_requests: int | None = None
    requests_per_minute: int | None = None
    min_priority: int | None = None


ANONYMOUS = Identity(is_admin=True)
"""The identity of every caller if the gateway has no API keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Format of a response.

    stop: stop strings.
    include_usage: add usage to the last event of a stream.
    return_token_ids: add token ids to each choice.
    timeline: add the request's timeline to the end of the response.
    """

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    timeline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCall:
    """A validated call.

    requests: one request per prompt, each with `n` samples. Sample s of prompt p becomes choice `p * n + s`.
    received_s: event loop time at which the call was received.
    """

    endpoint: Endpoint
    model: str
    requests: tuple[GenerateRequest, ...]
    n: int
    output_options: OutputOptions
    received_s: float
    identity: Identity = ANONYMOUS

    @property
    def request_id(self) -> bytes:
        """The id that the client sees, which is that of its first prompt's request."""
        return self.requests[0].request_id

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to report per position; None if no logprobs were requested."""
        return self.requests[0].sampling.num_logprobs


class InvalidField(Refused):
    """A request field is invalid. `param` is its name, as in the OpenAI API's errors."""

    def __init__(
        self, param: str, message: str, reason: Reason = Reason.INVALID_REQUEST, code: Code = Code.INVALID_ARGUMENT
    ) -> None:
        super().__init__(Failure(code=code, reason=reason, message=message))
        self.param = param
