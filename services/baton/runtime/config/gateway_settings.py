"""Settings of the gateway: the ports that clients use, the default SLO, and the limits of requests."""

import re
from pathlib import Path

from baton.core.errors import ConfigError
from baton.core.request import Slo
from baton.runtime.config.byte_sizes import MIB
from baton.runtime.config.config_base import Config, config, setting
from baton.runtime.config.durations import parse_durations

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,@*]+", re.IGNORECASE)


@config
class FrontDoorSettings(Config):
    """Ports that clients use."""

    http_port: int = setting(8000, help="port of the HTTP API; 0 picks a free one", minimum=0, maximum=65535)
    grpc_port: int = setting(8001, help="port of the gRPC API; 0 picks a free one", minimum=0, maximum=65535)
    cors_allow_origins: tuple[str, ...] = setting(
        (),
        help="origins whose pages may call the HTTP API from a browser, separated by commas, such as "
        "https://example.com; * allows all",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for origin in self.cors_allow_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_allow_origins has {origin!r}; must be *, or an origin without a path, such as "
                    "https://example.com:8443"
                )
        if self.http_port and self.http_port == self.grpc_port:
            raise ConfigError(
                f"http_port and grpc_port are both {self.http_port}; choose different ports, or 0 for a free one"
            )


@config
class ViewSettings(Config):
    """Live view at the gateway's admin port."""

    view_hosts: tuple[str, ...] = setting(
        (),
        help="further host names, separated by commas, at which the live view may be opened; the address of --host "
        "and names of the loopback are always allowed",
    )


@config
class SloSettings(Config):
    """Default SLO, which the gateway attaches to requests without their own."""

    slo: str = setting(
        "", help="default SLO for requests that set none, such as ttft=500ms,tpot=50ms; unset gives them no SLO"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_slo(self.slo)

    @property
    def default_slo(self) -> Slo:
        """The parsed value of `slo`."""
        return parse_slo(self.slo)


@config
class RequestSettings(Config):
    """Limits and retries of client requests in the gateway."""

    request_timeout_s: float = setting(600.0, help="deadline of a request that sets none", unit="seconds", above=0)
    receive_deadline_s: float = setting(
        30.0, help="maximum time to receive the head and body of a request", unit="seconds", above=0
    )
    max_body_bytes: int = setting(
        8 * MIB,
        help="maximum size of a request body; a larger one gets 413 and is not parsed",
        unit="bytes",
        minimum=1024,
    )
    api_keys: Path | None = setting(None, help="file with API keys, see `baton key`; unset disables authentication")
    max_connections: int = setting(
        4096,
        help="maximum number of client connections per gateway, for HTTP and for gRPC each; more are refused",
        minimum=1,
    )
    strict_fields: bool = setting(
        False,
        help="refuse requests with unknown fields; else these are ignored and named in the response header "
        "x-baton-ignored-fields",
    )
    max_open_requests: int = setting(1024, help="maximum number of open requests per gateway; more get 429", minimum=1)
    max_attempts: int = setting(
        8,
        help="maximum number of placements of one request; the last failure is then returned to the client",
        minimum=1,
    )
    scheduler_wait_s: float = setting(
        20.0,
        help="time that a new request waits while no scheduler is reachable; then it gets 503",
        unit="seconds",
        above=0,
    )
    stream_buffer_bytes: int = setting(
        256 * 1024,
        help="maximum output that a client has not read yet, per streamed request; a client that leaves more unread "
        "for 2 s is cut off",
        unit="bytes",
        minimum=4096,
    )
    max_response_bytes: int = setting(
        128 * MIB,
        help="maximum size of a response that is not streamed, estimated from n, max_tokens and logprobs; a request "
        "above it gets 400",
        unit="bytes",
        minimum=64 * 1024,
    )


@config
class ChatSettings(Config):
    """Chats in the gateway: the format of the model's answers, and templates of requests."""

    tool_parser: str | None = setting(
        None,
        help="format of the model's tool calls, such as hermes, qwen3_coder, mistral, llama3_json, glm45, "
        "deepseek_v31, kimi_k2, gpt_oss, gemma4 or none; unset chooses by the chat template",
    )
    reasoning_parser: str | None = setting(
        None,
        help="format of the model's reasoning, such as qwen3, deepseek_r1, glm45, gpt_oss, mistral, gemma4 or none; "
        "unset chooses by the chat template",
    )
    allow_request_chat_template: bool = setting(
        False,
        help="accept chat templates in requests; a template is a program, which runs in a sandbox for up to 0.5 s",
    )


def parse_slo(text: str) -> Slo:
    """Parse `ttft=500ms,tpot=50ms`, or one of the two. Raises ConfigError if it is malformed."""
    try:
        terms = parse_durations(text, ("ttft", "tpot"))
    except ValueError as error:
        raise ConfigError(f"slo: {error}") from error
    if not all(terms.values()):
        raise ConfigError(f"slo: durations must be above 0, got {text!r}")
    return Slo(ttft_s=terms.get("ttft"), tpot_s=terms.get("tpot"))
