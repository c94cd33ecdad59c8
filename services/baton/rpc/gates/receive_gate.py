"""Checks a client's call before its message is read, and bounds the messages that are read at a time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.core.errors import Code, Failure, Reason, Refused
from baton.rpc.channel import UNREAD_WINDOW_BYTES
from baton.rpc.gates.client_message import CallBody, decode_message, next_message
from baton.rpc.grpc_status import abort, client_metadata, malformed_message
from baton.runtime.process.byte_budget import RETRY_S, Account, ByteBudget, OverBudget, Reservation

AUTHORIZATION_KEY = "authorization"
NEXT_MESSAGE_S = 5.0
"""Time after which a request stream ends if it brings no further message. A pending read holds the memory of
one message."""
CALL_BYTES = 16 * 1024
"""Memory of an open call, besides its messages."""
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

    async def receive(self, context: grpc.aio.ServicerContext[Any, Any], decode: Callable[[bytes], Any]) -> Any:
        """Return the decoded message of a call. A `CallBody` keeps the memory reserved that its fields take.

        Aborts the call if it is refused, sends no message in time, or one that is malformed or has too many
        fields.
        """
        try:
            self._check_key(context)
            return await self._receive(context, decode, self._receive_s)
        except Refused as refused:
            await self._refuse(context, refused.failure)
        except TimeoutError:
            message = f"the message was not received within {self._receive_s:g} s; send it within that time"
            await self._refuse(context, Failure(code=Code.RECEIVE_TIMEOUT, reason=Reason.DEADLINE, message=message))
        except StopAsyncIteration:
            message = "the call has no message; send exactly one"
            failure = Failure(code=Code.INVALID_ARGUMENT, reason=Reason.INVALID_REQUEST, message=message)
            await self._refuse(context, failure)

    async def serve_short(
        self,
        message: Any,
        context: grpc.aio.ServicerContext[Any, Any],
        serve: Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[None]],
    ) -> None:
        """Serve a call with one small response, and count it until the response is read.

        Other calls have accounts of their own for that. Aborts the call if too many are open.
        """
        try:
            held = self._budget.reserve(Account.UNREAD_CALLS, CALL_BYTES, "the call")
        except OverBudget as error:
            await self._refuse(context, error.failure)
            return
        with held:
            await serve(message, context)

    async def receive_all(
        self, context: grpc.aio.ServicerContext[Any, Any], decode: Callable[[bytes], Any]
    ) -> AsyncIterator[Any]:
        """Yield the decoded messages of a call's request stream.

        Ends when the client has sent all, or nothing for `NEXT_MESSAGE_S`. Aborts the call as `receive` does,
        or if there is no place for reading a message.
        """
        try:
            self._check_key(context)
            while True:
                yield await self._receive(context, decode, min(self._receive_s, NEXT_MESSAGE_S))
        except (StopAsyncIteration, TimeoutError):
            return
        except Refused as refused:
            await self._refuse(context, refused.failure)
        except DecodeError as error:
            await self._refuse(context, malformed_message(error))

    def _check_key(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        self._check(str(metadata.get(AUTHORIZATION_KEY, "")))

    async def _receive(
        self, context: grpc.aio.ServicerContext[Any, Any], decode: Callable[[bytes], Any], receive_s: float
    ) -> Any:
        reservation = self._budget.reserve(Account.RECEIVING, 0, "the message")
        is_handed_over = False
        try:
            with self._budget.reserve(Account.UNREAD_CALLS, UNREAD_WINDOW_BYTES, "the waiting call"):
                end_s = asyncio.get_running_loop().time() + receive_s
                async with self._slot(end_s), asyncio.timeout_at(end_s):
                    decoded = await self._decoded(context, decode, reservation)
            if isinstance(decoded, Refused):
                raise Refused(decoded.failure)  # the error itself would be in a cycle with this frame
            if isinstance(decoded, CallBody):
                decoded.hold(reservation)
                is_handed_over = True
            return decoded
        finally:
            if not is_handed_over:
                reservation.release()

    @asynccontextmanager
    async def _slot(self, end_s: float) -> AsyncIterator[None]:
        """Hold the place of one message that is being read. Raises Refused if none is free in time."""
        try:
            async with asyncio.timeout_at(end_s):
                await self._slots.acquire()
        except TimeoutError as error:
            message = "as many messages are being received as fit into memory; retry later, or raise --memory-budget"
            raise Refused(
                Failure(
                    code=Code.RESOURCE_EXHAUSTED, reason=Reason.MEMORY_BUDGET, message=message, retry_after_s=RETRY_S
                )
            ) from error
        try:
            yield
        finally:
            self._slots.release()

    async def _decoded(
        self, context: grpc.aio.ServicerContext[Any, Any], decode: Callable[[bytes], Any], reservation: Reservation
    ) -> Any:
        reservation.resize(self._max_message_bytes)
        raw = await next_message(context)
        reservation.resize(_COPIES * len(raw))
        return await decode_message(raw, decode)

    async def _refuse(self, context: grpc.aio.ServicerContext[Any, Any], failure: Failure) -> None:
        self._on_refused(failure)
        await abort(context, failure, client_metadata)
