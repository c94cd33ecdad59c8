"""Decodes messages of clients, large ones in a thread, and bounds the fields that a message may have.

A field of two bytes takes at least 16 in memory, and more as a Python object.
"""

import asyncio
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc.aio

from baton.core.errors import invalid
from baton.core.request_limits import MAX_JSON_VALUES
from baton.runtime.process import loop_time
from baton.runtime.process.byte_budget import Reservation

MAX_FIELDS = MAX_JSON_VALUES
"""Fields of a message. The ids of a packed list are one field."""
_VARINT, _FIXED64, _BYTES, _START, _END, _FIXED32 = range(6)


class CallBody:
    """Fields of a decoded call, and the reservation of their memory. Leaving it as a context drops both.

    Frames of grpc and of interceptors refer to the body until the call ends, so only dropping the fields
    frees their memory.
    """

    __slots__ = ("_reservation", "fields")

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self._reservation: Reservation | None = None

    def hold(self, reservation: Reservation) -> None:
        """Take ownership of the reservation, with the size of the fields. Raises OverBudget."""
        reservation.resize(sum(map(sys.getsizeof, self.fields.values())))  # lists other than the prompt are short
        self._reservation = reservation

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.fields.clear()
        if self._reservation is not None:
            self._reservation.release()


async def next_message(context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    """Return the next message of a call, not decoded. Raises StopAsyncIteration if there is none.

    grpc's iterator of a request stream would hold the last message until the next garbage collection.
    """
    message = await context.read()
    if not isinstance(message, bytes):  # the end of the stream
        raise StopAsyncIteration
    return message


async def decode_message(raw: bytes, decode: Callable[[bytes], Any]) -> Any:
    """Decode a message. Raises Refused (400) if it has too many fields, and what `decode` raises."""
    if len(raw) <= loop_time.MESSAGE_BYTES:
        return decode(raw)
    return await asyncio.to_thread(_checked, raw, decode)


def _checked(raw: bytes, decode: Callable[[bytes], Any]) -> Any:
    if has_more_fields(raw, MAX_FIELDS):
        raise invalid(f"the message has more than {MAX_FIELDS} fields; send several requests, and lists as packed")
    return decode(raw)


def has_more_fields(raw: bytes, most: int) -> bool:
    """True if a message has more than `most` fields, those of nested messages not counted.

    A malformed message has as many as can be read.
    """
    at = num_fields = 0
    while at < len(raw):
        num_fields += 1
        if num_fields > most:
            return True
        tag, at = _varint(raw, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(raw, at)
        elif kind == _BYTES:
            length, at = _varint(raw, at)
            at += length
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        elif kind not in (_START, _END):
            return False
    return False


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return (value, position after it). At the end of the message, the value is incomplete."""
    value = shift = 0
    while at < len(raw):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80 or shift >= 70:
            break
    return value, at
