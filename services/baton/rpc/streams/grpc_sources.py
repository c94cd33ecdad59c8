"""Implements `Source` over gRPC: streams on which only the server sends."""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs lack it

from baton.core.interfaces import Source
from baton.rpc import grpc_status
from baton.rpc.streams.grpc_streams import ACCEPTED, CLOSED_HERE, CLOSED_THERE, wait_until_accepted
from baton.rpc.streams.stream_limits import StreamLimits
from baton.runtime.network.mailbox import Mailbox
from baton.runtime.process.awake_timeout import TimeLimit

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")


class GrpcSource(Generic[ReceiveT]):
    """Client end of a stream on which only the server sends. Implements `Source`."""

    def __init__(self, call: Any, from_wire: Callable[[Any], ReceiveT], limits: StreamLimits, address: str) -> None:
        self._call = call
        self._from_wire = from_wire
        self._address = address
        self._inbox: Mailbox[ReceiveT] = Mailbox(limits.max_received, limits.max_received_bytes)
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
                self._inbox.put(self._from_wire(message), message.ByteSize())
                await self._inbox.wait_for_space()
            self._inbox.close(CLOSED_THERE)
        except grpc.aio.AioRpcError as error:
            broken = grpc_status.stream_error(error, self._address)
            self._inbox.close(str(broken), broken.failure)
        except asyncio.CancelledError:
            self._inbox.close("the call was cancelled")
            raise
        except Exception as error:
            self._inbox.close(f"{self._address}: {error or type(error).__name__}")
        finally:
            self._call.cancel()


async def listen(
    call: Any, from_wire: Callable[[Any], ReceiveT], *, limits: StreamLimits, limit: TimeLimit, address: str
) -> GrpcSource[ReceiveT]:
    """Wait until the service has accepted a server-streaming call, and return it as a source.

    Raises Refused with the service's reason, or StreamBroken.
    """
    try:
        await wait_until_accepted(call, limit, address)
    except grpc.aio.AioRpcError as error:
        raise grpc_status.call_error(error, address) from error
    return GrpcSource(call, from_wire, limits, address)


async def feed(
    context: grpc.aio.ServicerContext[Any, Any], source: Source[SendT], to_wire: Callable[[SendT], Message]
) -> None:
    """Send all messages of `source` as fast as the other end reads, then close it. Raises its exceptions."""
    try:
        await context.send_initial_metadata(ACCEPTED)
        while True:
            await context.write(to_wire(await source.receive()))
    finally:
        await source.aclose()
