"""Keeps the status with which a server has ended a call."""

from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

T = TypeVar("T")


class FirstStatus:
    """The first status of a client's call.

    If the server ends a call while the client writes, the write fails, and grpc.aio replaces the status in
    the call with INTERNAL. The server's status, and the failure in its trailing metadata, would be lost.
    """

    def __init__(self, call: grpc.aio.Call) -> None:
        self.error: grpc.aio.AioRpcError | None = None
        """The error that the call has ended with, or None while it runs and if it has succeeded."""
        call.add_done_callback(self._keep)

    def _keep(self, call: grpc.aio.Call) -> None:
        """Keep the status. grpc calls this when it sets it, before the writer sees its failed write."""
        code = _result(call.code())
        if self.error is None and code is not grpc.StatusCode.OK:
            metadata, trailing = _result(call.initial_metadata()), _result(call.trailing_metadata())
            self.error = grpc.aio.AioRpcError(code, metadata, trailing, _result(call.details()), None)


def _result(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("the call has no status yet")
