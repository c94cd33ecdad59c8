"""Answers calls that convert text to tokens, and tokens to text."""

import json
from collections.abc import Callable, Sequence

from baton.gateway.gateway_service import GatewayService
from baton.gateway.http.asgi_io import caller_of, in_pieces, respond_in_pieces, respond_json
from baton.gateway.http.http_exchange import Access, HttpExchange, Route, Routes
from baton.gateway.http.inference.body_reader import BodyReader
from baton.gateway.http.output.id_json import format_many_ids
from baton.gateway.http.output.text_json import format_long_text
from baton.gateway.http.slow_clients import ReadLimits, cut_connection
from baton.gateway.input.response_size import ids_bytes, text_bytes
from baton.gateway.input.strict_json import parse_body
from baton.gateway.input.tokenize_calls import detokenize_body, tokenize_body
from baton.gateway.input.translations.messages_body import translate_count
from baton.runtime.process import loop_time
from baton.runtime.process.byte_budget import OverBudget
from baton.runtime.process.shared_account import Buffer


class TokenRoutes:
    """Serves the tokenizer."""

    def __init__(self, service: GatewayService, reader: BodyReader, read_limits: ReadLimits) -> None:
        """Create the routes. `read_limits` is the time that clients have to read a response."""
        self._service = service
        self._reader = reader
        self._read_limits = read_limits

    @property
    def routes(self) -> Routes:
        """All routes by path."""
        return {
            "/v1/messages/count_tokens": Route(("POST",), Access.CALL, self._count_tokens),
            "/tokenize": Route(("POST",), Access.CALL, self._tokenize),
            "/detokenize": Route(("POST",), Access.CALL, self._detokenize),
        }

    async def _count_tokens(self, exchange: HttpExchange) -> None:
        """Count the tokens of the prompt that a message would have."""
        validator = self._service.validator
        unknown = validator.unknown_fields()
        with self._service.hold_slot(self._service.admit_caller(caller_of(exchange.scope).authorization)):
            with self._reader.receiving() as reservation:
                body = await self._reader.body(exchange, reservation)
                parsed = await parse_body(body)
                translated = await loop_time.call(
                    len(body), loop_time.JSON_BYTES, lambda: translate_count(parsed, unknown)
                )
                with translated.in_errors():
                    ids = await tokenize_body(validator, translated.chat, unknown, size=len(body))
            self._reader.ignored(exchange, unknown.names)
            await respond_json(exchange.send, 200, {"input_tokens": len(ids)})

    async def _tokenize(self, exchange: HttpExchange) -> None:
        """Convert text or messages to token ids."""
        unknown = self._service.validator.unknown_fields()
        with self._service.hold_slot(self._service.admit_caller(caller_of(exchange.scope).authorization)):
            with self._reader.receiving() as reservation:
                body = await self._reader.body(exchange, reservation)
                ids = await tokenize_body(self._service.validator, await parse_body(body), unknown, size=len(body))
            self._reader.ignored(exchange, unknown.names)
            with self._service.unsent_answer(ids_bytes(ids), self._cut(exchange)) as answer:
                (tokens,) = await format_many_ids(ids)
                begin = json.dumps({"count": len(ids), "max_model_len": self._service.view.max_model_len})[:-1]
                await self._send_answer(exchange, [begin.encode(), b', "tokens": ', tokens.encode(), b"}"], answer)

    async def _detokenize(self, exchange: HttpExchange) -> None:
        """Convert token ids to text."""
        unknown = self._service.validator.unknown_fields()
        with self._service.hold_slot(self._service.admit_caller(caller_of(exchange.scope).authorization)):
            with self._reader.receiving() as reservation:
                body = await self._reader.body(exchange, reservation)
                text = await detokenize_body(self._service.validator, await parse_body(body), unknown)
            self._reader.ignored(exchange, unknown.names)
            with self._service.unsent_answer(text_bytes(text), self._cut(exchange)) as answer:
                await self._send_answer(exchange, [b'{"prompt": ', *await format_long_text(text), b"}"], answer)

    def _cut(self, exchange: HttpExchange) -> Callable[[OverBudget], None]:
        """Return a listener that aborts the connection, because its client has the most unread bytes."""
        return lambda error: cut_connection(exchange.scope, error.failure)

    async def _send_answer(self, exchange: HttpExchange, parts: Sequence[bytes], answer: Buffer) -> None:
        """Send a JSON object within the time for reading it. `answer` counts its bytes."""
        num_bytes = sum(map(len, parts))
        answer.resize(num_bytes)
        with self._read_limits.limit(exchange.scope) as limit:
            limit.start(num_bytes)
            await respond_in_pieces(exchange.send, num_bytes, in_pieces(parts))
