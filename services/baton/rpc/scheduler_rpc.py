"""Servicer and client of the Scheduler service."""

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import StreamBroken
from baton.core.interfaces import SchedulerService, Source
from baton.core.request import RequestActuals
from baton.rpc import grpc_status
from baton.rpc.channel import ChannelPool
from baton.rpc.mappers import scheduler_mapper as convert
from baton.rpc.streams.grpc_sources import feed, listen
from baton.rpc.streams.grpc_streams import ClientDuplex, Codec, dial, serve
from baton.rpc.streams.stream_limits import StreamLimits
from baton.runtime.process.awake_timeout import TimeLimit
from baton.wire.v1 import scheduler_pb2 as pb
from baton.wire.v1 import scheduler_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["Scheduler"].full_name
SCHEDULER_SIDE: Codec[WorkerCommand, WorkerReport] = Codec(convert.to_command, convert.from_worker_report)
WORKER_SIDE: Codec[WorkerReport, WorkerCommand] = Codec(convert.to_worker_report, convert.from_command)

Context = grpc.aio.ServicerContext[Any, Any]
Stub = pb_grpc.SchedulerStub


class SchedulerServicer(pb_grpc.SchedulerServicer):
    """Serves a `SchedulerService` over gRPC."""

    def __init__(self, service: SchedulerService, limits: StreamLimits) -> None:
        self._service = service
        self._limits = limits

    async def Place(self, message: pb.PlacementQuery, context: Context) -> pb.PlaceReply:  # noqa: N802
        async with grpc_status.errors_as_status(context):
            return convert.to_place_reply(await self._service.place(convert.from_placement_query(message)))

    async def Finished(self, message: pb.FinishedRequest, context: Context) -> pb.FinishedReply:  # noqa: N802
        async with grpc_status.errors_as_status(context):
            await self._service.finished(*map(convert.from_request_actuals, message.actuals))
            return pb.FinishedReply()

    async def Watch(self, message: pb.WatchRequest, context: Context) -> None:  # noqa: N802
        async with grpc_status.errors_as_status(context):
            await feed(context, await self._service.watch(), convert.to_cluster_update)

    async def Report(self, _: Any, context: Context) -> None:  # noqa: N802
        await serve(context, SCHEDULER_SIDE, self._service.report, self._limits)

    async def Explain(self, message: pb.ExplainRequest, context: Context) -> pb.ExplainReply:  # noqa: N802
        async with grpc_status.errors_as_status(context):
            records = await self._service.explain(message.request_id if message.HasField("request_id") else None)
            return pb.ExplainReply(records=[convert.to_decision_record(record) for record in records])

    async def Drain(self, message: pb.DrainRequest, context: Context) -> pb.DrainReply:  # noqa: N802
        async with grpc_status.errors_as_status(context):
            return pb.DrainReply(
                known=await self._service.drain(message.worker_id, node_shutting_down=message.node_shutting_down)
            )

    async def ClearTenant(  # noqa: N802
        self, message: pb.ClearTenantRequest, context: Context
    ) -> pb.ClearTenantReply:
        async with grpc_status.errors_as_status(context):
            return pb.ClearTenantReply(worker_ids=await self._service.clear_tenant(message.tenant_salt))

    async def CacheStats(self, message: pb.CacheStatsRequest, context: Context) -> pb.CacheStatsReply:  # noqa: N802
        async with grpc_status.errors_as_status(context):
            return convert.to_cache_stats(await self._service.cache_stats())


class SchedulerClient:
    """Implements `SchedulerApi` over its own channel pool. Every call takes at most `limit`."""

    def __init__(self, channels: ChannelPool, address: str, limits: StreamLimits, limit: TimeLimit) -> None:
        self._channels = channels
        self._address = address
        self._limits = limits
        self._limit = limit

    async def place(self, query: PlacementQuery) -> Placement | Rejection | StillWaiting:
        return convert.from_place_reply(await self._called(lambda stub: stub.Place, convert.to_placement_query(query)))

    async def finished(self, *actuals: RequestActuals) -> None:
        await self._called(
            lambda stub: stub.Finished, pb.FinishedRequest(actuals=map(convert.to_request_actuals, actuals))
        )

    async def watch(self) -> Source[ClusterUpdate]:
        pooled = self._channels.acquire()
        call = pooled.stub.Watch(pb.WatchRequest())
        call.add_done_callback(lambda _: self._channels.release(pooled))
        return await listen(
            call, convert.from_cluster_update, limits=self._limits, limit=self._limit, address=self._address
        )

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        reply: pb.ExplainReply = await self._called(lambda stub: stub.Explain, pb.ExplainRequest(request_id=request_id))
        return tuple(convert.from_decision_record(record) for record in reply.records)

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        request = pb.DrainRequest(worker_id=worker_id, node_shutting_down=node_shutting_down)
        reply: pb.DrainReply = await self._called(lambda stub: stub.Drain, request)
        return reply.known

    async def clear_tenant(self, tenant_salt: bytes) -> tuple[str, ...]:
        request = pb.ClearTenantRequest(tenant_salt=tenant_salt)
        reply: pb.ClearTenantReply = await self._called(lambda stub: stub.ClearTenant, request)
        return tuple(reply.worker_ids)

    async def cache_stats(self) -> CacheStats:
        return convert.from_cache_stats(await self._called(lambda stub: stub.CacheStats, pb.CacheStatsRequest()))

    @property
    def is_closed(self) -> bool:
        """True if it has no connection."""
        return self._channels.is_closed

    def retire(self) -> None:
        """Close the connection when the last running call has ended."""
        self._channels.retire()

    async def aclose(self) -> None:
        await self._channels.aclose()

    async def _called(self, method: Callable[[Stub], Any], message: Any) -> Any:
        pooled = self._channels.acquire()
        try:
            # grpc's own deadline would also pass while this process is stalled
            async with self._limit.timeout():
                return await method(pooled.stub)(message)
        except TimeoutError as error:
            raise StreamBroken(f"{self._address}: no answer within {self._limit.seconds:g} s") from error
        except grpc.aio.AioRpcError as error:
            raise grpc_status.call_error(error, self._address) from error
        finally:
            self._channels.release(pooled)


async def open_report(
    channel: grpc.aio.Channel, address: str, limits: StreamLimits, limit: TimeLimit
) -> ClientDuplex[WorkerReport, WorkerCommand]:
    """Open a worker's report stream and take ownership of `channel`. Raises StreamBroken."""
    return await dial(
        channel, lambda c: pb_grpc.SchedulerStub(c).Report(), WORKER_SIDE, limits=limits, limit=limit, address=address
    )
