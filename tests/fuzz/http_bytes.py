"""Fuzz target: bytes of an HTTP connection, with heads, chunks and trailers, to the real application.

The first byte of an input chooses the size of the pieces in which the rest arrives. No input may cause an
internal error, a large response, or many requests that wait.
"""

import asyncio
import atexit
from contextlib import AsyncExitStack
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from baton.core.client_api import ProcessInfo
from baton.gateway.grpc.inference_service import AdminService
from baton.gateway.http.http_app import HttpApp
from baton.gateway.http.http_pipelining import HEAD_PIECE_BYTES, MAX_PIPELINED
from baton.gateway.http.http_protocol import GatewayProtocol, protocol_class
from baton.runtime.process.byte_budget import Account
from baton.runtime.process.shared_account import SharedAccount
from tests.unit.gateway.fakes import Cluster, cluster

PIECES = (1, 16, 256, 4096, 2**18)
MAX_BODY_BYTES = 64 * 1024
MAX_RESPONSE_BYTES = 16 * 2**20
MAX_REQUEST_BYTES = len("GET / HTTP/1.1\r\n\r\n")
MAX_TURNS = 50
"""Turns of the event loop that a request may need to be answered or to wait for a worker."""


class MemoryTransport(asyncio.Transport):
    """A connection whose output is kept."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.output = bytearray()
        self.is_paused = False
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.output += data

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self._is_closing = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return 0


class _Gateway:
    """The application, on an event loop that runs only while an input is served."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self._stack = AsyncExitStack()
        self.cluster: Cluster = self.loop.run_until_complete(self._stack.enter_async_context(cluster(("h0", "hybrid"))))
        service = self.cluster.gateway
        app = HttpApp(
            service,
            AdminService(service, ProcessInfo(process_id="gateway-0")),
            max_body_bytes=MAX_BODY_BYTES,
            unread_s=60.0,
            metrics=bytes,
            created=1_700_000_000,
        )
        self._config = uvicorn.Config(app, ws="none", lifespan="off", loop="none", log_config=None, access_log=False)
        self._new_protocol: Any = protocol_class(
            60.0,
            app.count_rejected,
            max_connections=16,
            heads=SharedAccount(service.budget, Account.HEADS, "the request head"),
        )

    def close(self) -> None:
        """End the gateway's tasks, at the end of the process."""
        self.loop.run_until_complete(self._stack.aclose())
        self.loop.close()

    async def serve(self, data: bytes, piece_bytes: int) -> bytes:
        """Return what a connection answers that receives these bytes."""
        transport, state = MemoryTransport(), ServerState()
        protocol: GatewayProtocol = self._new_protocol(config=self._config, server_state=state, app_state={})
        protocol.connection_made(transport)
        for at in range(0, len(data), piece_bytes):
            if transport.is_closing():
                break
            protocol.data_received(data[at : at + piece_bytes])
            assert len(protocol.pipeline) <= MAX_PIPELINED + HEAD_PIECE_BYTES // MAX_REQUEST_BYTES + 1
            await self._turns(lambda: not transport.is_paused)
        await self._turns(lambda: not state.tasks)
        protocol.connection_lost(None)
        for task in state.tasks:
            task.cancel()
        await self._turns(lambda: not state.tasks)
        worker, scheduler = self.cluster.scheduler.workers[0], self.cluster.scheduler
        for record in (worker.jobs, worker.cancels, scheduler.queries, scheduler.actuals):
            record.clear()  # type: ignore[attr-defined]
        return bytes(transport.output)

    async def _turns(self, is_done: Any) -> None:
        for _ in range(MAX_TURNS):
            if is_done():
                return
            await asyncio.sleep(0)


_GATEWAY: list[_Gateway] = []


def run_one(data: bytes) -> None:
    if not _GATEWAY:
        _GATEWAY.append(_Gateway())
        atexit.register(_GATEWAY[0].close)
    (gateway,) = _GATEWAY
    piece_bytes = PIECES[(data[:1] or b"\0")[0] % len(PIECES)]
    answer = gateway.loop.run_until_complete(gateway.serve(data[1:], piece_bytes))
    assert len(answer) <= MAX_RESPONSE_BYTES
    assert not answer or answer.startswith(b"HTTP/1.")
    assert b'"status": 500' not in answer, answer[-500:]
    assert not gateway.errors, gateway.errors
