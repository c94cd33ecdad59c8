"""One request of the cost fuzzing, over HTTP or gRPC."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.integration.gateway.http_gateway import request_bytes

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
GENERATE = "/baton.v1.Inference/Generate"
SHOWN_BYTES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCase:
    """A request and what is known about its answer.

    path: path of an HTTP request, or full name of a gRPC method.
    content: body of a POST, a gRPC message, or with `is_raw` all bytes that the connection sends.
    headers: lines of additional HTTP headers.
    is_raw: the bytes need a connection of their own, because their framing may be malformed.
    is_legal: the request follows the documentation, so most likely it is served.
    may_time_out: the request has so short a deadline that status 504 is right.
    """

    path: str
    content: bytes = b""
    headers: tuple[str, ...] = ()
    is_raw: bool = False
    is_legal: bool = False
    may_time_out: bool = False
    note: str = ""

    @property
    def is_grpc(self) -> bool:
        return self.path.startswith("/baton.")

    @property
    def is_heavy(self) -> bool:
        """True if the request is sent alone, so that its memory is measured exactly."""
        return len(self.content) > 128 * 1024

    @property
    def wire_bytes(self) -> bytes:
        """The request as it is sent over an HTTP connection."""
        if self.is_raw:
            return self.content
        if self.content:
            return request_bytes(self.path, self.content, *self.headers)
        return "\r\n".join((f"GET {self.path} HTTP/1.1", "host: x", *self.headers, "", "")).encode()

    def __str__(self) -> str:
        content = self.content
        if len(content) > 2 * SHOWN_BYTES:
            left_out = len(content) - 2 * SHOWN_BYTES
            shown = f"{content[:SHOWN_BYTES]!r} … {left_out:,} bytes … {content[-SHOWN_BYTES:]!r}"
        else:
            shown = repr(content)
        return " ".join(filter(None, (self.note, self.path[:SHOWN_BYTES], *self.headers, shown)))


def json_case(path: str, body: Mapping[str, Any], *, note: str = "", ensure_ascii: bool = True) -> CostCase:
    """Return a legal POST request with a JSON body."""
    content = json.dumps(body, ensure_ascii=ensure_ascii, separators=(",", ":")).encode()
    return CostCase(path=path, content=content, is_legal=True, note=note)
