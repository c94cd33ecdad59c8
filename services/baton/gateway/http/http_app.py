"""The HTTP application (ASGI): finds the route of a request, and answers failures."""

from collections.abc import Callable, Mapping, Sequence

from baton.core.client_api import AdminApi
from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.request_limits import MIN_READ_RATE, printable
from baton.gateway.gateway_service import GatewayService
from baton.gateway.http.asgi_io import (
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    caller_of,
    respond,
)
from baton.gateway.http.http_exchange import CLIENT_DISCONNECTED, Access, HttpExchange, Route, Routes
from baton.gateway.http.inference.body_reader import BodyReader
from baton.gateway.http.inference.inference_routes import InferenceRoutes
from baton.gateway.http.inference.token_routes import TokenRoutes
from baton.gateway.http.openai_errors import error_headers, param_of
from baton.gateway.http.site.site_routes import SiteRoutes
from baton.gateway.http.slow_clients import ReadLimits, connection_of
from baton.runtime.logging import get_logger

log = get_logger(__name__)

METHOD_NOT_ALLOWED = 405
_ABSENT: Mapping[str, str] = {
    "/v1/responses/input_tokens": "counting is not implemented for items; send messages to /tokenize",
    "/v1/responses/": "responses are not stored; the response to POST /v1/responses has everything",
    "/v1/conversations": "conversations are not stored; send all items in input of /v1/responses",
    "/v1/messages/batches": "batches are not implemented; send many requests to /v1/messages at once",
    "/v1/batches": "batches are not implemented; send many requests at once",
    "/v1/files": "files are not stored; send their text in the request",
    "/v1/assistants": "assistants are not implemented; send all messages to /v1/chat/completions",
    "/v1/threads": "threads are not stored; send all messages to /v1/chat/completions",
    **dict.fromkeys(
        ("/v1/embeddings", "/v1/audio", "/v1/images", "/v1/moderations", "/v1/rerank", "/v1/score"),
        "only text generation is implemented",
    ),
}
"""Reasons why paths of the OpenAI and Anthropic APIs do not exist, by their beginning."""


class HttpApp:
    """Serves every request of the HTTP API."""

    def __init__(
        self,
        service: GatewayService,
        admin: AdminApi,
        *,
        max_body_bytes: int,
        unread_s: float,
        metrics: Callable[[], bytes],
        created: int,
        grpc_port: int = 0,
        min_read_rate: int = MIN_READ_RATE,
    ) -> None:
        """Create the application.

        max_body_bytes: largest accepted request body.
        unread_s, min_read_rate: a client must read the n bytes that are left when its call has ended within
            `unread_s + n / min_read_rate` seconds.
        metrics: returns the text of `/metrics`.
        created: Unix time reported as `created` of the model.
        grpc_port: port of this gateway's gRPC API, which `/ready` tells an operator; 0 if there is none.
        """
        self._service = service
        reader, read_limits = BodyReader(service, max_body_bytes), ReadLimits(unread_s, min_read_rate)
        self._inference = InferenceRoutes(service, reader, read_limits)
        tokens = TokenRoutes(service, reader, read_limits)
        site = SiteRoutes(
            service,
            admin,
            metrics=metrics,
            created=created,
            grpc_port=grpc_port,
            all_routes=lambda: self.routes,
        )
        self.routes: Routes = {
            **self._inference.routes,
            **tokens.routes,
            **site.routes,
        }
        self._prefixes = tuple(path for path in self.routes if path.endswith("/"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"scope type is {scope['type']}; must be http")  # the server offers nothing else
        exchange = HttpExchange(scope, receive, send, self._service.validator.draw_id())
        try:
            await self._answer(exchange)
        except ClientDisconnected:
            self._inference.count(exchange, connection_of(exchange.scope).get("refusal") or CLIENT_DISCONNECTED)
        except Refused as refused:
            await self._refuse(exchange, refused)
        except Exception as error:
            log.exception("request_failed", request_id=exchange.request_id, path=scope["path"])
            request_id = exchange.request_id.hex()
            message = f"internal error ({type(error).__name__}); see the gateway's log for request {request_id}"
            await self._refuse(exchange, Refused(Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=message)))

    def count_rejected(self, failure: Failure) -> None:
        """Count a request that the connection rejected before its head was complete, so its endpoint is
        unknown."""
        self._service.count_result("", failure)

    def methods_of(self, path: str) -> Sequence[str]:
        """Return the methods that a path supports; none if it does not exist."""
        route = self._route(path)
        return () if route is None else route.methods

    def _route(self, path: str) -> Route | None:
        for prefix in self._prefixes:
            path = prefix if path.startswith(prefix) and len(path) > len(prefix) else path
        return self.routes.get(path)

    async def _answer(self, exchange: HttpExchange) -> None:
        """Answer a request with the handler of its route, if its key may use the route."""
        path, method = exchange.scope["path"], exchange.scope["method"]
        route = self._route(path)
        if route is None:
            raise _not_found(path, self.routes)
        if method not in route.methods and not (method == "HEAD" and "GET" in route.methods):
            await _refuse_method(exchange, route.methods)
            return
        if route.access in (Access.KEY, Access.ADMIN):
            identity = self._service.keys.identify(caller_of(exchange.scope).authorization)
            if route.access is Access.ADMIN:
                self._service.keys.check_admin(identity)
        await route.handler(exchange)

    async def _refuse(self, exchange: HttpExchange, refused: Refused) -> None:
        """Send an error response. No part of another response may have been sent."""
        failure, errors = refused.failure, exchange.errors
        status = errors.status(failure)
        self._inference.count(exchange, failure)
        await respond(
            exchange.send,
            status,
            errors.body(failure, param_of(refused), exchange.request_id.hex(), status),
            headers=error_headers(failure),
            close=failure.reason is Reason.DRAINING,
        )


def _not_found(path: str, routes: Routes) -> Refused:
    reason = next((reason for begin, reason in _ABSENT.items() if path.startswith(begin)), None)
    known = ", ".join(routes)
    message = f"the path {printable(path)} does not exist; {reason or f'available are {known}'}"
    return Refused(Failure(code=Code.NOT_FOUND, reason=Reason.INVALID_REQUEST, message=message))


async def _refuse_method(exchange: HttpExchange, methods: Sequence[str]) -> None:
    """Answer that a path does not support the method."""
    supported = ", ".join(methods)
    failure = Failure(
        code=Code.INVALID_ARGUMENT,
        reason=Reason.INVALID_REQUEST,
        message=f"the method is {printable(exchange.scope['method'])}; this path only supports {supported}",
    )
    body = exchange.errors.body(failure, None, exchange.request_id.hex(), METHOD_NOT_ALLOWED)
    await respond(exchange.send, METHOD_NOT_ALLOWED, body, headers=[(b"allow", supported.encode())])
