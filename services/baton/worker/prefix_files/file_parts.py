"""The parts of a file on a stream: sends bytes as parts, and joins received parts."""

import asyncio

from baton.core.errors import Code, Failure, Reason, Refused, invalid
from baton.core.interfaces import Duplex
from baton.core.messages.prefix_messages import (
    PART_BYTES,
    WINDOW_PARTS,
    FilePart,
    NextPart,
    PrefixReply,
    PrefixRequest,
)
from baton.worker.prefix_files.prefix_format import damaged

STALL_S = 30.0
"""Longest wait for the next message of the other end. Blocks are kept for it meanwhile."""

Stream = Duplex[PrefixReply, PrefixRequest]


async def next_message(stream: Stream) -> PrefixRequest:
    """Return the next message. Raises Refused if none comes within `STALL_S`, StreamBroken if none will."""
    try:
        async with asyncio.timeout(STALL_S):
            return await stream.receive()
    except TimeoutError:
        message = f"nothing was read or sent for {STALL_S:g} s; run the command again, closer to the cluster"
        raise Refused(Failure(code=Code.DEADLINE_EXCEEDED, reason=Reason.DEADLINE, message=message)) from None


class PartWriter:
    """Sends the bytes of a file as parts, each after its `NextPart`."""

    def __init__(self, stream: Stream, num_allowed: int) -> None:
        """`num_allowed`: parts that the other end has allowed already."""
        self._stream = stream
        self._num_allowed = num_allowed
        self._unsent = bytearray()

    async def write(self, data: bytes) -> None:
        """Send what makes full parts, and keep the rest. Raises as `next_message`."""
        self._unsent += data
        while len(self._unsent) > PART_BYTES:
            await self._send(PART_BYTES)

    async def end(self) -> None:
        """Send the rest as the last part. Raises as `next_message`."""
        await self._send(len(self._unsent), is_last=True)

    async def _send(self, num_bytes: int, *, is_last: bool = False) -> None:
        while not self._num_allowed:
            if not isinstance(await next_message(self._stream), NextPart):
                raise invalid("the gateway sent another message than NextPart during an export")
            self._num_allowed += 1
        self._num_allowed -= 1
        self._stream.send(FilePart(bytes(self._unsent[:num_bytes]), is_last))
        del self._unsent[:num_bytes]


class PartReader:
    """Joins the received parts of a file. It asks for each part, so few of them wait."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._unread = bytearray()
        self._is_over = False
        for _ in range(WINDOW_PARTS):
            stream.send(NextPart())

    async def take(self, num_bytes: int, what: str) -> bytes:
        """Return the next bytes. Raises Refused if the file ends before; `what` names them."""
        while len(self._unread) < num_bytes:
            if self._is_over:
                raise damaged(f"it ends in {what}")
            await self._receive()
        taken = bytes(self._unread[:num_bytes])
        del self._unread[:num_bytes]
        return taken

    async def ended(self) -> bool:
        """Return True if no byte is left."""
        while not self._is_over and not self._unread:
            await self._receive()
        return not self._unread

    async def _receive(self) -> None:
        part = await next_message(self._stream)
        if not isinstance(part, FilePart):
            raise invalid("the gateway sent another message than FilePart during an import")
        self._unread += part.data
        self._is_over = part.is_last
        if not part.is_last:
            self._stream.send(NextPart())
