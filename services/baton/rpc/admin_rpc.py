"""Servicer and client of `baton.v1.Admin`, the API for operators."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from baton.core.client_api import AdminApi, ClusterStatus
from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.prefix_files import ExportedPrefix, ImportedPrefix
from baton.core.errors import StreamBroken, invalid
from baton.rpc import grpc_status
from baton.rpc.client_writer import ClientWriter
from baton.rpc.gates.receive_gate import AUTHORIZATION_KEY
from baton.rpc.inference_rpc import Context, caller_of, client_errors_as_status
from baton.rpc.mappers import client_mapper as convert
from baton.v1 import admin_pb2 as pb
from baton.v1 import admin_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name

COPY_S = 3600.0
"""Longest export or import."""


class AdminServicer(pb_grpc.AdminServicer):
    """Serves an `AdminApi` over gRPC."""

    def __init__(self, api: AdminApi, writer: ClientWriter) -> None:
        self._api = api
        self._writer = writer

    async def Status(self, message: pb.StatusRequest, context: Context) -> pb.StatusResponse:  # noqa: N802
        async with client_errors_as_status(context):
            return convert.to_status(await self._api.status(caller_of(context)))

    async def Explain(self, message: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:  # noqa: N802
        async with client_errors_as_status(context):
            request_id = message.request_id if message.HasField("request_id") else None
            return convert.to_explain_response(await self._api.explain(request_id, caller_of(context)))

    async def Drain(self, message: pb.DrainRequest, context: Context) -> pb.DrainResponse:  # noqa: N802
        async with client_errors_as_status(context):
            await self._api.drain(message.worker_id, caller_of(context), node_shutting_down=message.node_leaves)
            return pb.DrainResponse()

    async def ClearTenant(  # noqa: N802
        self, message: pb.ClearTenantRequest, context: Context
    ) -> pb.ClearTenantResponse:
        async with client_errors_as_status(context):
            worker_ids = await self._api.clear_tenant(message.tenant, caller_of(context))
            return pb.ClearTenantResponse(worker_ids=worker_ids)

    async def CacheStats(self, message: pb.CacheStatsRequest, context: Context) -> pb.CacheStatsResponse:  # noqa: N802
        async with client_errors_as_status(context):
            return convert.to_cache_stats(await self._api.cache_stats(caller_of(context)))

    async def ExportCache(self, message: pb.ExportCacheRequest, context: Context) -> None:  # noqa: N802
        async def write(answer: ExportedPrefix | bytes) -> None:
            await self._writer.write(context, convert.to_export_response(answer))

        async with client_errors_as_status(context):
            await self._api.export_cache(message.tenant, message.prompt_json, write, caller_of(context))

    async def ImportCache(  # noqa: N802
        self, messages: AsyncIterator[pb.ImportCacheRequest], context: Context
    ) -> AsyncIterator[pb.ImportCacheResponse]:
        async with client_errors_as_status(context):
            await self._api.check_import(caller_of(context))
            first = await anext(messages, None)
            if first is None or not first.HasField("target"):
                raise invalid("the first message of an import must have `target`")
            parts = (message.part async for message in messages)
            target = first.target
            imported = await self._api.import_cache(target.tenant, target.worker_id, parts, caller_of(context))
            yield convert.to_import_response(imported)


class AdminClient:
    """Client of `AdminApi`. Raises Refused like the API, and StreamBroken after `call_s`, or `COPY_S` for
    exports and imports."""

    def __init__(
        self, channel: grpc.aio.Channel, address: str, *, authorization: str = "", call_s: float = 10.0
    ) -> None:
        self._stub = pb_grpc.AdminStub(channel)
        self._address = address
        self._call_s = call_s
        self._metadata = ((AUTHORIZATION_KEY, authorization),) if authorization else ()

    async def status(self) -> ClusterStatus:
        return convert.from_status(await self._called(self._stub.Status, pb.StatusRequest()))

    async def explain(self, request_id: str | None = None) -> tuple[DecisionRecord, ...]:
        return convert.from_explain_response(
            await self._called(self._stub.Explain, pb.ExplainRequest(request_id=request_id))
        )

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> None:
        await self._called(self._stub.Drain, pb.DrainRequest(worker_id=worker_id, node_leaves=node_shutting_down))

    async def clear_tenant(self, tenant: str) -> tuple[str, ...]:
        reply = await self._called(self._stub.ClearTenant, pb.ClearTenantRequest(tenant=tenant))
        return tuple(reply.worker_ids)

    async def cache_stats(self) -> CacheStats:
        return convert.from_cache_stats(await self._called(self._stub.CacheStats, pb.CacheStatsRequest()))

    async def export_cache(
        self, tenant: str, prompt_json: str, write: Callable[[ExportedPrefix | bytes], Awaitable[None]]
    ) -> None:
        """Pass the answer to `write`.

        Raises Refused if the export is refused, or ends before its last byte.
        """
        request = pb.ExportCacheRequest(tenant=tenant, prompt_json=prompt_json)
        call = self._stub.ExportCache(request, timeout=COPY_S, metadata=self._metadata)
        try:
            async for message in call:
                await write(convert.from_export_response(message))
        except grpc.aio.AioRpcError as error:
            raise grpc_status.call_error(error, self._address) from error
        finally:
            call.cancel()

    async def import_cache(self, tenant: str, worker_id: str, parts: AsyncIterator[bytes]) -> ImportedPrefix:
        """Send the bytes of a file. Returns before all are sent if not all fit."""

        async def messages() -> AsyncIterator[pb.ImportCacheRequest]:
            yield pb.ImportCacheRequest(target=pb.ImportTarget(tenant=tenant, worker_id=worker_id))
            async for part in parts:
                yield pb.ImportCacheRequest(part=part)

        call = self._stub.ImportCache(messages(), timeout=COPY_S, metadata=self._metadata)
        try:
            async for message in call:
                return convert.from_import_response(message)
        except grpc.aio.AioRpcError as error:
            raise grpc_status.call_error(error, self._address) from error
        finally:
            call.cancel()
        raise StreamBroken(f"{self._address}: the import has ended without an answer")

    async def _called(self, method: Callable[..., Any], message: Any) -> Any:
        try:
            return await method(message, timeout=self._call_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise grpc_status.call_error(error, self._address) from error
