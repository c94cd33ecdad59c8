"""The standard health service, `grpc.health.v1.Health`.

The servicer of grpcio-health-checking writes to watchers while it holds a lock. A client that opens a watch
and does not read would keep the status from changing, and the server from stopping.
"""

import asyncio
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as pb_grpc

from baton.rpc.client_writer import ClientWriter

SERVICE = pb.DESCRIPTOR.services_by_name["Health"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(pb_grpc.HealthServicer):
    """Answers health checks with the status of each service. All services have the same status."""

    def __init__(self, writer: ClientWriter) -> None:
        self._writer = writer
        self._services = {""}
        self._is_serving, self._is_stopped = True, False
        self._changed = asyncio.Event()

    def add_service(self, name: str) -> None:
        """Report the status for a service by its full name. "" means all services."""
        self._services.add(name)

    def set(self, *, is_serving: bool) -> None:
        """Change the status, and send it to watchers."""
        is_serving = is_serving and not self._is_stopped
        if is_serving is not self._is_serving:
            self._is_serving = is_serving
            self._changed.set()
            self._changed = asyncio.Event()

    def stop(self) -> None:
        """Report NOT_SERVING from now on."""
        self._is_stopped = True
        self.set(is_serving=False)

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:  # noqa: N802
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no service of that name")
        return pb.HealthCheckResponse(status=self._status(request.service))

    async def List(self, request: pb.HealthListRequest, context: Context) -> pb.HealthListResponse:  # noqa: N802
        return pb.HealthListResponse(
            statuses={name: pb.HealthCheckResponse(status=self._status(name)) for name in self._services}
        )

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> NoReturn:  # noqa: N802
        """Send the status now and after each change, until the client cancels the call."""
        sent: int | None = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != sent:
                await self._writer.write(context, pb.HealthCheckResponse(status=status))
            sent = status
            await changed.wait()

    def _status(self, service: str) -> pb.HealthCheckResponse.ServingStatus:
        if service not in self._services:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        return pb.HealthCheckResponse.SERVING if self._is_serving else pb.HealthCheckResponse.NOT_SERVING
