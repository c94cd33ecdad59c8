"""Every method of every service that Baton's protobuf files describe, and a way to call each with anything at
all."""

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
OURS_TO_SAY = frozenset(
    (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ),
)
"""What a client's or a peer's mistake may be answered with: not UNKNOWN, INTERNAL or UNAVAILABLE, which say
that it was ours."""


@dataclass(frozen=True, slots=True)
class Method:
    service: str
    name: str
    message: Any
    """The class of what a caller sends."""
    streams_requests: bool

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"


def all_methods() -> Iterator[Method]:
    """Found in the generated descriptors, so that a new method is among them by itself."""
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
class Answered:
    """How a call ended; None: it had not when the caller left, or nobody knows. `replies`: the first few of
    them."""

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
    stays: bool = False,
) -> Answered:
    """Call any kind of method: every one looks the same on the wire. Sends all messages and leaves after
    `wait_s` or `max_replies`; unless it `stays`, it says so at once that there will be no more."""
    for _ in range(10):
        answered = await _call(channel, path, tuple(messages), wait_s, max_replies, stays)
        if answered.details != LOST_STATUS:
            return answered
    return Answered(None, "", answered.replies)


LOST_STATUS = "Internal error from Core"
"""What grpc's asyncio client says, instead of the status that came, where the call was over before all was
sent."""


async def _call(
    channel: grpc.aio.Channel, path: str, messages: tuple[bytes, ...], wait_s: float, max_replies: int, stays: bool
) -> Answered:
    is_whole = len(messages) == 1 and not stays  # then all of it leaves at once
    stream: Any = channel.unary_stream(path)(messages[0]) if is_whole else channel.stream_stream(path)()
    replies: list[bytes] = []
    try:
        async with asyncio.timeout(wait_s):
            if not is_whole:
                with suppress(
                    asyncio.InvalidStateError, grpc.aio.UsageError
                ):  # it has ended before everything was sent
                    for message in messages:
                        await stream.write(message)
                    if not stays:
                        await stream.done_writing()
            while len(replies) < max_replies and (reply := await stream.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                replies.append(reply)
            if len(replies) == max_replies:
                return Answered(None, "", tuple(replies))
            return Answered(await stream.code(), await stream.details() or "", tuple(replies))
    except grpc.aio.AioRpcError as error:
        return Answered(error.code(), error.details() or "", tuple(replies))
    except TimeoutError:
        return Answered(None, "", tuple(replies))
    finally:
        stream.cancel()
