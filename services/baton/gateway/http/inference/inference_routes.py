"""Answers calls that generate text, in the form of each API.

For a streamed response, one task runs the call and a second one writes its events to the connection.
"""

import asyncio

from baton.core.errors import Code, Failure, Reason, Refused
from baton.gateway.gateway_service import CallOutcome, GatewayService
from baton.gateway.http.asgi_io import WhileConnected, caller_of, respond_in_pieces
from baton.gateway.http.http_exchange import CLIENT_DISCONNECTED, Access, HttpExchange, Route, Routes
from baton.gateway.http.inference.api_forms import CHAT_FORM, COMPLETIONS_FORM, MESSAGES_FORM, RESPONSES_FORM
from baton.gateway.http.inference.body_reader import BodyReader
from baton.gateway.http.output.api_form import ApiForm, ResponseServices, StreamedResponse
from baton.gateway.http.output.event_queue import EventQueue
from baton.gateway.http.slow_clients import ReadLimits, cut_connection, cut_if_slow_reader
from baton.gateway.input.client_call import ClientCall
from baton.gateway.input.strict_json import parse_body
from baton.gateway.input.translations.json_echo import encode_echo
from baton.runtime.logging import get_logger
from baton.runtime.process import loop_time

log = get_logger(__name__)


class InferenceRoutes:
    """Serves the routes that generate text, in the forms of their APIs."""

    def __init__(self, service: GatewayService, reader: BodyReader, read_limits: ReadLimits) -> None:
        """Create the routes. `read_limits` is the time that clients have to read the end of a response."""
        self._service = service
        self._reader = reader
        self._read_limits = read_limits

    @property
    def routes(self) -> Routes:
        """All routes by path."""
        return {
            "/v1/chat/completions": Route(("POST",), Access.CALL, self._chat),
            "/v1/completions": Route(("POST",), Access.CALL, self._completions),
            "/v1/responses": Route(("POST",), Access.CALL, self._create_response),
            "/v1/messages": Route(("POST",), Access.CALL, self._create_message),
        }

    @property
    def _responses(self) -> ResponseServices:
        return ResponseServices(tokenizer=self._service.tokenizer, budget=self._service.budget)

    def count(self, exchange: HttpExchange, failure: Failure | None) -> None:
        """Count the result of a call, once."""
        if exchange.endpoint is not None:
            self._service.count_result(exchange.endpoint.value, failure)
            exchange.endpoint = None

    async def _completions(self, exchange: HttpExchange) -> None:
        """Complete a prompt."""
        await self._answer(exchange, COMPLETIONS_FORM)

    async def _chat(self, exchange: HttpExchange) -> None:
        """Complete a chat."""
        await self._answer(exchange, CHAT_FORM)

    async def _create_response(self, exchange: HttpExchange) -> None:
        """Complete a chat in the form of OpenAI's responses, without state on the server."""
        await self._answer(exchange, RESPONSES_FORM)

    async def _create_message(self, exchange: HttpExchange) -> None:
        """Complete a chat in the form of Anthropic's messages."""
        await self._answer(exchange, MESSAGES_FORM)

    async def _answer(self, exchange: HttpExchange, form: ApiForm) -> None:
        exchange.endpoint = form.endpoint
        call, echo = await self._receive_call(exchange, form)
        await (self._stream if call.output_options.stream else self._collect)(exchange, form, call, echo)

    async def _receive_call(self, exchange: HttpExchange, form: ApiForm) -> tuple[ClientCall, bytes]:
        """Receive and validate a call. Return it with the fields that its response repeats.

        The body is freed when this returns, as is its memory budget.
        """
        received_s = asyncio.get_running_loop().time()
        caller = caller_of(exchange.scope)
        identity = self._service.admit_caller(caller.authorization)
        with self._service.hold_slot(identity), self._reader.receiving() as reservation:
            body = await self._reader.body(exchange, reservation)
            parsed, unknown = await parse_body(body), self._service.validator.unknown_fields()
            translated = await loop_time.call(len(body), loop_time.JSON_BYTES, lambda: form.translate(parsed, unknown))
            with translated.in_errors():
                call = await self._service.validator.call(
                    form.endpoint,
                    translated.chat,
                    caller,
                    received_s=received_s,
                    size=len(body),
                    request_id=exchange.request_id,
                    identity=identity,
                )
            self._reader.ignored(exchange, (*unknown.names, *call.ignored_fields))
            echo = await loop_time.call(len(body), loop_time.JSON_BYTES, lambda: encode_echo(translated.echo))
            return call, echo

    async def _collect(self, exchange: HttpExchange, form: ApiForm, call: ClientCall, echo: bytes) -> None:
        """Send a response that is not streamed."""
        with form.collect(call, echo, self._responses) as response:
            async with WhileConnected(exchange.receive):
                outcome = await self._service.run(call, response)
            num_bytes = await response.finish(outcome)
            self.count(exchange, None)
            with self._read_limits.limit(exchange.scope) as limit:
                limit.start(num_bytes)
                await respond_in_pieces(exchange.send, num_bytes, response.pieces())

    async def _stream(self, exchange: HttpExchange, form: ApiForm, call: ClientCall, echo: bytes) -> None:
        """Send events as they are produced.

        The response starts with the first event, so that a failure before it gets its own status code.
        """

        def cut(failure: Failure) -> None:
            queue.drop()
            cut_connection(exchange.scope, failure)

        unread = self._service.unread.open(cut)
        queue = EventQueue(unread)
        try:
            with form.stream(call, echo, self._responses, queue) as response:
                async with WhileConnected(exchange.receive):
                    run = asyncio.create_task(self._run(call, response))
                    run.add_done_callback(lambda _: queue.end())
                    run.add_done_callback(lambda run: cut_if_slow_reader(exchange.scope, run))
                    with self._read_limits.limit(exchange.scope) as limit:
                        run.add_done_callback(lambda _: limit.start(queue.num_bytes))
                        try:
                            await self._write_events(exchange, queue, response, run)
                        finally:
                            run.cancel()
                            await asyncio.wait((run,))
        finally:
            unread.close()

    async def _run(self, call: ClientCall, response: StreamedResponse) -> CallOutcome:
        outcome = await self._service.run(call, response)
        await response.finish(outcome)
        return outcome

    async def _write_events(
        self, exchange: HttpExchange, queue: EventQueue, response: StreamedResponse, run: "asyncio.Task[CallOutcome]"
    ) -> None:
        has_begun = False
        while True:
            body = await queue.next_piece()
            if queue.is_exhausted:
                break
            if not has_begun:
                has_begun = True
                await _begin_stream(exchange)
            await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
        failure = _failure_of(run)
        if failure is not None:
            if not has_begun and not body:
                raise Refused(failure)
            response.fail(failure)
        self.count(exchange, failure)
        if not has_begun:
            await _begin_stream(exchange)
        while not queue.is_exhausted:
            await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
            body = await queue.next_piece()
        await exchange.send({"type": "http.response.body", "body": body})


def _failure_of(run: "asyncio.Task[CallOutcome]") -> Failure | None:
    """Return the failure of an ended call; None if it succeeded."""
    if run.cancelled():
        return CLIENT_DISCONNECTED
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
    ]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
