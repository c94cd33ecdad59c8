"""Implements `Duplex` and `Source` over gRPC.

Each stream has a reader task and, if it sends, a writer task. Bounded buffers lie between them and the user
of the stream, so `send` never waits, and a receiver that does not read slows down the sender. Every end of a
stream is a StreamBroken with the reason, on both sides.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, NamedTuple, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs lack it

from baton.core.errors import Code, Failure, Reason, Refused, StreamBroken
from baton.rpc import grpc_status
from baton.rpc.streams.call_status import FirstStatus
from baton.rpc.streams.stream_limits import StreamLimits
from baton.runtime.logging import get_logger
from baton.runtime.network.mailbox import Mailbox
from baton.runtime.process.awake_timeout import TimeLimit
from baton.runtime.process.byte_budget import OverBudget
from baton.runtime.process.shared_account import Buffer

log = get_logger(__name__)

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")

ACCEPTED_KEY = "baton-accepted"
ACCEPTED = ((ACCEPTED_KEY, "1"),)
"""Initial metadata by which a client knows that the service has accepted its call; a refusal lacks it."""
CLOSED_HERE = "this end has closed the stream"
CLOSED_THERE = "the other end has closed the stream"
FULL = "the stream's buffer is full: the other end does not read fast enough"


class Codec(NamedTuple, Generic[SendT, ReceiveT]):
    """Pair of converters: sent values to protobuf, and received protobuf to values.

    `from_wire` raises Refused for an invalid message.
    """

    to_wire: Callable[[SendT], Message]
    from_wire: Callable[[Any], ReceiveT]


class _GrpcDuplex(ABC, Generic[SendT, ReceiveT]):
    """Common part of both ends; `call` has the methods `read` and `write` of grpc."""

    def __init__(self, call: Any, codec: Codec[SendT, ReceiveT], limits: StreamLimits, address: str) -> None:
        self._call = call
        self._codec = codec
        self._limits = limits
        self.address = address
        self._inbox: Mailbox[ReceiveT] = Mailbox(limits.max_received, limits.max_received_bytes)
        self._outbox: deque[tuple[Message, int]] = deque()
        self._outbox_bytes = 0
        self._buffer: Buffer | None = None
        if limits.buffers is not None:
            self._buffer = limits.buffers.open(self._cut)
        self._outbox_changed = asyncio.Event()
        self._end: tuple[str, Failure | None] | None = None
        self._closing = False
        loop = asyncio.get_running_loop()
        self._reader = loop.create_task(self._read())
        self._writer = loop.create_task(self._write())

    def send(self, message: SendT) -> None:
        if self._end is not None:
            raise StreamBroken(*self._end)
        wire_message = self._codec.to_wire(message)
        size = wire_message.ByteSize()
        if len(self._outbox) >= self._limits.max_messages or self._outbox_bytes + size > self._limits.max_bytes:
            self._break_full(FULL)
            raise StreamBroken(FULL)
        self._outbox.append((wire_message, size))
        self._outbox_bytes += size
        try:
            self._count_bytes()
        except OverBudget as error:
            self._cut(error)
            raise StreamBroken(str(error)) from error
        self._outbox_changed.set()

    async def receive(self) -> ReceiveT:
        message = await self._inbox.get()
        self._count_bytes()
        return message

    def _count_bytes(self) -> None:
        """Update the account of this stream's buffers. Raises OverBudget if they are too large."""
        if self._buffer is not None:
            self._buffer.resize(self._outbox_bytes + self._inbox.num_bytes)

    def _cut(self, error: OverBudget) -> None:
        """Break the stream, which has the most bytes of all while the memory budget is used up."""
        self._break_full(f"{error}; this stream has the most buffered bytes")

    def _break_full(self, message: str) -> None:
        """Break the stream, and drop what is not sent."""
        self._break(
            message, Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.SLOW_READER, message=message, retriable=True)
        )
        self._drop_unsent()

    def _drop_unsent(self) -> None:
        self._outbox.clear()
        self._outbox_bytes = 0
        if self._buffer is not None:
            self._buffer.close()

    def _break(self, message: str, failure: Failure | None = None) -> None:
        """End the stream. Received messages can still be read. The first reason is kept."""
        if self._end is None:
            self._end = (message, failure)
            self._inbox.close(message, failure)
            self._outbox_changed.set()
            self._hang_up()

    def _break_failed(self, error: Exception) -> None:
        """Break the stream because reading or writing raised `error`."""
        if isinstance(error, grpc.aio.AioRpcError):
            broken = grpc_status.stream_error(error, self.address)
            self._break(str(broken), broken.failure)
        else:
            self._break(f"{self.address}: {error or type(error).__name__}")

    @abstractmethod
    def _hang_up(self) -> None:
        """End the call without waiting."""

    @abstractmethod
    async def _finish_sending(self) -> None:
        """Signal the other end that all messages are sent."""

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not EOF:
                if message is None:  # how grpc's clients report a message that they cannot decode
                    raise DecodeError("the received bytes are not a valid message")
                self._inbox.put(self._codec.from_wire(message), message.ByteSize())
                self._count_bytes()
                await self._inbox.wait_for_space()
            self._break(CLOSED_THERE)
        except grpc.aio.AioRpcError as error:
            self._break_failed(error)
        except OverBudget as error:
            self._cut(error)
        except (Refused, DecodeError) as invalid:
            log.warning("message_refused", peer=self.address, error=str(invalid))
            failure = invalid.failure if isinstance(invalid, Refused) else grpc_status.malformed_message(invalid)
            self._break(failure.message, failure)
        except asyncio.CancelledError:  # grpc also raises it if the call was cancelled
            self._break("the call was cancelled")
            raise
        except Exception as error:  # grpc raises several types once a call has ended
            self._break_failed(error)

    async def _write(self) -> None:
        """Write queued messages until the stream has ended, or is closing and everything is sent."""
        try:
            while self._end is None or self._closing:
                while self._outbox:
                    message, size = self._outbox[0]
                    await self._call.write(message)
                    if not self._outbox:  # dropped meanwhile
                        return
                    self._outbox.popleft()
                    self._outbox_bytes -= size
                    self._count_bytes()
                if self._closing:
                    return await self._finish_sending()
                self._outbox_changed.clear()
                await self._outbox_changed.wait()
        except Exception as error:  # the call has ended, and the reader gets a better reason from grpc
            await asyncio.wait((self._reader,), timeout=self._limits.close_s)
            self._break_failed(error)

    def _begin_close(self) -> None:
        """Refuse further sends and receives.

        Queued messages are still written, and the reader discards what it reads until the end.
        """
        if self._end is None:
            self._end = (CLOSED_HERE, None)
            self._closing = True
            self._outbox_changed.set()
        self._inbox.close(*self._end, discard=True)

    async def _flush(self) -> None:
        """Wait up to `close_s` until queued messages are sent and the peer has closed."""
        if self._closing:
            await asyncio.wait(self._until_flushed, timeout=self._limits.close_s)

    @property
    @abstractmethod
    def _until_flushed(self) -> tuple[asyncio.Task[None], ...]: ...

    async def _stop_tasks(self) -> None:
        self._reader.cancel()
        self._writer.cancel()
        await asyncio.wait((self._reader, self._writer))
        self._drop_unsent()


class ClientDuplex(_GrpcDuplex[SendT, ReceiveT]):
    """Client end of a stream, which owns its channel. Implements `Duplex`."""

    def __init__(
        self, call: Any, channel: grpc.aio.Channel, codec: Codec[SendT, ReceiveT], limits: StreamLimits, address: str
    ) -> None:
        super().__init__(call, codec, limits, address)
        self._status = FirstStatus(call)
        self._channel = channel
        self._closed: asyncio.Task[None] | None = None
        self._on_closed: Callable[[], None] = lambda: None

    async def aclose(self) -> None:
        """Send queued messages, then wait up to `close_s` until the other end has ended the call."""
        self._begin_close()
        await asyncio.shield(self._start_close())

    def on_closed(self, listener: Callable[[], None]) -> None:
        """Call `listener` once the stream is completely closed.

        A stream that breaks closes itself, so this also happens without `aclose`.
        """
        self._on_closed = listener

    def _start_close(self) -> asyncio.Task[None]:
        """Start closing in its own task, so that a cancelled caller leaves nothing open."""
        if self._closed is None:
            self._closed = asyncio.get_running_loop().create_task(self._close())
        return self._closed

    async def _close(self) -> None:
        try:
            await self._flush()
        finally:
            self._status.cancel()
            await self._stop_tasks()
            await self._channel.close(None)
            self._on_closed()

    def _break_failed(self, error: Exception) -> None:
        super()._break_failed(self._status.error or error)

    def _hang_up(self) -> None:
        self._call.cancel()
        self._start_close()

    async def _finish_sending(self) -> None:
        await self._call.done_writing()

    @property
    def _until_flushed(self) -> tuple[asyncio.Task[None], ...]:
        return (self._writer, self._reader)


class ServerDuplex(_GrpcDuplex[SendT, ReceiveT]):
    """Server end of a stream, valid while `serve` runs. Implements `Duplex`."""

    def __init__(self, context: Any, codec: Codec[SendT, ReceiveT], limits: StreamLimits, address: str) -> None:
        self.hung_up = asyncio.Event()
        super().__init__(context, codec, limits, address)

    @property
    def refusal(self) -> Failure | None:
        """Reason why this end broke the stream, or None."""
        return None if self._end is None else self._end[1]

    async def aclose(self) -> None:
        """Send queued messages within `close_s`; the call ends when its handler returns."""
        self._begin_close()
        try:
            await self._flush()
        finally:
            self._hang_up()

    async def stop(self) -> None:
        """Close the stream and stop its tasks."""
        await self.aclose()
        await self._stop_tasks()

    def lost(self) -> None:
        """Break the stream because grpc has reported the end of the call."""
        self._break("the other end is gone")

    def _hang_up(self) -> None:
        self.hung_up.set()

    async def _finish_sending(self) -> None:
        """Do nothing: the status that the handler returns ends the call."""

    @property
    def _until_flushed(self) -> tuple[asyncio.Task[None], ...]:
        return (self._writer,)


async def dial(
    channel: grpc.aio.Channel,
    start: Callable[[grpc.aio.Channel], Any],
    codec: Codec[SendT, ReceiveT],
    *,
    limits: StreamLimits,
    limit: TimeLimit,
    address: str,
) -> ClientDuplex[SendT, ReceiveT]:
    """Open a stream and wait until the service has accepted it.

    Raises StreamBroken and closes the channel if that does not happen within `limit`.
    """
    try:
        call = start(channel)
        await wait_until_accepted(call, limit, address)
    except BaseException as error:
        await channel.close(None)
        if isinstance(error, grpc.aio.AioRpcError):
            raise grpc_status.stream_error(error, address) from error
        raise
    return ClientDuplex(call, channel, codec, limits, address)


async def wait_until_accepted(call: Any, limit: TimeLimit, address: str, key: str = ACCEPTED_KEY) -> str:
    """Wait until the service has accepted the call, and return the initial metadata `key`.

    Raises the call's error if it was refused, and StreamBroken without an answer within `limit`.
    """
    try:
        async with limit.timeout():
            metadata = dict(await call.initial_metadata())
            if key not in metadata:
                await call.read()  # raises the call's status
                raise StreamBroken(f"{address}: the server there is not Baton")
            return str(metadata[key])
    except BaseException as error:
        call.cancel()
        if isinstance(error, TimeoutError):
            raise StreamBroken(f"{address}: no answer within {limit.seconds} s") from error
        raise


async def serve(
    context: grpc.aio.ServicerContext[Any, Any],
    codec: Codec[SendT, ReceiveT],
    service: Callable[[ServerDuplex[SendT, ReceiveT]], Coroutine[Any, Any, None]],
    limits: StreamLimits,
) -> None:
    """Run the service side of one stream, in its own task.

    If the other end goes away, grpc cancels this coroutine. The service gets StreamBroken from its stream
    instead, and has `close_s` to return. Its exception, or the reason why this end broke the stream, becomes
    the status of the call.
    """
    await context.send_initial_metadata(ACCEPTED)
    stream = ServerDuplex(context, codec, limits, address=context.peer())
    loop = asyncio.get_running_loop()
    work = loop.create_task(service(stream))
    hung_up = loop.create_task(stream.hung_up.wait())
    try:
        await asyncio.wait((work, hung_up), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        stream.lost()
        raise
    finally:
        hung_up.cancel()
        # grpc may cancel this coroutine at any time, also here
        failure = await asyncio.shield(loop.create_task(_end(stream, work, limits.close_s)))
    if failure is not None:
        await grpc_status.abort(context, failure)


async def _end(stream: ServerDuplex[Any, Any], work: asyncio.Task[None], close_s: float) -> Failure | None:
    """Wait up to `close_s` until the service has returned, stop the stream, and return why it failed."""
    await asyncio.wait((work,), timeout=close_s)
    if not work.done():
        log.warning("stream_service_cancelled", peer=stream.address, waited_s=close_s)
        work.cancel()
        await asyncio.wait((work,))
    failure = _failure(work) or stream.refusal
    await stream.stop()
    return failure


def _failure(work: asyncio.Task[None]) -> Failure | None:
    """Return the failure of a service's task, unless it only reported the end of its stream."""
    error = None if work.cancelled() else work.exception()
    return (
        grpc_status.failure_of(error) if isinstance(error, Exception) and not isinstance(error, StreamBroken) else None
    )
