"""Creates grpc's asyncio server with a workaround for a denial of service in grpcio 1.85.

grpcio decodes the path of a call to an unknown method inside the loop that accepts all calls. A path that is
not UTF-8 raises there and ends the loop, so the server accepts nothing any more. Sometimes the process
crashes, because running calls are freed too early. Here such calls are refused without decoding their path.
The workaround uses private members of grpc; `tests/unit/rpc/test_server.py` fails if a release changes them.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]


class _AioServer(cygrpc.AioServer):
    """Server that refuses calls to methods that are not registered, without decoding their path."""

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:
            return super()._make_request_call_future(method)
        return asyncio.get_running_loop().create_task(self._refuse_all())

    async def _refuse_all(self) -> None:
        """Answer with UNIMPLEMENTED until grpc raises because the server stops."""
        loop, nothing = asyncio.get_running_loop(), cygrpc._MethodResolver([], {})
        refusing: set[asyncio.Task[None]] = set()
        while True:
            call = await self._request_call()
            refusal = cygrpc._handle_rpc("", nothing, (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(refusal, call, loop, ""))
            refusing.add(task)  # the event loop holds tasks only weakly
            task.add_done_callback(refusing.discard)


def aio_server(interceptors: Sequence[Any], options: Sequence[tuple[str, Any]]) -> grpc.aio.Server:
    """Create a server like `grpc.aio.server`, with the workaround."""
    server: Any = grpc.aio.server(interceptors=interceptors, options=options)
    server._server = _AioServer(server._loop, None, (), interceptors, tuple(options), None)
    result: grpc.aio.Server = server
    return result
