"""Cross-origin requests from browsers (CORS): allowed for configured origins only.

Credentials are never allowed: API keys travel in a header that a page sets itself, so no cookie is needed.
"""

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.core.errors import Failure
from baton.gateway.http.asgi_io import Message, Receive, Scope, Send
from baton.gateway.http.http_exchange import IGNORED_FIELDS_HEADER
from baton.gateway.http.openai_errors import Headers

ANY = "*"
MAX_REQUESTED_BYTES = 4096
"""Longest list of request headers that a preflight request may ask for."""
PREFLIGHT_AGE_S = 600
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]*\Z")
_EXPOSED = b", ".join((b"x-request-id", b"request-id", IGNORED_FIELDS_HEADER, b"retry-after", b"x-should-retry"))


class App(Protocol):
    """The application that is wrapped."""

    @property
    def count_rejected(self) -> Callable[[Failure], None]:
        """Counts a request that the connection rejects before its head is complete."""
        ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def methods_of(self, path: str) -> Sequence[str]:
        """Return the methods that a path supports; none if it does not exist."""
        ...


class Cors:
    """Wraps an application: answers preflight requests, and lets pages of allowed origins read responses.

    Requests of other origins are served, too, but without CORS headers: the browser hides the response from
    the page.
    """

    def __init__(self, app: App, origins: Sequence[str]) -> None:
        """Wrap `app`. Each origin is one such as `https://example.com`, or `*` for all."""
        self._app = app
        self.count_rejected = app.count_rejected
        self._origins = frozenset(origin.lower().encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin = headers.get(b"origin")
        if not self._origins or origin is None:
            await self._app(scope, receive, self._varied(send))
            return
        if not self._is_allowed(origin):
            await self._app(scope, receive, self._varied(send))
        elif scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await self._answer_preflight(scope, headers, origin, send)
        else:
            more = [(b"access-control-expose-headers", _EXPOSED), *self._origin_headers(origin)]
            await self._app(scope, receive, _with_headers(send, more))

    def _is_allowed(self, origin: bytes) -> bool:
        return ANY.encode() in self._origins or origin.lower() in self._origins

    def _origin_headers(self, origin: bytes) -> Headers:
        if ANY.encode() in self._origins:
            return [(b"access-control-allow-origin", b"*")]
        return [(b"access-control-allow-origin", origin), (b"vary", b"origin")]

    def _varied(self, send: Send) -> Send:
        """Add `Vary: Origin`, for caches, unless the response is the same for all origins."""
        if not self._origins or ANY.encode() in self._origins:
            return send
        return _with_headers(send, [(b"vary", b"origin")])

    async def _answer_preflight(self, scope: Scope, headers: dict[bytes, bytes], origin: bytes, send: Send) -> None:
        methods = ", ".join(self._app.methods_of(scope["path"])).encode()
        asked = headers.get(b"access-control-request-headers", b"")
        answer = self._origin_headers(origin)
        if methods:
            answer += [
                (b"access-control-allow-methods", methods),
                (b"access-control-max-age", b"%d" % PREFLIGHT_AGE_S),
            ]
        if asked and len(asked) <= MAX_REQUESTED_BYTES and _HEADER_NAMES.match(asked):
            answer.append((b"access-control-allow-headers", asked))
        await send({"type": "http.response.start", "status": 204, "headers": answer})
        await send({"type": "http.response.body", "body": b""})


def _with_headers(send: Send, more: Headers) -> Send:
    """Return a `send` that adds headers to the response."""

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return send_more
