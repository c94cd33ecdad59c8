"""Bounds the memory of calls that need no key: health checks.

Anyone may make them, so they have an account of their own and cannot displace calls with a key.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio

from baton.core.errors import Code, Failure, Reason, Refused
from baton.rpc.channel import UNREAD_WINDOW_BYTES
from baton.rpc.client_writer import ClientWriter
from baton.rpc.gates.client_message import next_message
from baton.rpc.gates.receive_gate import CALL_BYTES
from baton.rpc.grpc_status import abort, client_metadata
from baton.runtime.process.byte_budget import RETRY_S, Account, ByteBudget, OverBudget, Reservation

READS = 8
"""Messages that are received at a time. grpc accepts each up to the largest message of the server. They are
in no account, because their number is constant."""
READ_S = 0.5
"""Time in which a message must arrive once it is being received. A health check has a few bytes, which are
sent together with the call."""
WAIT_S = 5.0
"""Time that a call waits until its message is received."""
CALLS_PER_CONNECTION = 4

Context = grpc.aio.ServicerContext[Any, Any]


class _CallsOfConnection:
    """The calls of one connection. Only one message of them is received at a time."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.reading = asyncio.Lock()


class KeylessGate:
    """Decides which calls without a key may send their message, and when.

    Connections take turns. If the account is full, the oldest watch is ended for a new call; its client opens
    another one.
    """

    def __init__(self, budget: ByteBudget, *, wait_s: float = WAIT_S, read_s: float = READ_S) -> None:
        """Create a gate.

        budget: its account KEYLESS_CALLS bounds the open calls.
        wait_s: longest time until the message of a call is received.
        read_s: time in which it must then arrive.
        """
        self._budget = budget
        self._wait_s = wait_s
        self._read_s = read_s
        self._slots = asyncio.Semaphore(READS)
        self._connections: dict[str, _CallsOfConnection] = {}
        self._watches: dict[asyncio.Task[None], tuple[Reservation, Callable[[], None]]] = {}

    async def serve(
        self,
        context: Context,
        decode: Callable[[bytes], Any],
        serve: Callable[[Any, Context], Coroutine[Any, Any, None]],
        *,
        watch_writer: ClientWriter | None,
    ) -> None:
        """Receive the message of a call and serve it.

        watch_writer: writes the responses of a watch, a call that stays open until its client ends it.

        Aborts the call if there are too many, or if it sends no message in time, or a malformed one.
        """
        try:
            with self._call_of(context.peer()) as connection, self._reserved() as held:
                message = await self._receive(context, decode, connection)
                held.resize(CALL_BYTES)
                if watch_writer is not None:
                    await self._watch(serve(message, context), held, partial(watch_writer.cut_off, context))
                else:
                    await serve(message, context)
        except Refused as refused:
            await abort(context, refused.failure, client_metadata)

    @contextmanager
    def _call_of(self, peer: str) -> Iterator[_CallsOfConnection]:
        """Count a call of a connection. Raises Refused if it has too many."""
        connection = self._connections.setdefault(peer, _CallsOfConnection())
        if connection.num_calls >= CALLS_PER_CONNECTION:
            raise _too_many(f"a connection may have {CALLS_PER_CONNECTION} calls to this service at a time")
        connection.num_calls += 1
        try:
            yield connection
        finally:
            connection.num_calls -= 1
            if not connection.num_calls:
                del self._connections[peer]

    def _reserved(self) -> Reservation:
        """Reserve the memory of a call without a message. Ends the oldest watches if there is too little."""
        while True:
            try:
                return self._budget.reserve(Account.KEYLESS_CALLS, CALL_BYTES + UNREAD_WINDOW_BYTES, "the call")
            except OverBudget:
                if not self._watches:
                    raise
            task = next(iter(self._watches))
            reservation, cut_off = self._watches.pop(task)
            reservation.release()
            cut_off()
            task.cancel()

    async def _watch(self, serving: Coroutine[Any, Any, None], held: Reservation, cut_off: Callable[[], None]) -> None:
        """Serve a watch in its own task. Raises Refused if it is ended for a new call."""
        task = asyncio.create_task(serving)
        self._watches[task] = held, cut_off
        try:
            await asyncio.wait((task,))
            if task not in self._watches:
                raise _too_many("too many watches are open, and this is the oldest")
            await task
        finally:
            self._watches.pop(task, None)
            task.cancel()
            await asyncio.wait((task,))

    async def _receive(self, context: Context, decode: Callable[[bytes], Any], connection: _CallsOfConnection) -> Any:
        end_s = asyncio.get_running_loop().time() + self._wait_s
        async with _in_time(connection.reading, end_s), _in_time(self._slots, end_s):
            try:
                async with asyncio.timeout(self._read_s):
                    decoded = decode(await next_message(context))
            except TimeoutError as error:
                message = f"the message was not received within {self._read_s:g} s; send it together with the call"
                failure = Failure(code=Code.RECEIVE_TIMEOUT, reason=Reason.DEADLINE, message=message)
                raise Refused(failure) from error
            except StopAsyncIteration as error:
                message = "the call has no message; send exactly one"
                failure = Failure(code=Code.INVALID_ARGUMENT, reason=Reason.INVALID_REQUEST, message=message)
                raise Refused(failure) from error
        if isinstance(decoded, Refused):
            raise Refused(decoded.failure)  # the error itself would be in a cycle with this frame
        return decoded


class _in_time:  # noqa: N801 - used like a function
    """Holds a lock or a place of a semaphore. Entering raises Refused if that takes until `end_s`."""

    def __init__(self, lock: asyncio.Lock | asyncio.Semaphore, end_s: float) -> None:
        self._lock = lock
        self._end_s = end_s

    async def __aenter__(self) -> None:
        try:
            async with asyncio.timeout_at(self._end_s):
                await self._lock.acquire()
        except TimeoutError as error:
            raise _too_many("many calls to this service are being received") from error

    async def __aexit__(self, *error: object) -> None:
        self._lock.release()


def _too_many(what: str) -> Refused:
    return Refused(
        Failure(
            code=Code.RESOURCE_EXHAUSTED,
            reason=Reason.QUEUE_FULL,
            message=f"{what}; retry later",
            retry_after_s=RETRY_S,
        )
    )
