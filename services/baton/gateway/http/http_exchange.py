"""One HTTP request with its response, and the routes that answer requests."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from baton.core.errors import Code, Failure, Reason
from baton.gateway.http.asgi_io import Receive, Scope, Send
from baton.gateway.http.openai_errors import Headers, error_body
from baton.gateway.input.client_call import Endpoint

CLIENT_DISCONNECTED = Failure(code=Code.CANCELLED, reason=Reason.CANCELLED, message="the client has disconnected")
IGNORED_FIELDS_HEADER = b"x-baton-ignored-fields"


ErrorBody: TypeAlias = Callable[[Failure, str | None], bytes]


@dataclass(slots=True)
class HttpExchange:
    """One HTTP request and the channel for its response.

    request_id: sent to the client as `x-request-id`.
    endpoint: label of the metric that counts the response; None if none is counted, or it was counted
        already.
    ignored_fields: unknown fields of the body, which the response names.
    error_body: formats a failure in the form of the API, with the name of the invalid field.
    """

    scope: Scope
    receive: Receive
    send: Send
    request_id: bytes
    endpoint: Endpoint | None = None
    ignored_fields: Sequence[str] = ()
    error_body: ErrorBody = error_body

    @property
    def headers(self) -> Headers:
        """Headers of every response to a call: its id, and the fields that were ignored."""
        headers = [(b"x-request-id", self.request_id.hex().encode())]
        if self.ignored_fields:
            headers.append((IGNORED_FIELDS_HEADER, ", ".join(self.ignored_fields).encode()))
        return headers


class Access(Enum):
    """Key that a route needs if the gateway has API keys."""

    OPEN = "none"
    KEY = "any key"
    ADMIN = "an admin's key"
    CALL = "any key, within its limits"
    """The handler admits the call itself, because it counts as a request of the key."""


Handler: TypeAlias = Callable[[HttpExchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """A path that the gateway serves. A GET route serves HEAD, too.

    The first line of the handler's docstring describes the route. `error_body` formats its failures.
    """

    methods: tuple[str, ...]
    access: Access
    handler: Handler
    error_body: ErrorBody = error_body

    @property
    def summary(self) -> str:
        """Description of the route, a sentence."""
        return (self.handler.__doc__ or "").split("\n\n")[0]


Routes: TypeAlias = Mapping[str, Route]
"""Routes by path. A path that ends with a slash serves every path that begins with it."""
