"""Works around grpc.aio, which loses the status of a call, and the call, when a client's write fails."""

from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

T = TypeVar("T")


class FirstStatus:
    """The first status of a client's call, and the end of the call.

    If the server ends a call while the client writes, the write fails, and grpc.aio replaces the status in
    the call with INTERNAL. The server's status, and the failure in its trailing metadata, would be lost.
    """

    def __init__(self, call: grpc.aio.Call) -> None:
        """Follow a call that has no status yet."""
        self._call = call
        self._has_status = False
        self.error: grpc.aio.AioRpcError | None = None
        """The error that the call has ended with, or None while it runs and if it has succeeded."""
        call.add_done_callback(self._keep)

    def _keep(self, call: grpc.aio.Call) -> None:
        """Keep the status. grpc calls this when it sets it, before the writer sees its failed write."""
        code, has_status = _result(call.code()), self._has_status
        self._has_status = True
        if not has_status and code is not grpc.StatusCode.OK:
            metadata, trailing = _result(call.initial_metadata()), _result(call.trailing_metadata())
            self.error = grpc.aio.AioRpcError(code, metadata, trailing, _result(call.details()), None)

    def cancel(self) -> None:
        """Cancel the call, also if grpc.aio counts it as done.

        After a failed write, `call.cancel` does nothing. But grpc's core keeps an ended call, with its unread
        messages, until they are read or the call is cancelled.
        """
        if not self._call.cancel():
            self._call._cython_call.cancel("closed")  # type: ignore[attr-defined]  # has no public form


def _result(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("the call has no status yet")
