"""grpc's asyncio server, less the way in which anybody could end it from outside.

grpcio 1.85 decodes the path of a call that is for no method it knows in the loop that takes all calls: a path
that is not UTF-8 ends that loop, and the server with it, for good; now and then the process, too, since what
was under way is freed too early. So such calls are taken here, and refused without a look at their path. This
reaches into grpc's private parts: `tests/unit/rpc/test_server.py` notices when a release has others.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]


class _AioServer(cygrpc.AioServer):
    """Every method of ours is registered with grpc's core; what comes beside those is for nobody."""

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:
            return super()._make_request_call_future(method)
        return asyncio.get_running_loop().create_task(self._refuse_all())

    async def _refuse_all(self) -> None:
        """Answer with UNIMPLEMENTED until grpc says, by raising, that the server stops."""
        loop, nothing = asyncio.get_running_loop(), cygrpc._MethodResolver([], {})
        refusing: set[asyncio.Task[None]] = set()
        while True:
            call = await self._request_call()
            refusal = cygrpc._handle_rpc("", nothing, (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(refusal, call, loop, ""))
            refusing.add(task)  # the loop itself does not keep it
            task.add_done_callback(refusing.discard)


def aio_server(interceptors: Sequence[Any], options: Sequence[tuple[str, Any]]) -> grpc.aio.Server:
    """As `grpc.aio.server`."""
    server: Any = grpc.aio.server(interceptors=interceptors, options=options)
    server._server = _AioServer(server._loop, None, (), interceptors, tuple(options), None)
    made: grpc.aio.Server = server
    return made
