"""Servicer and client of `baton.v1.Inference`, the inference API for clients."""

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from baton.core.client_api import Caller, GenerateChunk, GenerateStream, InferenceApi, ModelInfo, session_of
from baton.core.errors import Refused, StreamBroken
from baton.core.kv.block_hash import TokenIds, token_ids
from baton.core.request_limits import LIMITS
from baton.rpc import grpc_status
from baton.rpc.client_writer import ClientWriter
from baton.rpc.gates.client_message import CallBody
from baton.rpc.gates.receive_gate import AUTHORIZATION_KEY
from baton.rpc.mappers import client_mapper as convert
from baton.rpc.streams.grpc_sources import GrpcSource
from baton.rpc.streams.grpc_streams import wait_until_accepted
from baton.rpc.streams.stream_limits import StreamLimits
from baton.runtime.process import loop_time
from baton.runtime.process.awake_timeout import TimeLimit
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
REQUEST_ID_KEY = "x-request-id"
IGNORED_FIELDS_KEY = "x-baton-ignored-fields"
TRACE_KEY = "traceparent"
MAX_TIMEOUT_S = (LIMITS["x-baton-timeout-ms"].maximum or 0) / 1000
"""Longest deadline of a call, as over HTTP. A longer one is cut."""

Context = grpc.aio.ServicerContext[Any, Any]


def caller_of(context: Context) -> Caller:
    """Return credentials, deadline, address and trace context of a call."""
    metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
    left_s = context.time_remaining()
    return Caller(
        authorization=str(metadata.get(AUTHORIZATION_KEY, "")),
        timeout_s=None if left_s is None else min(left_s, MAX_TIMEOUT_S),
        address=context.peer(),
        trace_context=str(metadata.get(TRACE_KEY, "")),
        session=session_of({name: str(value) for name, value in metadata.items()}),
    )


def client_errors_as_status(context: Context) -> grpc_status.errors_as_status:
    """Return `grpc_status.errors_as_status` with the trailing metadata for clients."""
    return grpc_status.errors_as_status(context, grpc_status.client_metadata)


class InferenceServicer:
    """Serves an `InferenceApi` over gRPC."""

    def __init__(self, api: InferenceApi, writer: ClientWriter) -> None:
        self._api = api
        self._writer = writer

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the methods.

        A message is converted to a `CallBody` where it is decoded: in the memory budget, and in a thread if
        it is large.
        """
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        from_generate = _decoder(pb.GenerateRequest, convert.from_generate_request)
        from_tokenize = _decoder(pb.TokenizeRequest, convert.from_tokenize_request)
        from_detokenize = _decoder(pb.DetokenizeRequest, convert.from_detokenize_request)
        handlers = {
            "Generate": stream(self._generate, from_generate, pb.GenerateResponse.SerializeToString),
            # One response each, but written like a stream's, because that shows when the client has read it.
            "Tokenize": stream(self._tokenize, from_tokenize, bytes),
            "Detokenize": stream(self._detokenize, from_detokenize, bytes),
            "ListModels": unary(
                self._list_models, pb.ListModelsRequest.FromString, pb.ListModelsResponse.SerializeToString
            ),
        }
        server.add_registered_method_handlers(SERVICE, handlers)  # type: ignore[attr-defined]  # the stubs lack it
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def _generate(self, body: CallBody, context: Context) -> None:
        """Stream one generation.

        If the client goes away or its deadline passes, grpc cancels this coroutine, which closes it.
        """
        async with client_errors_as_status(context):
            with body:
                generation = await self._api.generate(body.fields, self._caller(context))
            try:
                await context.send_initial_metadata(_metadata_of(generation))
                await self._send_all(generation, context)
            finally:
                await generation.aclose()

    def _caller(self, context: Context) -> Caller:
        return replace(caller_of(context), cut_off=partial(self._writer.cut_off, context))

    async def _send_all(self, generation: GenerateStream, context: Context) -> None:
        while True:
            chunk = await generation.receive()
            await self._writer.write(context, convert.to_generate_response(chunk))
            if chunk.is_last:
                return

    async def _tokenize(self, body: CallBody, context: Context) -> None:
        async with client_errors_as_status(context), AsyncExitStack() as stack:
            with body:
                ids = await stack.enter_async_context(self._api.tokenize(body.fields, self._caller(context)))
            response = await loop_time.call(len(ids), loop_time.MESSAGE_IDS, lambda: convert.to_tokenize_response(ids))
            await self._writer.write(context, response)

    async def _detokenize(self, body: CallBody, context: Context) -> None:
        async with client_errors_as_status(context), AsyncExitStack() as stack:
            with body:
                text = await stack.enter_async_context(self._api.detokenize(body.fields, self._caller(context)))
            response = await loop_time.call(
                len(text), loop_time.JSON_CHARACTERS, lambda: pb.DetokenizeResponse(text=text).SerializeToString()
            )
            await self._writer.write(context, response)

    async def _list_models(self, message: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        async with client_errors_as_status(context):
            return pb.ListModelsResponse(
                models=[convert.to_model(model) for model in await self._api.models(caller_of(context))]
            )


def _metadata_of(generation: GenerateStream) -> tuple[tuple[str, str], ...]:
    """Return the initial metadata of a response: the names of HTTP's headers."""
    ignored = ", ".join(generation.ignored_fields)
    metadata = ((REQUEST_ID_KEY, generation.request_id),)
    return (*metadata, (IGNORED_FIELDS_KEY, ignored)) if ignored else metadata


def _decoder(message_class: type[Message], to_fields: Callable[[Any], dict[str, Any]]) -> Callable[[bytes], CallBody]:
    return lambda raw: CallBody(to_fields(message_class.FromString(raw)))


class InferenceClient:
    """Client of `InferenceApi`. Raises Refused like the API, and StreamBroken without an answer."""

    def __init__(
        self, channel: grpc.aio.Channel, address: str, *, authorization: str = "", call_s: float = 10.0
    ) -> None:
        self._stub = pb_grpc.InferenceStub(channel)
        self._address = address
        self._call_s = call_s
        self._metadata = ((AUTHORIZATION_KEY, authorization),) if authorization else ()

    async def generate(self, body: Mapping[str, Any], timeout_s: float | None = None) -> "ClientGenerateStream":
        call = self._stub.Generate(convert.to_generate_request(body), timeout=timeout_s, metadata=self._metadata)
        try:
            request_id = await wait_until_accepted(call, TimeLimit(timeout_s), self._address, REQUEST_ID_KEY)
            metadata = dict(await call.initial_metadata())
        except grpc.aio.AioRpcError as error:
            raise grpc_status.call_error(error, self._address) from error
        ignored = str(metadata.get(IGNORED_FIELDS_KEY, ""))
        return ClientGenerateStream(call, self._address, request_id, tuple(filter(None, ignored.split(", "))))

    async def tokenize(self, prompt: str) -> TokenIds:
        reply: pb.TokenizeResponse = await self._called(self._stub.Tokenize, pb.TokenizeRequest(prompt=prompt))
        return token_ids(reply.token_ids)

    async def detokenize(self, tokens: TokenIds) -> str:
        reply: pb.DetokenizeResponse = await self._called(self._stub.Detokenize, pb.DetokenizeRequest(token_ids=tokens))
        return reply.text

    async def models(self) -> tuple[ModelInfo, ...]:
        reply: pb.ListModelsResponse = await self._called(self._stub.ListModels, pb.ListModelsRequest())
        return tuple(convert.from_model(model) for model in reply.models)

    async def _called(self, method: Callable[..., Any], message: Any) -> Any:
        try:
            return await method(message, timeout=self._call_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise grpc_status.call_error(error, self._address) from error


class ClientGenerateStream:
    """Implements `GenerateStream`."""

    def __init__(self, call: Any, address: str, request_id: str, ignored_fields: tuple[str, ...] = ()) -> None:
        self._source: GrpcSource[GenerateChunk] = GrpcSource(
            call, convert.from_generate_response, StreamLimits(), address
        )
        self.request_id = request_id
        self.ignored_fields = ignored_fields

    async def receive(self) -> GenerateChunk:
        try:
            return await self._source.receive()
        except StreamBroken as broken:
            if broken.failure is not None:
                raise Refused(broken.failure) from broken
            raise

    async def aclose(self) -> None:
        await self._source.aclose()
