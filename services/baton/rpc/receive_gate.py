"""Checks a client's call before its message is read, and bounds the messages that are read at a time.

grpc reads the message of a unary call before it calls the service. A client without a key could then make the
server buffer a message for each stream that it opens.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from baton.core.errors import Code, Failure, Reason, Refused
from baton.rpc.channel import UNREAD_WINDOW_BYTES
from baton.rpc.client_message import CallBody, decode_message
from baton.rpc.grpc_status import abort, client_metadata
from baton.runtime.process.byte_budget import Account, ByteBudget, Reservation

AUTHORIZATION_KEY = "authorization"
_COPIES = 3
"""Copies of a message while it is decoded: its bytes, the decoded message, and the fields."""


class ReceiveGate:
    """Decides which calls may send their message, and when."""

    def __init__(
        self,
        check: Callable[[str], object],
        *,
        budget: ByteBudget,
        max_message_bytes: int,
        receive_s: float,
        on_refused: Callable[[Failure], None] = lambda failure: None,
    ) -> None:
        """Create a gate.

        check: gets the authorization header of a call; raises Refused if the caller may not call.
        budget: its accounts UNREAD_CALLS and RECEIVING bound the calls that wait, and the messages.
        max_message_bytes: largest message. As many messages are read at a time as the account has place for.
        receive_s: time in which the message of a call must arrive, the wait included.
        on_refused: called for each refused call, which the service does not see.
        """
        self._check = check
        self._budget = budget
        self._max_message_bytes = max_message_bytes
        self._slots = asyncio.Semaphore(max(1, budget.limits[Account.RECEIVING] // max_message_bytes))
        self._receive_s = receive_s
        self._on_refused = on_refused

    async def receive(
        self, messages: Any, context: grpc.aio.ServicerContext[Any, Any], decode: Callable[[bytes], Any]
    ) -> Any:
        """Return the decoded message of a call. A `CallBody` keeps the memory reserved that its fields take.

        Aborts the call if it is refused, sends no message in time, or one that is malformed or has too many
        fields.
        """
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        try:
            self._check(str(metadata.get(AUTHORIZATION_KEY, "")))
            return await self._receive(messages, decode)
        except Refused as refused:
            await self._refuse(context, refused.failure)
        except TimeoutError:
            message = f"the message was not received within {self._receive_s:g} s; send it within that time"
            await self._refuse(context, Failure(code=Code.RECEIVE_TIMEOUT, reason=Reason.DEADLINE, message=message))
        except StopAsyncIteration:
            message = "the call has no message; send exactly one"
            failure = Failure(code=Code.INVALID_ARGUMENT, reason=Reason.INVALID_REQUEST, message=message)
            await self._refuse(context, failure)

    async def _receive(self, messages: Any, decode: Callable[[bytes], Any]) -> Any:
        reservation = self._budget.reserve(Account.RECEIVING, 0, "the message")
        is_handed_over = False
        try:
            with self._budget.reserve(Account.UNREAD_CALLS, UNREAD_WINDOW_BYTES, "the waiting call"):
                async with asyncio.timeout(self._receive_s), self._slots:
                    decoded = await self._decoded(messages, decode, reservation)
            if isinstance(decoded, Refused):
                raise decoded
            if isinstance(decoded, CallBody):
                decoded.hold(reservation)
                is_handed_over = True
            return decoded
        finally:
            if not is_handed_over:
                reservation.release()

    async def _decoded(self, messages: Any, decode: Callable[[bytes], Any], reservation: Reservation) -> Any:
        reservation.resize(self._max_message_bytes)
        raw = await anext(messages)
        reservation.resize(_COPIES * len(raw))
        return await decode_message(raw, decode)

    async def _refuse(self, context: grpc.aio.ServicerContext[Any, Any], failure: Failure) -> None:
        self._on_refused(failure)
        await abort(context, failure, client_metadata)


class CheckBeforeReading(grpc.aio.ServerInterceptor):
    """Lets the unary calls of some services pass a `ReceiveGate` before their message is read.

    A call is served as if its request were a stream, because grpc reads a stream's messages on demand. The
    bytes on the wire are the same. It must be the first interceptor.
    """

    def __init__(self, gate: ReceiveGate, services: Callable[[str], bool]) -> None:
        """`services`: returns True for the full name of a service that the gate guards."""
        self._gate = gate
        self._services = services

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        service = handler_call_details.method.rpartition("/")[0].lstrip("/")
        if handler is None or handler.request_streaming or not self._services(service):
            return handler
        serve = handler.unary_stream or handler.unary_unary

        async def receive_and_serve(messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            message = await self._gate.receive(messages, context, handler.request_deserializer)
            return await serve(message, context)

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(
            receive_and_serve,
            request_deserializer=None,  # the gate decodes
            response_serializer=handler.response_serializer,
        )
