"""Writes messages to clients that may not read them."""

import asyncio
from typing import Any

import grpc.aio

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.request_limits import MIN_READ_RATE
from baton.runtime.logging import get_logger
from baton.runtime.network.client_connections import ClientConnections
from baton.runtime.process.byte_budget import RETRY_S

Context = grpc.aio.ServicerContext[Any, Any]

log = get_logger(__name__)

READ_S = 30.0
"""Time in which a client must read a message, besides the time for its bytes at `MIN_READ_RATE`."""


class ClientWriter:
    """Writes messages, and ends the connection of a client that does not read them in time.

    grpc's asyncio server can neither send a status while a message is unread nor reset a call. It would keep
    the message until the connection ends.
    """

    def __init__(self, connections: ClientConnections, *, read_s: float = READ_S) -> None:
        """Create a writer. `read_s`: time in which a client must read a short message."""
        self._connections = connections
        self._read_s = read_s
        self._writing: set[Context] = set()
        self._cut: set[Context] = set()

    async def write(self, context: Context, message: Any) -> None:
        """Write a message, either bytes or protobuf, and wait until grpc has sent it.

        Raises Refused if the response was cut off before. Raises CancelledError, which must not be caught, if
        the client does not read the message in time, or if its connection ends.
        """
        if context in self._cut:
            message = "the response was given up because others needed its memory; retry later"
            code, reason = Code.RESOURCE_EXHAUSTED, Reason.MEMORY_BUDGET
            raise Refused(Failure(code=code, reason=reason, message=message, retry_after_s=RETRY_S))
        num_bytes = len(message) if isinstance(message, bytes) else message.ByteSize()
        read_s = self._read_s + num_bytes / MIN_READ_RATE
        self._writing.add(context)
        try:
            async with asyncio.timeout(read_s):
                await context.write(message)
        except TimeoutError as error:
            log.info("client_does_not_read", peer=context.peer(), bytes=num_bytes, seconds=read_s)
            self.cut_off(context)
            raise asyncio.CancelledError(f"the client has not read for {read_s:g} s") from error
        except grpc.aio.InternalError as error:
            raise asyncio.CancelledError("the connection has ended") from error
        finally:
            self._writing.discard(context)

    def cut_off(self, context: Context) -> None:
        """Give up the response of a call.

        If a message is being written, it is unread, and the connection ends. Otherwise the next write fails.
        """
        if context in self._writing:
            self._connections.end(context.peer())
        elif context not in self._cut:
            self._cut.add(context)
            context.add_done_callback(self._cut.discard)  # type: ignore[arg-type]  # the stubs want a class
