"""Ends connections of clients that do not read their responses in time."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from baton.core.errors import Failure, Reason, Refused
from baton.gateway.gateway_service import CallOutcome
from baton.gateway.http.asgi_io import Scope
from baton.gateway.http.http_protocol import CONNECTION_EXTENSION


class ReadLimit:
    """Aborts a connection whose client does not read the rest of a response in time.

    Use as `with`: leaving means that the response was written, and the connection may serve the next request.
    """

    def __init__(self, abort: Callable[[], None], unread_s: float, min_read_rate: int) -> None:
        self._abort = abort
        self._unread_s = unread_s
        self._min_read_rate = min_read_rate
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def start(self, num_bytes: int) -> None:
        """Start the time for the last `num_bytes` of the response. Does nothing after the `with`
        statement."""
        if not self._is_over:
            seconds = self._unread_s + num_bytes / self._min_read_rate
            self._timer = asyncio.get_running_loop().call_later(seconds, self._abort)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()


class ReadLimits:
    """The time that clients have to read what is left of a response when its call has ended.

    A client must read n bytes within `unread_s + n / min_read_rate` seconds.
    """

    def __init__(self, unread_s: float, min_read_rate: int) -> None:
        self._unread_s = unread_s
        self._min_read_rate = min_read_rate

    def limit(self, scope: Scope) -> ReadLimit:
        """Return the limit of one response."""
        abort = connection_of(scope).get("abort", lambda: None)
        return ReadLimit(abort, self._unread_s, self._min_read_rate)


def cut_if_slow_reader(scope: Scope, run: "asyncio.Task[CallOutcome]") -> None:
    """Abort the connection if the call failed because its client left too much of the response unread."""
    error = None if run.cancelled() else run.exception()
    if isinstance(error, Refused) and error.failure.reason is Reason.SLOW_READER:
        cut_connection(scope, error.failure)


def cut_connection(scope: Scope, failure: Failure) -> None:
    """Abort a request's connection and drop its unsent bytes. The request is counted with `failure`."""
    connection = connection_of(scope)
    connection["refusal"] = failure
    connection.get("abort", lambda: None)()


def connection_of(scope: Scope) -> dict[str, Any]:
    """Return the connection's extension of the scope, see CONNECTION_EXTENSION."""
    connection: dict[str, Any] = scope.get("extensions", {}).get(CONNECTION_EXTENSION, {})
    return connection
