"""One HTTP connection: uvicorn's protocol with a receive deadline, limits of connections and request heads,
and an abort.

uvicorn creates the instances itself, so `protocol_class` passes the settings through a subclass.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from baton.core.errors import Code, Failure, Reason
from baton.core.request_limits import MAX_HEAD_BYTES
from baton.gateway.http.error_forms import error_form
from baton.gateway.http.http_pipelining import (
    BODY_PIECE_BYTES,
    HEAD_PIECE_BYTES,
    HEADER_BYTES,
    MAX_PIPELINED,
    PipelineFlow,
    QueuedHeads,
    UnparsedBytes,
)
from baton.runtime.logging import get_logger
from baton.runtime.process.byte_budget import OverBudget
from baton.runtime.process.shared_account import Buffer, SharedAccount

log = get_logger(__name__)

CONNECTION_EXTENSION = "baton.connection"
"""Name of the ASGI scope extension that the connection offers to the application.

Its `abort` closes the connection and drops unsent bytes. Its `refusal` is the Failure that the connection
sent by itself, in which case the application only sees a disconnect.
"""


FRAMING_BYTES = 6
"""Bytes of framing that a client may need for each byte of a chunked body."""
CHECKS_UNTIL_UNREAD = 8
"""Checks without progress after which a client counts as not reading."""
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""Value of SO_LINGER. Without it the kernel keeps up to 4 MiB for minutes for an unread response."""


class GatewayProtocol(HttpToolsProtocol):
    """One HTTP connection."""

    receive_deadline_s: ClassVar[float]
    max_connections: ClassVar[int]
    heads: ClassVar[SharedAccount]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._head_buffer: Buffer | None = None
        self._in_head = True
        self._has_begun = False
        self._overhead_bytes = 0
        self._unsent_bytes = 0
        self._num_checks_without_progress = 0
        self._unparsed = UnparsedBytes()
        self._queued_heads = QueuedHeads()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_buffer = self.heads.open(self._refuse_head)
        self.flow = PipelineFlow(transport, self._unparsed)
        self._arm()
        if len(self.connections) > self.max_connections:
            self._refuse(
                Code.RESOURCE_EXHAUSTED,
                Reason.QUEUE_FULL,
                f"{self.max_connections} connections are open, which is the limit; close idle connections, or raise "
                "--max-connections",
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._head_buffer is not None:
            self._head_buffer.close()
        self._unparsed.clear()
        super().connection_lost(exc)
        self.scope = self.cycle = None  # type: ignore[assignment]  # they hold `abort_connection`, a cycle

    def data_received(self, data: bytes) -> None:
        """Take received bytes. They are parsed when few enough requests wait for their response."""
        self._unparsed.add(data)
        self._parse()

    def on_response_complete(self) -> None:
        """Continue with the next request."""
        super().on_response_complete()
        self._queued_heads.keep_last(len(self.pipeline))
        self._parse()
        if not self.transport.is_closing():
            self.flow.resume_reading()  # uvicorn's own call had no effect while bytes were not parsed

    def _parse(self) -> None:
        while self._unparsed and len(self.pipeline) < MAX_PIPELINED and not self.transport.is_closing():
            self._parse_piece(self._unparsed.take(HEAD_PIECE_BYTES if self._in_head else BODY_PIECE_BYTES))
        if self.transport.is_closing():
            self._unparsed.clear()
        elif self._unparsed:
            self.flow.pause_reading()
        self._count_waiting()

    def _count_waiting(self) -> None:
        """Count what the application has not seen yet. It is nothing unless a head is incomplete, or requests
        wait for the response to an earlier one."""
        head_bytes = self._head_memory if self._in_head else 0
        bodies_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)
        try:
            if self._head_buffer is not None:
                self._head_buffer.resize(head_bytes + self._queued_heads.num_bytes + bodies_bytes + len(self._unparsed))
        except OverBudget as error:
            self._refuse_head(error)

    @property
    def _head_memory(self) -> int:
        return self._head_bytes + HEADER_BYTES * len(self.headers or ()) if self._head_bytes else 0

    def _parse_piece(self, data: bytes) -> None:
        if self._deadline is None:
            self._arm()
        if self._in_head:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    Code.BODY_TOO_LARGE,
                    Reason.BODY_TOO_LARGE,
                    f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes; send fewer headers",
                )
                return
            self._head_bytes += len(data)
        else:
            self._overhead_bytes += len(data)
        super().data_received(data)
        if self._in_head:
            self._count_waiting()
        if not self._in_head and self._overhead_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(
                Code.BODY_TOO_LARGE,
                Reason.BODY_TOO_LARGE,
                f"chunk extensions and trailers of the body are larger than {MAX_HEAD_BYTES} bytes; leave them out",
            )

    def on_body(self, body: bytes) -> None:
        """Take a part of the body. The rest of the received bytes is framing, extensions or trailers."""
        self._overhead_bytes = max(0, self._overhead_bytes - (1 + FRAMING_BYTES) * len(body))
        super().on_body(body)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers are dropped, because no trailer has a meaning here."""
        if self._in_head:
            super().on_header(name, value)

    def resume_writing(self) -> None:
        self._num_checks_without_progress = 0
        super().resume_writing()

    def check_unread(self) -> None:
        """Abort the connection if its client has read nothing since `CHECKS_UNTIL_UNREAD` checks, although
        output is waiting."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if 0 < unsent_bytes >= self._unsent_bytes:
            self._num_checks_without_progress += 1
        else:
            self._num_checks_without_progress = 0
        self._unsent_bytes = unsent_bytes
        if self._num_checks_without_progress >= CHECKS_UNTIL_UNREAD:
            log.info("unread_response_dropped", client=self.client, unsent_bytes=unsent_bytes)
            self.abort_connection()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        if self._deadline is None:  # it arrived together with the end of the previous request
            self._arm()
        self.scope["extensions"] = {CONNECTION_EXTENSION: {"abort": self.abort_connection, "refusal": None}}

    def on_headers_complete(self) -> None:
        super().on_headers_complete()  # raises if the head is invalid; the application then never sees the request
        self._in_head = False
        if self.pipeline:
            self._queued_heads.add(self._head_memory)

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes, self._overhead_bytes, self._has_begun = True, 0, 0, False
        self._disarm()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Code.INVALID_ARGUMENT, Reason.INVALID_REQUEST, f"malformed HTTP request: {msg}")

    def abort_connection(self) -> None:
        """Close the connection immediately and drop unsent bytes, those in the kernel's buffer too."""
        if not self.transport.is_closing():
            raw = self.transport.get_extra_info("socket")
            if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self.transport.abort()

    def on_refused(self, failure: Failure) -> None:
        """Handle the rejection of a request that the application has not seen. Overridden by
        `protocol_class`."""

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self.receive_deadline_s, self._expired)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    @property
    def _is_answering(self) -> bool:
        """True while the response to a request before the one that is being received is running."""
        return bool(self.cycle and not self.cycle.response_complete and (self._in_head or self.pipeline))

    def _expired(self) -> None:
        """Handle a request whose head or body was not received in time."""
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._is_answering:  # the client may send the next request meanwhile
            self._arm()
        elif not self._has_begun or (self.cycle is not None and self.cycle.response_started and not self._in_head):
            self.transport.close()
        else:
            message = f"the request was not received within {self.receive_deadline_s:g} s; send it within that time"
            self._refuse(Code.RECEIVE_TIMEOUT, Reason.DEADLINE, message)

    def _refuse_head(self, error: OverBudget) -> None:
        """Refuse the connection with the most waiting bytes while the memory for heads is used up."""
        if not self.transport.is_closing():
            message = f"{error}; this connection has the most bytes of unfinished and waiting requests"
            self._refuse(Code.RESOURCE_EXHAUSTED, Reason.MEMORY_BUDGET, message)

    def _refuse(self, code: Code, reason: Reason, message: str) -> None:
        """Send an error without the application, and close the connection.

        If the application has already seen the request, it gets a disconnect. During the response to an
        earlier request the connection only closes, because the client would take the error as a part of it.
        """
        failure = Failure(code=code, reason=reason, message=message)
        has_path = self._has_begun and not self._in_head
        errors = error_form(self.scope["path"] if has_path else "")
        if has_path:
            self.scope["extensions"][CONNECTION_EXTENSION]["refusal"] = failure
        else:
            self.on_refused(failure)
        if self._is_answering:
            self.transport.close()
            return
        status = errors.status(failure)
        body = errors.body(failure, None, "", status)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


def protocol_class(
    receive_deadline_s: float, on_refused: Callable[[Failure], None], *, max_connections: int, heads: SharedAccount
) -> Callable[..., GatewayProtocol]:
    """Return the class of which uvicorn creates an instance for each connection.

    on_refused: called for each request that the connection rejects before the application has seen it.
    max_connections: number of open connections; further ones are refused.
    heads: account of the request heads that are being received.
    """
    attributes = {
        "receive_deadline_s": receive_deadline_s,
        "max_connections": max_connections,
        "heads": heads,
        "on_refused": lambda _, failure: on_refused(failure),
    }
    return type("Protocol", (GatewayProtocol,), attributes)
