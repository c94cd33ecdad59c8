"""One HTTP request with its response, and the routes that answer requests."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from baton.core.errors import Code, Failure, Reason
from baton.gateway.http.asgi_io import Message, Receive, Scope, Send
from baton.gateway.http.error_forms import ErrorForm, error_form
from baton.gateway.http.openai_errors import Headers
from baton.gateway.input.client_call import Endpoint

CLIENT_DISCONNECTED = Failure(code=Code.CANCELLED, reason=Reason.CANCELLED, message="the client has disconnected")
IGNORED_FIELDS_HEADER = b"x-baton-ignored-fields"


@dataclass(slots=True)
class HttpExchange:
    """One HTTP request and the channel for its response.

    send_message: sends a message of the response. Use `send`, which adds headers.
    request_id: sent to the client in a header of every response.
    endpoint: label of the metric that counts the response; None if none is counted, or it was counted
        already.
    ignored_fields: unknown fields of the body, which the response names.
    """

    scope: Scope
    receive: Receive
    send_message: Send
    request_id: bytes
    endpoint: Endpoint | None = None
    ignored_fields: Sequence[str] = ()

    @property
    def errors(self) -> ErrorForm:
        """Form of the errors of the API."""
        return error_form(self.scope["path"])

    async def send(self, message: Message) -> None:
        """Send a message of the response. Its headers get the request's id, and the fields that were
        ignored."""
        if message["type"] == "http.response.start":
            headers: Headers = [(name, self.request_id.hex().encode()) for name in self.errors.id_headers]
            if self.ignored_fields:
                headers.append((IGNORED_FIELDS_HEADER, ", ".join(self.ignored_fields).encode()))
            message = {**message, "headers": [*message["headers"], *headers]}
        await self.send_message(message)


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

    The first line of the handler's docstring describes the route.
    """

    methods: tuple[str, ...]
    access: Access
    handler: Handler

    @property
    def summary(self) -> str:
        """Description of the route, a sentence."""
        return (self.handler.__doc__ or "").split("\n\n")[0]


Routes: TypeAlias = Mapping[str, Route]
"""Routes by path. A path that ends with a slash serves every path that begins with it."""
