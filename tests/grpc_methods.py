"""Lists all gRPC methods of Baton's protobuf files, and calls any of them with arbitrary bytes."""

import asyncio
import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

import baton.v1
import baton.wire.v1

OK, CANCELLED = grpc.StatusCode.OK, grpc.StatusCode.CANCELLED
EXPECTED_CODES = frozenset(
    (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ),
)
"""Status codes for errors of a caller. UNKNOWN, INTERNAL and UNAVAILABLE would mean an error of the
server."""


@dataclass(frozen=True, slots=True)
class Method:
    service: str
    name: str
    message: Any
    """Class of the request message."""
    streams_requests: bool

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"


def all_methods() -> Iterator[Method]:
    """Yield all methods, from the generated descriptors, so that new methods are included."""
    for package in (baton.v1, baton.wire.v1):
        for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            if not info.name.endswith("_pb2"):
                continue
            for service in importlib.import_module(info.name).DESCRIPTOR.services_by_name.values():
                for method in service.methods:
                    yield Method(
                        service.full_name, method.name, method.input_type._concrete_class, method.client_streaming
                    )


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call.

    code: its status; None if it was still running or the status was lost.
    replies: the first replies.
    """

    code: grpc.StatusCode | None
    details: str
    replies: tuple[bytes, ...] = ()


async def call(
    channel: grpc.aio.Channel,
    path: str,
    messages: Iterable[bytes],
    *,
    wait_s: float = 1.0,
    max_replies: int = 4,
    keep_open: bool = False,
) -> CallEnd:
    """Call a method of any kind with raw messages, and cancel after `wait_s` or `max_replies`.

    keep_open: do not half-close the stream after the messages.
    """
    for _ in range(10):
        end_of_call = await _call(channel, path, tuple(messages), wait_s, max_replies, keep_open)
        if end_of_call.details != LOST_STATUS:
            return end_of_call
    return CallEnd(None, "", end_of_call.replies)


LOST_STATUS = "Internal error from Core"
"""Details that grpc's asyncio client reports instead of the status if a call ends before all messages are
sent."""


async def _call(
    channel: grpc.aio.Channel, path: str, messages: tuple[bytes, ...], wait_s: float, max_replies: int, keep_open: bool
) -> CallEnd:
    is_unary = len(messages) == 1 and not keep_open  # sent as one unary request
    stream: Any = channel.unary_stream(path)(messages[0]) if is_unary else channel.stream_stream(path)()
    replies: list[bytes] = []
    try:
        async with asyncio.timeout(wait_s):
            if not is_unary:
                with suppress(
                    asyncio.InvalidStateError, grpc.aio.UsageError
                ):  # the call ended before all messages were sent
                    for message in messages:
                        await stream.write(message)
                    if not keep_open:
                        await stream.done_writing()
            end: Any = grpc.aio.EOF  # type: ignore[attr-defined]
            while len(replies) < max_replies and (reply := await stream.read()) is not end:
                replies.append(reply)
            if len(replies) == max_replies:
                return CallEnd(None, "", tuple(replies))
            return CallEnd(await stream.code(), await stream.details() or "", tuple(replies))
    except grpc.aio.AioRpcError as error:
        return CallEnd(error.code(), error.details() or "", tuple(replies))
    except TimeoutError:
        return CallEnd(None, "", tuple(replies))
    finally:
        stream.cancel()
