"""`Duplex` and `Source` over gRPC.

Each stream has a task that reads and, where it sends, a task that writes; between them and its user lie
bounded buffers, so that `send` never waits and a reader that stands still is felt by the sender. Whatever
ends a stream is a StreamBroken with the reason, at both ends.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs lack it

from baton.core.errors import Code, Failure, Reason, Refused, StreamBroken
from baton.core.interfaces import Source
from baton.rpc import grpc_status
from baton.runtime.logging import get_logger
from baton.runtime.network.mailbox import Mailbox

log = get_logger(__name__)

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")

ACCEPTED_KEY = "baton-accepted"
ACCEPTED = ((ACCEPTED_KEY, "1"),)
"""The server's first word, by which a client knows that somebody has taken its call; a refusal comes without
it."""
CLOSED_HERE = "this end has closed the stream"
CLOSED_THERE = "the other end has closed the stream"
FULL = "the stream's buffer is full: the other end does not keep up"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """`max_messages`, `max_bytes`: what may wait to be sent. `max_received`: messages that may wait to be
    taken, before the network has to wait. `close_s`: how long a closing end waits for what it sent to leave,
    and for the other end to agree."""

    max_messages: int = 4096
    max_bytes: int = 64 * 2**20
    max_received: int = 64
    close_s: float = 1.0


class Codec(NamedTuple, Generic[SendT, ReceiveT]):
    """How one direction's messages are written and the other's are read; `from_wire` raises Refused for
    garbage."""

    to_wire: Callable[[SendT], Message]
    from_wire: Callable[[Any], ReceiveT]


class _GrpcDuplex(ABC, Generic[SendT, ReceiveT]):
    """What both ends share: `call` has grpc's `read` and `write`."""

    def __init__(self, call: Any, codec: Codec[SendT, ReceiveT], limits: StreamLimits, where: str) -> None:
        self._call = call
        self._codec = codec
        self._limits = limits
        self._where = where
        self._inbox: Mailbox[ReceiveT] = Mailbox(limits.max_received)
        self._outbox: deque[tuple[Message, int]] = deque()
        self._outbox_bytes = 0
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
            self._break(
                FULL, Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.SLOW_READER, message=FULL, retriable=True)
            )
            raise StreamBroken(FULL)
        self._outbox.append((wire_message, size))
        self._outbox_bytes += size
        self._outbox_changed.set()

    async def receive(self) -> ReceiveT:
        return await self._inbox.get()

    def _break(self, message: str, failure: Failure | None = None) -> None:
        """End the stream; what has arrived can still be received. The first reason stays."""
        if self._end is None:
            self._end = (message, failure)
            self._inbox.close(message, failure)
            self._outbox_changed.set()
            self._hang_up()

    @abstractmethod
    def _hang_up(self) -> None:
        """End the call, without waiting."""

    @abstractmethod
    async def _say_goodbye(self) -> None:
        """Everything is sent, and no more comes."""

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not EOF:
                if message is None:  # grpc's clients say so
                    raise DecodeError("what came is no message of ours")
                self._inbox.put(self._codec.from_wire(message))
                await self._inbox.wait_for_space()
            self._break(CLOSED_THERE)
        except grpc.aio.AioRpcError as error:
            broken = grpc_status.broken(error, self._where)
            self._break(str(broken), broken.failure)
        except (Refused, DecodeError) as garbage:
            log.warning("message_refused", peer=self._where, error=str(garbage))
            failure = garbage.failure if isinstance(garbage, Refused) else grpc_status.garbage(garbage)
            self._break(failure.message, failure)
        except asyncio.CancelledError:  # grpc raises it, too, where the call was cancelled
            self._break("the call was cancelled")
            raise
        except Exception as error:  # grpc's own, of several kinds, once a call is over
            self._break(f"{self._where}: {error or type(error).__name__}")

    async def _write(self) -> None:
        """Returns when the stream has ended, or is closing and all is sent."""
        try:
            while self._end is None or self._closing:
                while self._outbox:
                    message, size = self._outbox[0]
                    await self._call.write(message)
                    self._outbox.popleft()
                    self._outbox_bytes -= size
                if self._closing:
                    return await self._say_goodbye()
                self._outbox_changed.clear()
                await self._outbox_changed.wait()
        except Exception as error:  # grpc's own: the call is over, and its reader knows better why
            await asyncio.wait((self._reader,), timeout=self._limits.close_s)
            self._break(f"{self._where}: {error or type(error).__name__}")

    def _begin_close(self) -> None:
        """From now on nothing is sent or received; what was sent still leaves, and the reader reads to the
        end without keeping anything."""
        if self._end is None:
            self._end = (CLOSED_HERE, None)
            self._closing = True
            self._outbox_changed.set()
        self._inbox.close(*self._end, discard=True)

    async def _flush(self) -> None:
        """After `_begin_close`: wait, at most `close_s`, until what was sent has left and the other end has
        ended the stream."""
        if self._closing:
            await asyncio.wait(self._until_flushed, timeout=self._limits.close_s)

    @property
    @abstractmethod
    def _until_flushed(self) -> tuple[asyncio.Task[None], ...]: ...

    async def _stop_tasks(self) -> None:
        self._reader.cancel()
        self._writer.cancel()
        await asyncio.wait((self._reader, self._writer))


class ClientDuplex(_GrpcDuplex[SendT, ReceiveT]):
    """The end that dialled. Owns its channel, which closes with it. Implements `Duplex`."""

    def __init__(
        self, call: Any, channel: grpc.aio.Channel, codec: Codec[SendT, ReceiveT], limits: StreamLimits, where: str
    ) -> None:
        super().__init__(call, codec, limits, where)
        self._channel = channel
        self._closed: asyncio.Task[None] | None = None
        self._on_closed: Callable[[], None] = lambda: None

    async def aclose(self) -> None:
        """Send what is queued, say that no more comes, and wait, at most `close_s`, for the other end to end
        the call."""
        self._begin_close()
        await asyncio.shield(self._start_close())

    def on_closed(self, listener: Callable[[], None]) -> None:
        """Call `listener` once all of this stream is closed; without aclose(), too: a stream that breaks
        closes itself."""
        self._on_closed = listener

    def _start_close(self) -> asyncio.Task[None]:
        """In a task of its own: a caller that is cancelled meanwhile leaves nothing open."""
        if self._closed is None:
            self._closed = asyncio.get_running_loop().create_task(self._close())
        return self._closed

    async def _close(self) -> None:
        try:
            await self._flush()
        finally:
            self._call.cancel()
            await self._stop_tasks()
            await self._channel.close(None)
            self._on_closed()

    def _hang_up(self) -> None:
        self._call.cancel()
        self._start_close()

    async def _say_goodbye(self) -> None:
        await self._call.done_writing()

    @property
    def _until_flushed(self) -> tuple[asyncio.Task[None], ...]:
        return (self._writer, self._reader)


class ServerDuplex(_GrpcDuplex[SendT, ReceiveT]):
    """The end that was dialled, alive for as long as `serve` runs. Implements `Duplex`."""

    def __init__(self, context: Any, codec: Codec[SendT, ReceiveT], limits: StreamLimits, where: str) -> None:
        self.hung_up = asyncio.Event()
        super().__init__(context, codec, limits, where)

    @property
    def refusal(self) -> Failure | None:
        """Why this end broke the stream, where it did."""
        return None if self._end is None else self._end[1]

    async def aclose(self) -> None:
        """Send what is queued, within `close_s`; the call then ends with its handler."""
        self._begin_close()
        try:
            await self._flush()
        finally:
            self._hang_up()

    async def stop(self) -> None:
        await self.aclose()
        await self._stop_tasks()

    def lost(self) -> None:
        """grpc says that the call is over."""
        self._break("the other end is gone")

    def _hang_up(self) -> None:
        self.hung_up.set()

    async def _say_goodbye(self) -> None:
        """The status that the handler returns says it."""

    @property
    def _until_flushed(self) -> tuple[asyncio.Task[None], ...]:
        return (self._writer,)


async def dial(
    channel: grpc.aio.Channel,
    start: Callable[[grpc.aio.Channel], Any],
    codec: Codec[SendT, ReceiveT],
    *,
    limits: StreamLimits,
    dial_s: float,
    where: str,
) -> ClientDuplex[SendT, ReceiveT]:
    """Open a stream and wait until the service there has taken it. Raises StreamBroken, and closes the
    channel, if nobody does in `dial_s`."""
    try:
        call = start(channel)
        await accepted(call, dial_s, where)
    except BaseException as error:
        await channel.close(None)
        if isinstance(error, grpc.aio.AioRpcError):
            raise grpc_status.broken(error, where) from error
        raise
    return ClientDuplex(call, channel, codec, limits, where)


async def accepted(call: Any, dial_s: float | None, where: str, key: str = ACCEPTED_KEY) -> str:
    """Wait for the service's first word, the initial metadata `key`, and return its value. Raises, the call
    being over, its error, or StreamBroken when there is none in `dial_s`."""
    try:
        async with asyncio.timeout(dial_s):
            metadata = dict(await call.initial_metadata())
            if key not in metadata:
                await call.read()  # raises the call's status
                raise StreamBroken(f"{where}: what answers there is not Baton")
            return str(metadata[key])
    except BaseException as error:
        call.cancel()
        if isinstance(error, TimeoutError):
            raise StreamBroken(f"{where}: no answer within {dial_s} s") from error
        raise


async def serve(
    context: grpc.aio.ServicerContext[Any, Any],
    codec: Codec[SendT, ReceiveT],
    service: Callable[[ServerDuplex[SendT, ReceiveT]], Coroutine[Any, Any, None]],
    limits: StreamLimits,
) -> None:
    """Run a service's part of one stream, in a task of its own: when the other end goes away, grpc cancels
    this coroutine, but the service sees StreamBroken from its stream, and has `close_s` to return. What it
    raises, or what broke the stream here, becomes the call's status.
    """
    await context.send_initial_metadata(ACCEPTED)
    stream = ServerDuplex(context, codec, limits, where=context.peer())
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
        await asyncio.wait((work,), timeout=limits.close_s)
        if not work.done():
            log.warning("stream_service_cut_off", peer=context.peer(), waited_s=limits.close_s)
            work.cancel()
            await asyncio.wait((work,))
        failure = _failure(work) or stream.refusal
        await stream.stop()
    if failure is not None:
        await grpc_status.abort(context, failure)


def _failure(work: asyncio.Task[None]) -> Failure | None:
    """What a service ended with, where that was not just the end of its stream."""
    error = None if work.cancelled() else work.exception()
    return (
        grpc_status.failure_of(error) if isinstance(error, Exception) and not isinstance(error, StreamBroken) else None
    )


class GrpcSource(Generic[ReceiveT]):
    """The client's end of a stream that only the server sends on. Implements `Source`."""

    def __init__(self, call: Any, from_wire: Callable[[Any], ReceiveT], limits: StreamLimits, where: str) -> None:
        self._call = call
        self._from_wire = from_wire
        self._where = where
        self._inbox: Mailbox[ReceiveT] = Mailbox(limits.max_received)
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def receive(self) -> ReceiveT:
        return await self._inbox.get()

    async def aclose(self) -> None:
        self._inbox.close(CLOSED_HERE, discard=True)
        self._call.cancel()
        self._reader.cancel()
        await asyncio.wait((self._reader,))

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not EOF:
                self._inbox.put(self._from_wire(message))
                await self._inbox.wait_for_space()
            self._inbox.close(CLOSED_THERE)
        except grpc.aio.AioRpcError as error:
            broken = grpc_status.broken(error, self._where)
            self._inbox.close(str(broken), broken.failure)
        except asyncio.CancelledError:
            self._inbox.close("the call was cancelled")
            raise
        except Exception as error:
            self._inbox.close(f"{self._where}: {error or type(error).__name__}")
        finally:
            self._call.cancel()


async def listen(
    call: Any, from_wire: Callable[[Any], ReceiveT], *, limits: StreamLimits, dial_s: float, where: str
) -> GrpcSource[ReceiveT]:
    """A call that the server has taken, as a source. Raises StreamBroken or, where the service said why it
    will not, Refused."""
    try:
        await accepted(call, dial_s, where)
    except grpc.aio.AioRpcError as error:
        raise grpc_status.raised(error, where) from error
    return GrpcSource(call, from_wire, limits, where)


async def feed(
    context: grpc.aio.ServicerContext[Any, Any], source: Source[SendT], to_wire: Callable[[SendT], Message]
) -> None:
    """Send all of `source` at the pace of the other end; closes it in the end. Raises what the source
    raises."""
    try:
        await context.send_initial_metadata(ACCEPTED)
        while True:
            await context.write(to_wire(await source.receive()))
    finally:
        await source.aclose()
