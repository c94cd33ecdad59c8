"""Clients that send cases over HTTP and gRPC, and record everything that they receive.

No client ends a request at its deadline: the gateway must do that. Over gRPC, the deadline is therefore sent
as the header `grpc-timeout`, and the call has no timeout of its own. A gateway gets the same bytes from a
call with a timeout. But with one, grpc ends the call at the client, so that a late gateway would not be seen.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import grpc.aio
import httpx

from baton.core.client_api import GenerateChunk
from baton.core.errors import Reason, Refused, StreamBroken
from baton.rpc.channel import channel_options, open_channel
from baton.rpc.grpc_status import call_error
from baton.rpc.inference_rpc import REQUEST_ID_KEY, ClientGenerateStream
from baton.rpc.mappers import client_mapper
from baton.rpc.streams.grpc_streams import CLOSED_THERE, wait_until_accepted
from baton.runtime.process.awake_timeout import TimeLimit
from baton.v1.inference_pb2_grpc import InferenceStub
from tests.cluster import GatewayAddresses
from tests.nemesis.cases import CHAT, GRPC, Case
from tests.nemesis.history import Answer, ChoiceOutput, End, Record

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
GIVE_UP_S = 60.0
"""Time after its deadline at which a client gives up. The request then counts as lost."""
AFTER_ERROR_S = 0.2
EARLY_S = 1.0
"""A call that the gateway ends longer before its deadline has not ended because of it."""
GRPC_TIMEOUT_KEY = "grpc-timeout"
SHORT_DEADLINES_S = (0.3, 3.0)
"""Deadlines that many requests do not meet, so that the end at a deadline is tested."""
_GRPC_HEARTBEAT_S = 60.0
"""A long keepalive, so that a paused gateway does not break streams."""
_NEVER = httpx.Timeout(None, connect=30.0)


class Clients:
    """Sends requests and keeps their records. `now_s`: the clock of all records."""

    def __init__(self, gateways: Mapping[str, GatewayAddresses], now_s: Callable[[], float]) -> None:
        self._gateways = gateways
        self._now_s = now_s
        self.records: list[Record] = []

    async def run(
        self, cases: Sequence[Case], rng: Random, *, deadline_s: float, short_share: float, until: asyncio.Event
    ) -> None:
        """Send one request after another until `until` is set, and wait for the last one.

        short_share: share of the requests that have one of `SHORT_DEADLINES_S` instead of `deadline_s`.
        """
        while not until.is_set():
            case, gateway = rng.choice(cases), rng.choice(list(self._gateways))
            is_stream = rng.random() < 0.6
            cancel_after = rng.randrange(1, 12) if rng.random() < 0.15 else None
            within_s = rng.uniform(*SHORT_DEADLINES_S) if rng.random() < short_share else deadline_s
            record = await self.send(case, gateway, is_stream=is_stream, deadline_s=within_s, cancel_after=cancel_after)
            if record.ends != [End.COMPLETE]:
                with suppress(TimeoutError):
                    await asyncio.wait_for(until.wait(), AFTER_ERROR_S)

    async def send(
        self, case: Case, gateway: str, *, is_stream: bool, deadline_s: float, cancel_after: int | None = None
    ) -> Record:
        """Send one request and record its answer.

        cancel_after: the client cancels after that many events of a stream, or that many tenths of a second.
        """
        way = "gRPC" if case.api == GRPC else "SSE" if is_stream else "HTTP"
        begin_s = self._now_s()
        record = Record(
            number=len(self.records),
            case=case.name,
            way=way if cancel_after is None else f"{way}, cancelled",
            gateway=gateway,
            begin_s=begin_s,
            deadline_s=begin_s + deadline_s,
        )
        self.records.append(record)
        send = {"gRPC": self._over_grpc, "SSE": self._streamed, "HTTP": self._whole}[way]
        try:
            async with asyncio.timeout(deadline_s + GIVE_UP_S):
                await send(record, case, self._gateways[gateway], deadline_s, cancel_after)
        except TimeoutError:
            pass  # the record has no end
        return record

    async def _over_grpc(
        self, record: Record, case: Case, at: GatewayAddresses, deadline_s: float, cancel_after: int | None
    ) -> None:
        num_chunks, metadata = 0, ((GRPC_TIMEOUT_KEY, f"{round(deadline_s * 1000)}m"),)
        async with open_channel(at.grpc_address, channel_options(_GRPC_HEARTBEAT_S)) as channel:
            call = InferenceStub(channel).Generate(client_mapper.to_generate_request(case.body), metadata=metadata)
            try:
                request_id = await wait_until_accepted(call, TimeLimit(None), at.grpc_address, REQUEST_ID_KEY)
                generation = ClientGenerateStream(call, at.grpc_address, request_id)
                try:
                    while True:
                        take_chunk(record.answer, await generation.receive())
                        num_chunks += 1
                        if cancel_after is not None and num_chunks >= cancel_after and not record.answer.num_ends:
                            record.end(End.CANCELLED, self._now_s())
                            return
                finally:
                    await generation.aclose()
            except grpc.aio.AioRpcError as error:
                self._grpc_failed(record, error.code(), call_error(error, at.grpc_address), num_chunks)
            except (Refused, StreamBroken) as error:
                self._grpc_failed(record, await call.code(), error, num_chunks)

    def _grpc_failed(self, record: Record, code: grpc.StatusCode, error: Exception, num_chunks: int) -> None:
        """Record the error that ended a call.

        The gateway's grpc library ends a call at its deadline with a status, often before the gateway does.
        Such a status has no reason.
        """
        now_s = self._now_s()
        if isinstance(error, Refused):
            failure = error.failure
            record.end(End.ERROR, now_s, reason=failure.reason.value, message=failure.message)
        elif str(error) == CLOSED_THERE:  # a stream without usage then counts as truncated
            record.end(End.COMPLETE, now_s)
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED and now_s >= record.deadline_s - EARLY_S:
            record.end(End.ERROR, now_s, reason=Reason.DEADLINE.value, message=str(error))
        else:
            record.end(End.BROKEN if num_chunks else End.UNREACHABLE, now_s, message=str(error))

    async def _streamed(
        self, record: Record, case: Case, at: GatewayAddresses, deadline_s: float, cancel_after: int | None
    ) -> None:
        body = {**case.body, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        async with (
            self._http(record) as client,
            client.stream(
                "POST", at.url + PATHS[case.api], json=body, headers=_deadline_header(deadline_s)
            ) as response,
        ):
            if response.status_code != httpx.codes.OK:
                await response.aread()
                self._fail(record, response.text)
                return
            num_events, event = 0, ""
            async for line in response.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    event = value
                elif name == "data":
                    num_events += 1
                    if event == "error":
                        self._fail(record, value)
                    else:
                        _take_event(record.answer, value, case.api)
                has_ended = record.answer.num_ends or record.ends
                if cancel_after is not None and num_events >= cancel_after and not has_ended:
                    record.end(End.CANCELLED, self._now_s())
                    return
            if event != "error":  # a stream without [DONE] then counts as truncated
                record.end(End.COMPLETE, self._now_s())

    async def _whole(
        self, record: Record, case: Case, at: GatewayAddresses, deadline_s: float, cancel_after: int | None
    ) -> None:
        body = {**case.body, "return_token_ids": True}
        async with self._http(record) as client:
            posted = client.post(at.url + PATHS[case.api], json=body, headers=_deadline_header(deadline_s))
            if cancel_after is not None:
                try:
                    response = await asyncio.wait_for(posted, cancel_after / 10)
                except TimeoutError:
                    record.end(End.CANCELLED, self._now_s())
                    return
            else:
                response = await posted
            if response.status_code != httpx.codes.OK:
                self._fail(record, response.text)
                return
            _take_whole(record.answer, response.json(), case.api)
            record.end(End.COMPLETE, self._now_s())

    @asynccontextmanager
    async def _http(self, record: Record) -> AsyncIterator[httpx.AsyncClient]:
        """A client with a connection of its own, so that no connection to a killed gateway is used again."""
        try:
            async with httpx.AsyncClient(timeout=_NEVER, trust_env=False) as client:
                yield client
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            record.end(End.UNREACHABLE, self._now_s(), message=repr(error))
        except httpx.TransportError as error:
            record.end(End.BROKEN, self._now_s(), message=repr(error))

    def _fail(self, record: Record, text: str) -> None:
        """Record a typed error. An error that is not one has no reason."""
        reason = ""
        with suppress(ValueError, KeyError, TypeError):
            reason = str(json.loads(text)["error"]["code"])
        record.end(End.ERROR, self._now_s(), reason=reason, message=text)


def _deadline_header(deadline_s: float) -> dict[str, str]:
    return {"x-baton-timeout-ms": str(round(deadline_s * 1000))}


def take_chunk(answer: Answer, chunk: GenerateChunk) -> None:
    """Add a message of a gRPC stream. Each message with usage is an end of the answer."""
    for delta in chunk.choices:
        choice = answer.choice(delta.index)
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.logprobs += [(each.logprob, each.top) for each in delta.logprobs]
        choice.finishes += [] if delta.finish is None else [delta.finish.value]
    if chunk.usage is not None:
        answer.usage = (chunk.usage.num_prompt_tokens, chunk.usage.num_output_tokens)
        answer.num_ends += 1


def _take_event(answer: Answer, data: str, api: str) -> None:
    if data == "[DONE]":
        answer.num_ends += 1
        return
    event = json.loads(data)
    for part in event["choices"]:
        _take_choice(answer.choice(part["index"]), part, api, "delta")
    if event.get("usage") is not None:
        answer.usage = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])


def _take_whole(answer: Answer, response: Mapping[str, Any], api: str) -> None:
    for part in response["choices"]:
        _take_choice(answer.choice(part["index"]), part, api, "message")
    answer.usage = (response["usage"]["prompt_tokens"], response["usage"]["completion_tokens"])
    answer.num_ends += 1


def _take_choice(choice: ChoiceOutput, part: Mapping[str, Any], api: str, message: str) -> None:
    choice.text += (part[message].get("content") or "") if api == CHAT else part["text"]
    choice.token_ids += part.get("token_ids") or []
    if part.get("finish_reason") is not None:
        choice.finishes.append(part["finish_reason"])
    if (logprobs := part.get("logprobs")) is not None:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        choice.logprobs += logprobs["content"] if api == CHAT else zip(*(logprobs[name] for name in names), strict=True)
