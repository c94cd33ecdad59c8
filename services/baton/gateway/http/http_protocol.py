"""uvicorn's HTTP protocol with what it lacks: an overall deadline for receiving a request, a limit for its
head, and a way to hang up.

Only the connection's own work is here: `receive_deadline_s` and the limits are set on a subclass, since
uvicorn makes the instances.
"""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from baton.core.errors import Code, Failure, Reason
from baton.core.request_limits import MAX_HEAD_BYTES
from baton.gateway.http.openai_errors import error_body

HANG_UP = "baton.hang_up"
"""The ASGI scope's extension between connection and application: `abort` aborts the connection, unsent bytes
and all; `refusal` is the Failure that the connection has answered with by itself, where the application has
seen a disconnect."""


class GatewayProtocol(HttpToolsProtocol):
    """One connection."""

    receive_deadline_s: ClassVar[float] = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._has_begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None:
            self._arm()
        if self._in_head:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    Code.BODY_TOO_LARGE,
                    Reason.BODY_TOO_LARGE,
                    f"the request's head is larger than {MAX_HEAD_BYTES} bytes",
                )
                return
            self._head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        if self._deadline is None:  # it came with the end of the request before it
            self._arm()
        self.scope["extensions"] = {HANG_UP: {"abort": self.hang_up, "refusal": None}}

    def on_headers_complete(self) -> None:
        super().on_headers_complete()  # raises where the head makes no sense: then the application hears nothing of it
        self._in_head = False

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes, self._has_begun = True, 0, False
        self._disarm()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Code.INVALID_ARGUMENT, Reason.INVALID_REQUEST, f"this is not HTTP as it ought to be: {msg}")

    def hang_up(self) -> None:
        """Abort the connection: what is unsent is dropped."""
        if not self.transport.is_closing():
            self.transport.abort()

    def on_refused(self, failure: Failure) -> None:
        """Something was refused before the application has heard of it."""

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self.receive_deadline_s, self._expired)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expired(self) -> None:
        """The head or body of the request that is arriving took too long."""
        self._deadline = None
        if self.transport.is_closing():
            return
        is_answering = self.cycle is not None and not self.cycle.response_complete and (self._in_head or self.pipeline)
        if is_answering:  # an earlier request of this connection; its client may send the next one while it reads
            self._arm()
        elif not self._has_begun or (self.cycle is not None and self.cycle.response_started and not self._in_head):
            self.transport.close()
        else:
            message = f"the request was not received within {self.receive_deadline_s:g} s; send it faster"
            self._refuse(Code.RECEIVE_TIMEOUT, Reason.DEADLINE, message)

    def _refuse(self, code: Code, reason: Reason, message: str) -> None:
        """Answer without the application, which sees a disconnect if it has seen anything of this request,
        and close."""
        failure = Failure(code=code, reason=reason, message=message)
        if self._has_begun and not self._in_head:
            self.scope["extensions"][HANG_UP]["refusal"] = failure
        else:
            self.on_refused(failure)
        body = error_body(failure)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[code.http] + head + body)
        self.transport.close()


def protocol_class(receive_deadline_s: float, on_refused: Callable[[Failure], None]) -> Callable[..., GatewayProtocol]:
    """The class that uvicorn makes a connection with."""
    told = {"on_refused": lambda _, failure: on_refused(failure)}
    return type("Protocol", (GatewayProtocol,), {"receive_deadline_s": receive_deadline_s, **told})
