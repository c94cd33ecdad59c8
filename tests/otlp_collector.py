"""An OTLP trace collector for tests: a real gRPC server that records spans."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from tests.free_port import free_port

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """A span.

    service, instance: of its process.
    parent_id: empty for a root span.
    start_s, end_s, events: wall-clock seconds.
    """

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
    """Records spans.

    spans: in order of arrival.
    num_calls, num_ended: number of export calls that have begun and that have ended.
    waiting: instances whose call is not answered now.
    answers: if False, calls are accepted and wait until `refuse_waiting`.
    """

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.num_calls = 0
        self.num_ended = 0
        self.waiting: set[str] = set()
        self.answers = True
        self.port = 0
        self._refusals = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def start(self) -> None:
        """Start the server, after a restart on the same port."""
        self._server = grpc.aio.server()
        pb_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"{HOST}:{self.port or free_port(HOST)}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def refuse_waiting(self) -> None:
        """Refuse the calls that wait."""
        self._refusals.set()
        self._refusals = asyncio.Event()

    async def Export(  # noqa: N802 - the name of the gRPC method
        self, request: pb.ExportTraceServiceRequest, context: Any
    ) -> pb.ExportTraceServiceResponse:
        self.num_calls += 1
        try:
            if not self.answers:
                await self._wait_for_the_end(request)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused")  # so it is not sent again
        finally:
            self.num_ended += 1
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

    async def _wait_for_the_end(self, request: pb.ExportTraceServiceRequest) -> None:
        instances = {_plain(spans.resource.attributes)["service.instance.id"] for spans in request.resource_spans}
        self.waiting |= instances
        try:
            await self._refusals.wait()
        finally:
            self.waiting -= instances

    def of_trace(self, trace_id: str) -> dict[str, ReceivedSpan]:
        """Return the spans of a trace by name. Of several with one name, the last."""
        return {span.name: span for span in self.spans if span.trace_id == trace_id}

    async def until(self, condition: Callable[[], bool], within_s: float = 60.0) -> None:
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
