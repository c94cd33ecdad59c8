"""The HTTP application (ASGI): routes, responses and errors.

For a streamed response, one task runs the call and a second one writes its events to the connection.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.client_api import AdminApi
from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.plain_json import to_plain
from baton.core.request_limits import MIN_READ_RATE, printable
from baton.gateway.gateway_service import CallOutcome, GatewayService
from baton.gateway.http.asgi_io import (
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    WhileConnected,
    caller_of,
    in_pieces,
    read_body,
    respond,
    respond_in_pieces,
    respond_json,
)
from baton.gateway.http.id_json import format_many_ids
from baton.gateway.http.non_streaming import NonStreamingResponse
from baton.gateway.http.openai_errors import Headers, error_body, error_event, error_headers, param_of
from baton.gateway.http.slow_clients import ReadLimit, connection_of, cut_connection, cut_if_slow_reader
from baton.gateway.http.sse_stream import EventStream
from baton.gateway.http.text_json import format_long_text
from baton.gateway.input.client_call import ClientCall, Endpoint, Identity
from baton.gateway.input.response_size import ids_bytes, text_bytes
from baton.gateway.input.strict_json import parse_body
from baton.gateway.input.tokenize_calls import detokenize_body, tokenize_body
from baton.runtime.logging import get_logger
from baton.runtime.observability.metrics import CONTENT_TYPE
from baton.runtime.process import loop_time
from baton.runtime.process.byte_budget import Account, OverBudget, Reservation
from baton.runtime.process.shared_account import Buffer

log = get_logger(__name__)

Handler = Callable[["HttpExchange"], Awaitable[None]]
_CLIENT_DISCONNECTED = Failure(code=Code.CANCELLED, reason=Reason.CANCELLED, message="the client has disconnected")
DECISIONS = "/debug/decisions/"
MODELS = "/v1/models/"


@dataclass(slots=True)
class HttpExchange:
    """One HTTP request and the channel for its response.

    request_id: sent to the client as `x-request-id`.
    endpoint: label of the metric that counts the response; None if none is counted, or it was counted
        already.
    """

    scope: Scope
    receive: Receive
    send: Send
    request_id: bytes
    endpoint: Endpoint | None = None

    @property
    def id_header(self) -> Headers:
        """The `x-request-id` header."""
        return [(b"x-request-id", self.request_id.hex().encode())]


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
        self._admin = admin
        self._max_body_bytes = max_body_bytes
        self._unread_s = unread_s
        self._min_read_rate = min_read_rate
        self._metrics = metrics
        self._created = created
        self._grpc_port = grpc_port
        self._routes: Mapping[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics_text),
            DECISIONS: ("GET", self._decisions),
            MODELS: ("GET", self._model),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"scope type is {scope['type']}; must be http")  # the server offers nothing else
        exchange = HttpExchange(scope, receive, send, self._service.validator.draw_id())
        try:
            await self._handler(exchange)(exchange)
        except ClientDisconnected:
            self._count(exchange, connection_of(exchange.scope).get("refusal") or _CLIENT_DISCONNECTED)
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

    def _handler(self, exchange: HttpExchange) -> Handler:
        path = exchange.scope["path"]
        for prefix in (DECISIONS, MODELS):
            path = prefix if path.startswith(prefix) and len(path) > len(prefix) else path
        route = self._routes.get(path)
        if route is None:
            return _not_found
        method, handler = route
        given = exchange.scope["method"]
        if given == method or (given == "HEAD" and method == "GET"):
            return handler
        return _method_not_allowed(method)

    async def _completions(self, exchange: HttpExchange) -> None:
        """Complete a prompt."""
        await self._inference(exchange, Endpoint.COMPLETIONS)

    async def _chat(self, exchange: HttpExchange) -> None:
        """Complete a chat."""
        await self._inference(exchange, Endpoint.CHAT)

    async def _inference(self, exchange: HttpExchange, endpoint: Endpoint) -> None:
        exchange.endpoint = endpoint
        call = await self._receive_call(exchange, endpoint)
        await (self._stream if call.output_options.stream else self._non_streaming)(exchange, call)

    async def _receive_call(self, exchange: HttpExchange, endpoint: Endpoint) -> ClientCall:
        """Receive and validate a call. The body is freed when this returns, as is its memory budget."""
        received_s = asyncio.get_running_loop().time()
        caller = caller_of(exchange.scope)
        identity = self._service.admit_caller(caller.authorization)
        with self._service.hold_slot(identity), self._receiving() as reservation:
            body = await self._body(exchange, reservation)
            return await self._service.validator.call(
                endpoint,
                await parse_body(body),
                caller,
                received_s=received_s,
                in_thread=_is_large(body),
                request_id=exchange.request_id,
                identity=identity,
            )

    async def _body(self, exchange: HttpExchange, reservation: Reservation) -> bytes:
        """Read the request's body. Raises Refused."""
        return await read_body(exchange.scope, exchange.receive, self._max_body_bytes, reservation)

    def _receiving(self) -> Reservation:
        return self._service.budget.reserve(Account.RECEIVING, 0, "the body")

    async def _non_streaming(self, exchange: HttpExchange, call: ClientCall) -> None:
        with NonStreamingResponse(call, self._service.tokenizer, self._service.budget) as response:
            async with WhileConnected(exchange.receive):
                outcome = await self._service.run(call, response)
            self._count(exchange, None)
            num_bytes = response.finish(outcome)
            with self._read_limit(exchange.scope) as limit:
                limit.start(num_bytes)
                await respond_in_pieces(exchange.send, num_bytes, response.pieces(), headers=exchange.id_header)

    def _cut(self, exchange: HttpExchange) -> Callable[[OverBudget], None]:
        """Return a listener that aborts the connection, because its client has the most unread bytes."""
        return lambda error: cut_connection(exchange.scope, error.failure)

    async def _send_answer(self, exchange: HttpExchange, parts: Sequence[bytes], answer: Buffer) -> None:
        """Send a JSON object within the time for reading it. `answer` counts its bytes."""
        num_bytes = sum(map(len, parts))
        answer.resize(num_bytes)
        with self._read_limit(exchange.scope) as limit:
            limit.start(num_bytes)
            await respond_in_pieces(exchange.send, num_bytes, in_pieces(parts))

    async def _stream(self, exchange: HttpExchange, call: ClientCall) -> None:
        """Send events as they are produced.

        The response starts with the first event, so that a failure before it gets its own status code.
        """

        def cut(failure: Failure) -> None:
            events.drop()
            cut_connection(exchange.scope, failure)

        unread = self._service.unread.open(cut)
        events = EventStream(call, self._service.tokenizer, unread)
        try:
            async with WhileConnected(exchange.receive):
                run = asyncio.create_task(self._service.run(call, events))
                run.add_done_callback(lambda _: events.end())
                run.add_done_callback(lambda run: cut_if_slow_reader(exchange.scope, run))
                with self._read_limit(exchange.scope) as limit:
                    run.add_done_callback(lambda _: limit.start(unread.num_bytes))
                    try:
                        await self._write_events(exchange, events, run)
                    finally:
                        run.cancel()
                        await asyncio.wait((run,))
        finally:
            unread.close()

    def _read_limit(self, scope: Scope) -> ReadLimit:
        return ReadLimit(connection_of(scope).get("abort", lambda: None), self._unread_s, self._min_read_rate)

    async def _write_events(
        self, exchange: HttpExchange, events: EventStream, run: "asyncio.Task[CallOutcome]"
    ) -> None:
        has_begun = False
        while True:
            body = await events.next_piece()
            if events.is_exhausted:
                break
            if not has_begun:
                has_begun = True
                await _begin_stream(exchange)
            await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
        failure = _failure_of(run)
        if failure is not None and not has_begun and not body:
            raise Refused(failure)
        self._count(exchange, failure)
        if not has_begun:
            await _begin_stream(exchange)
        body += events.final_events(run.result()) if failure is None else error_event(failure)
        await exchange.send({"type": "http.response.body", "body": body})

    async def _models(self, exchange: HttpExchange) -> None:
        """List the models of the cluster."""
        self._identify(exchange)
        await respond_json(exchange.send, 200, {"object": "list", "data": [self._model_object()]})

    async def _model(self, exchange: HttpExchange) -> None:
        """Describe one model."""
        self._identify(exchange)
        self._service.validator.check_model(exchange.scope["path"][len(MODELS) :])
        await respond_json(exchange.send, 200, self._model_object())

    def _model_object(self) -> dict[str, Any]:
        (model,) = self._service.models
        return {
            "id": model.model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": model.max_model_len,
        }

    async def _tokenize(self, exchange: HttpExchange) -> None:
        """Convert text or messages to token ids."""
        with self._service.hold_slot(self._service.admit_caller(caller_of(exchange.scope).authorization)):
            with self._receiving() as reservation:
                body = await self._body(exchange, reservation)
                ids = await tokenize_body(self._service.validator, await parse_body(body), in_thread=_is_large(body))
            with self._service.unsent_answer(ids_bytes(ids), self._cut(exchange)) as answer:
                (tokens,) = await format_many_ids(ids)
                begin = json.dumps({"count": len(ids), "max_model_len": self._service.view.max_model_len})[:-1]
                await self._send_answer(exchange, [begin.encode(), b', "tokens": ', tokens.encode(), b"}"], answer)

    async def _detokenize(self, exchange: HttpExchange) -> None:
        """Convert token ids to text."""
        with self._service.hold_slot(self._service.admit_caller(caller_of(exchange.scope).authorization)):
            with self._receiving() as reservation:
                body = await self._body(exchange, reservation)
                text = await detokenize_body(self._service.validator, await parse_body(body))
            with self._service.unsent_answer(text_bytes(text), self._cut(exchange)) as answer:
                await self._send_answer(exchange, [b'{"prompt": ', *await format_long_text(text), b"}"], answer)

    async def _health(self, exchange: HttpExchange) -> None:
        """Report whether the gateway process is alive."""
        is_alive = self._service.health.is_alive
        await respond_json(exchange.send, 200 if is_alive else 503, {"status": "ok" if is_alive else "failed"})

    async def _ready(self, exchange: HttpExchange) -> None:
        """Report whether the cluster can serve: every role has a ready worker."""
        reasons = self._service.health.reasons
        response: dict[str, object] = {"status": "waiting" if reasons else "ready", "reasons": reasons}
        if self._is_admin(exchange):
            response |= {"links": self._service.view.links, "grpc_port": self._grpc_port}
        await respond_json(exchange.send, 503 if reasons else 200, response)

    async def _metrics_text(self, exchange: HttpExchange) -> None:
        """Return the metrics in Prometheus text format. With API keys on it needs an admin key."""
        self._service.keys.check_admin(self._identify(exchange))
        await respond(exchange.send, 200, self._metrics(), content_type=CONTENT_TYPE.encode())

    def _is_admin(self, exchange: HttpExchange) -> bool:
        try:
            return self._identify(exchange).is_admin
        except Refused:
            return False

    def _identify(self, exchange: HttpExchange) -> Identity:
        """Return the identity of the request's key. Raises Refused."""
        return self._service.keys.identify(caller_of(exchange.scope).authorization)

    async def _decisions(self, exchange: HttpExchange) -> None:
        """Return the decision records of a request. With API keys on it needs an admin key."""
        name = exchange.scope["path"][len(DECISIONS) :]
        records = await self._admin.explain(None if name == "last" else name, caller_of(exchange.scope))
        await respond_json(exchange.send, 200, {"decisions": [to_plain(record) for record in records]})

    async def _refuse(self, exchange: HttpExchange, refused: Refused) -> None:
        """Send an error response. No part of another response may have been sent."""
        failure = refused.failure
        self._count(exchange, failure)
        await respond(
            exchange.send,
            failure.code.http,
            error_body(failure, param_of(refused)),
            headers=[*exchange.id_header, *error_headers(failure)],
            close=failure.reason is Reason.DRAINING,
        )

    def _count(self, exchange: HttpExchange, failure: Failure | None) -> None:
        if exchange.endpoint is not None:
            self._service.count_result(exchange.endpoint.value, failure)
            exchange.endpoint = None


def _is_large(body: bytes) -> bool:
    return len(body) > loop_time.JSON_BYTES


def _failure_of(run: "asyncio.Task[CallOutcome]") -> Failure | None:
    """Return the failure of an ended call; None if it succeeded."""
    if run.cancelled():
        return _CLIENT_DISCONNECTED
    error = run.exception()
    if error is None or isinstance(error, Refused):
        return None if error is None else error.failure
    log.error("call_failed", exc_info=error)
    return Failure(
        code=Code.INTERNAL,
        reason=Reason.INTERNAL,
        message=f"internal error ({type(error).__name__}); see the gateway's log",
    )


async def _begin_stream(exchange: HttpExchange) -> None:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        *exchange.id_header,
    ]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})


async def _not_found(exchange: HttpExchange) -> None:
    path = exchange.scope["path"]
    known = "/v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health, /ready, /metrics"
    message = f"the path {printable(path)} does not exist; available are {known}"
    raise Refused(Failure(code=Code.NOT_FOUND, reason=Reason.INVALID_REQUEST, message=message))


def _method_not_allowed(method: str) -> Handler:
    async def refuse(exchange: HttpExchange) -> None:
        given = printable(exchange.scope["method"])
        failure = Failure(
            code=Code.INVALID_ARGUMENT,
            reason=Reason.INVALID_REQUEST,
            message=f"the method is {given}; this path only supports {method}",
        )
        await respond(exchange.send, 405, error_body(failure), headers=[(b"allow", method.encode())])

    return refuse
