"""A validated call of a client: its requests, the format of its response, and the caller's identity."""

from dataclasses import dataclass
from enum import Enum

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.request import GenerateRequest
from baton.gateway.output.formats import OutputFormat, ParserOptions


class Endpoint(Enum):
    """API endpoint of a call. The value is the metric label."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GRPC = "grpc"

    @property
    def is_chat(self) -> bool:
        """True if a call is a chat: its prompt is messages, and its response is a message."""
        return self in (Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES)

    @property
    def repeats_output(self) -> bool:
        """True if the last events of a stream repeat the output, which is therefore kept."""
        return self is Endpoint.RESPONSES


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
class MessageOptions:
    """Parsing of the answers of a chat into content, reasoning and tool calls.

    parser: options of each sample's parser, without its seed of call ids.
    include_reasoning: the response has the reasoning.
    legacy_calls: calls are sent as OpenAI's older `function_call`.
    num_bytes: memory of these options.
    """

    output_format: OutputFormat
    parser: ParserOptions
    include_reasoning: bool = True
    legacy_calls: bool = False
    num_bytes: int = 0

    @property
    def may_hold_text(self) -> bool:
        """True if the parser may hold back text until a call is complete."""
        has_calls = self.output_format.tools is not None and self.parser.parse_tools
        return has_calls or self.output_format.template is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Format of a response.

    stop: stop strings. In messages they apply to the content.
    message: parsing of the text into messages; None leaves the text as it is.
    includes_stop: end the text with the stop string, or with the text of the token that ended it.
    include_usage: add usage to the last event of a stream, and with `continuous_usage` to every event.
    echo: begin each choice with the prompt.
    prompt_logprobs: add the logprobs of the prompt's tokens in the form of vLLM, and of so many alternatives.
    drops_output: return only the prompt. One token is generated, which the client does not see.
    token_ids_as_names: name tokens in logprobs by their ids.
    return_token_ids: add token ids to each choice.
    timeline: add the request's timeline to the end of the response.
    """

    stop: tuple[str, ...] = ()
    message: MessageOptions | None = None
    skip_special_tokens: bool = True
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    includes_stop: bool = False
    echo: bool = False
    prompt_logprobs: int | None = None
    drops_output: bool = False
    token_ids_as_names: bool = False
    return_token_ids: bool = False
    timeline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCall:
    """A validated call.

    requests: one request per prompt, each with `n` samples. Sample s of prompt p becomes choice `p * n + s`.
    received_s: event loop time at which the call was received.
    prompt_texts: text of each prompt for `echo`; None for one that is known only as token ids.
    ignored_fields: names of unknown fields, see `UnknownFields`.
    system_fingerprint: name of the model's weights; None if no worker has reported it.
    """

    endpoint: Endpoint
    model: str
    requests: tuple[GenerateRequest, ...]
    n: int
    output_options: OutputOptions
    received_s: float
    identity: Identity = ANONYMOUS
    prompt_texts: tuple[str | None, ...] = ()
    ignored_fields: tuple[str, ...] = ()
    system_fingerprint: str | None = None

    @property
    def request_id(self) -> bytes:
        """The id that the client sees, which is that of its first prompt's request."""
        return self.requests[0].request_id

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of most likely tokens to report per prompt token; None if the prompt has no logprobs."""
        return self.requests[0].sampling.num_prompt_logprobs

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
