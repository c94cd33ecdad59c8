"""A collector for tests: a real gRPC server that takes OTLP traces and keeps their spans."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """`service`, `instance`: of the process that made it. `parent_id`: empty where it begins a trace. Times
    in wall seconds."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    events: dict[str, float]
    problem: str


class Collector(pb_grpc.TraceServiceServicer):
    """`spans` in order of arrival, `num_calls` of those who bring them. `answers` False: it takes every call
    and says nothing."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.num_calls = 0
        self.answers = True
        self.port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def start(self) -> None:
        """On the port that it had before, if it had one."""
        self._server = grpc.aio.server()
        pb_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"{HOST}:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:  # noqa: N802
        self.num_calls += 1
        if not self.answers:
            await asyncio.Event().wait()
        for of_process in request.resource_spans:
            process = _plain(of_process.resource.attributes)
            for of_scope in of_process.scope_spans:
                self.spans += [
                    ReceivedSpan(
                        service=process["service.name"],
                        instance=process["service.instance.id"],
                        name=span.name,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        start_s=span.start_time_unix_nano / 1e9,
                        end_s=span.end_time_unix_nano / 1e9,
                        attributes=_plain(span.attributes),
                        events={event.name: event.time_unix_nano / 1e9 for event in span.events},
                        problem=span.status.message,
                    )
                    for span in of_scope.spans
                ]
        return pb.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> dict[str, ReceivedSpan]:
        """By name; of several of one name the last."""
        return {span.name: span for span in self.spans if span.trace_id == trace_id}

    async def until(self, condition: Callable[[], bool], within_s: float = 10.0) -> None:
        async with asyncio.timeout(within_s):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.05)


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes if isinstance(one, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)
