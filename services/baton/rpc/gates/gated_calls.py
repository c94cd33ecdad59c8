"""Serves calls of clients so that a gate decides before their messages are read.

grpc reads the message of a unary call before it calls the service, and writes its response after the service
has returned. A client could then make the server hold a message for each call that it opens, and a response
for each call that it does not read. Here every call is served as if request and response were streams,
because grpc reads and writes their messages on demand. The bytes on the wire are the same.
"""

from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio

from baton.rpc.client_writer import ClientWriter
from baton.rpc.gates.keyless_gate import KeylessGate
from baton.rpc.gates.receive_gate import ReceiveGate

Context = grpc.aio.ServicerContext[Any, Any]
Serve = Callable[[Any, Context], Coroutine[Any, Any, None]]
"""Serves a decoded message and writes all responses."""
Receive = Callable[[Context], Coroutine[Any, Any, None]]
"""Receives the messages of a call and serves them."""


class GatedCalls(grpc.aio.ServerInterceptor):
    """Lets the calls of some services pass a gate. It must be the first interceptor."""

    def __init__(
        self,
        gate: ReceiveGate,
        keyless: KeylessGate,
        needs_key: Callable[[str], bool],
        keyless_service: str,
        writer: ClientWriter,
    ) -> None:
        """Create the interceptor.

        needs_key: returns True for the full name of a service whose calls pass `gate`.
        keyless_service: full name of the service whose calls pass `keyless`.
        writer: writes the responses.
        """
        self._gate = gate
        self._keyless = keyless
        self._needs_key = needs_key
        self._keyless_service = keyless_service
        self._writer = writer

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        service = handler_call_details.method.rpartition("/")[0].lstrip("/")
        if handler is None:
            return handler
        if service == self._keyless_service:
            return _like(handler, self._without_key(handler))
        if not self._needs_key(service):
            return handler
        return _like(handler, self._stream(handler) if handler.request_streaming else self._one_message(handler))

    def _without_key(self, handler: Any) -> Receive:
        serve = self._serve(handler)

        async def receive_and_serve(context: Context) -> None:
            await self._keyless.serve(
                context,
                handler.request_deserializer,
                serve,
                watch_writer=self._writer if handler.response_streaming else None,
            )

        return receive_and_serve

    def _one_message(self, handler: Any) -> Receive:
        serve, is_short = self._serve(handler), not handler.response_streaming

        async def receive_and_serve(context: Context) -> None:
            message = await self._gate.receive(context, handler.request_deserializer)
            if is_short:
                await self._gate.serve_short(message, context, serve)
            else:
                await serve(message, context)

        return receive_and_serve

    def _stream(self, handler: Any) -> Receive:
        """Return the method for a request stream. The service must yield its responses."""

        async def receive_and_serve(context: Context) -> None:
            received = self._gate.receive_all(context, handler.request_deserializer)
            async for response in handler.stream_stream(received, context):
                await self._writer.write(context, response)

        return receive_and_serve

    def _serve(self, handler: Any) -> Serve:
        """Return the method that serves a decoded message and writes all responses."""
        if handler.response_streaming:
            stream: Serve = handler.unary_stream
            return stream

        async def serve(message: Any, context: Context) -> None:
            await self._writer.write(context, await handler.unary_unary(message, context))

        return serve


def _like(handler: Any, method: Receive) -> Any:
    """Return a handler as `handler` for a method that reads undecoded messages and writes its responses.

    grpc keeps the error of an aborted call with the call, whose frames refer to it. Until the next garbage
    collection this cycle would hold all that the frames have, such as the message.
    """

    async def serve(_messages: Any, context: Context) -> None:
        try:
            await method(context)
        except grpc.aio.AbortError as error:
            error.__context__ = None
            raise error.with_traceback(None) from None

    return grpc.stream_stream_rpc_method_handler(
        serve, request_deserializer=None, response_serializer=handler.response_serializer
    )
