"""Client for Baton's gRPC API, `baton.v1.Inference/Generate`.

Times are taken when a message reaches this process's event loop, after gRPC's own thread has read it. At high
rates they are less precise than the HTTP client's. grpc is imported when a client is created.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.loadgen_errors import LoadgenError
from loadgen.send.client import Exchange, ResolvedRequest
from loadgen.send.grpc.grpc_channel import address_of, open_channel, unreachable
from loadgen.send.http.openai_answers import shown
from loadgen.send.timers import DueCheck, now_s

CHANNELS = 4
"""Connections to each endpoint. Messages of one connection queue behind each other."""

HTTP_OF = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "UNKNOWN": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""The HTTP status that Baton uses for each gRPC status."""
_FINISH = {1: "stop", 2: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSettings:
    """Settings of a `GrpcClient`.

    - `targets`: host:port of each endpoint, with `https://` for TLS
    - `metadata`: sent with every call
    - `more`: the user's message fields, which replace loadgen's own
    """

    targets: Sequence[str]
    model: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    is_insecure: bool = False
    open_timeout_s: float = 5.0


class GrpcClient:
    """Implements `Client` over gRPC."""

    def __init__(self, settings: GrpcSettings, clock: Callable[[], float] = now_s) -> None:
        """Raises LoadgenError if an address is invalid or a field of `more` does not exist."""
        from baton.v1 import inference_pb2, inference_pb2_grpc

        self._pb: Any = inference_pb2
        self._pb_grpc: Any = inference_pb2_grpc
        self._settings = settings
        self._clock = clock
        self.due_check = DueCheck()
        self._metadata = tuple((name.lower(), value) for name, value in settings.metadata.items())
        self._targets = [address_of(url)[0] for url in settings.targets]
        self._channels: list[list[Any]] = []
        self._methods: list[list[Any]] = []
        self._num_calls = 0
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            self._common = self._pb.GenerateRequest(model=settings.model, temperature=0, timeline=True)
            self._more = self._pb.GenerateRequest(**settings.more)
        except (ValueError, TypeError) as error:
            raise LoadgenError(f"--body has a field that Baton's gRPC request does not have: {error}") from error

    async def open(self) -> None:
        import grpc.aio

        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        for url in self._settings.targets:
            channels = [
                open_channel(grpc.aio, url, options, is_insecure=self._settings.is_insecure) for _ in range(CHANNELS)
            ]
            self._channels.append(channels)
            self._methods.append([self._pb_grpc.InferenceStub(channel).Generate for channel in channels])
            try:
                async with asyncio.timeout(self._settings.open_timeout_s):
                    await asyncio.gather(*(channel.channel_ready() for channel in channels))
            except TimeoutError:
                raise unreachable(url, await self._obstacle(channels[0])) from None

    def prepare(self, request: ResolvedRequest) -> Any:
        message = self._pb.GenerateRequest(max_tokens=request.max_tokens)
        message.MergeFrom(self._common)
        if request.text:
            message.prompt = request.text
        else:
            message.token_ids.extend(request.token_ids)
        if request.ignore_eos:
            message.ignore_eos = True
        if request.priority:
            message.priority = request.priority
        if request.session:
            message.session = request.session
        if request.slo.ttft_s is not None:
            message.slo.ttft_ms = request.slo.ttft_s * 1e3
        if request.slo.tpot_s is not None:
            message.slo.tpot_ms = request.slo.tpot_s * 1e3
        for name in self._settings.more:
            message.ClearField(name)
        message.MergeFrom(self._more)
        return request.index % len(self._targets), message

    def send(self, prepared: Any, exchange: Exchange) -> None:
        endpoint, message = prepared
        exchange.endpoint = self._targets[endpoint]
        methods = self._methods[endpoint]
        self._num_calls += 1
        call = methods[self._num_calls % len(methods)](
            message, timeout=self._settings.timeout_s, metadata=self._metadata
        )
        exchange.sent_s = self._clock()
        exchange.set_abort(call.cancel)
        task = asyncio.get_running_loop().create_task(self._read(call, exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def preconnect(self, num_requests: int, at_most: int) -> bool:
        """Return False: calls share connections that are already open."""
        return False

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for channels in self._channels:
            for channel in channels:
                await channel.close()

    async def _obstacle(self, channel: Any) -> str:
        """Return gRPC's reason why a channel does not become ready."""
        import grpc.aio

        try:
            await self._pb_grpc.InferenceStub(channel).ListModels(self._pb.ListModelsRequest(), timeout=1.0)
        except grpc.aio.AioRpcError as error:
            return error.details() or error.code().name
        return f"not within {self._settings.open_timeout_s:g} s"

    async def _read(self, call: Any, exchange: Exchange) -> None:
        import grpc
        import grpc.aio

        try:
            while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                at_s = self._clock()
                if at_s >= self.due_check.at_s:
                    self.due_check.fire()
                self._take(message, exchange, at_s)
            for name, value in await call.initial_metadata() or ():
                if name == "x-request-id":
                    exchange.request_id = str(value)
            at_s = self._clock()
            # A failed call also ends its messages, so the status decides.
            if await call.code() is grpc.StatusCode.OK:
                exchange.status = 200
                exchange.is_complete = bool(exchange.finish_reason)
                exchange.end(at_s)
            else:
                await self._failed(call, exchange, at_s)
        except grpc.aio.AioRpcError:
            await self._failed(call, exchange, self._clock())
        except asyncio.CancelledError:
            exchange.cancel(self._clock())
            if not call.done():
                call.cancel()
        except Exception as error:
            exchange.fail(self._clock(), f"{type(error).__name__}: {error}")

    def _take(self, message: Any, exchange: Exchange, at_s: float) -> None:
        from google.protobuf.json_format import MessageToDict

        if message.HasField("usage"):
            usage = message.usage
            exchange.num_prompt_tokens = usage.prompt_tokens
            exchange.num_output_tokens = usage.completion_tokens
            exchange.num_cached_tokens = usage.cached_tokens
        if message.HasField("timeline"):
            exchange.timeline = MessageToDict(message.timeline, preserving_proto_field_name=True)
        num_tokens = 0
        for choice in message.choices:
            if choice.text:
                exchange.texts.append(choice.text)
            num_tokens += len(choice.token_ids)
            exchange.token_ids += choice.token_ids
            if choice.HasField("finish_reason"):
                exchange.finish_reason = _FINISH.get(choice.finish_reason, "")
        if num_tokens:
            exchange.add_tokens(at_s, num_tokens)

    async def _failed(self, call: Any, exchange: Exchange, at_s: float) -> None:
        code = await call.code()
        for name, value in await call.trailing_metadata() or ():
            if name == "baton-reason":
                exchange.reason = str(value)
            elif name == "retry-after-s":
                exchange.retry_after_s = _number(str(value))
        exchange.fail(at_s, shown(await call.details() or code.name), status=HTTP_OF.get(code.name, 500))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
