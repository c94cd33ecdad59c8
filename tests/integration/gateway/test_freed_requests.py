"""Requests of every API are freed when they end, without a garbage collection.

A full collection stops the event loop, and runs only while no request is open.
"""

import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from baton.core.errors import Code, Failure, Reason
from baton.core.ids import JobId
from baton.gateway.http.http_protocol import GatewayProtocol
from baton.gateway.http.output.event_queue import EventQueue
from baton.gateway.input.client_call import ClientCall
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.output.part_sink import PartSink
from baton.gateway.request.job_streams import JobStreams
from baton.gateway.request.open_request import OpenRequest
from baton.gateway.request.unread_output import UnreadOutput
from tests.integration.gateway.http_gateway import HttpGateway, http_gateway, request_bytes
from tests.scripted_chats import chat_tokenizer, write
from tests.unit.gateway.fakes import StubWorker, until

pytestmark = pytest.mark.integration
STEP_S = 0.0005
PD = (("p0", "prefill"), ("d0", "decode"))
ANSWER = '<think>why</think>hello <tool_call>{"name": "f", "arguments": {"a": "b c d"}}</tool_call>'
MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
PARTS = (ClientCall, OpenRequest, JobStreams, EventQueue, PartSink, UnknownFields, UnreadOutput)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 60, "n": 2, "echo": True},
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "max_tokens": 200,
        "n": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    },
    "/v1/responses": {
        "input": "x",
        "max_output_tokens": 200,
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    },
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 200, "tools": [{"name": "f", "input_schema": SCHEMA}]},
}


@pytest.fixture
async def gateway() -> AsyncIterator[HttpGateway]:
    async with http_gateway(*PD, tokenizer=chat_tokenizer("qwen3")) as gateway:
        write(gateway.cluster, ANSWER, ANSWER)
        for worker in gateway.cluster.scheduler.workers:
            worker.step_s = worker.prefill_s = STEP_S
        yield gateway


@contextmanager
def no_collection(*kinds: type) -> Iterator[Callable[[], list[str]]]:
    """Keep the collector off. Yield a function that names the new objects of these types.

    What is there already is frozen: it is not listed, and looking through it would take most of the time.
    """
    gc.collect()
    gc.freeze()
    gc.disable()

    def new_objects() -> list[str]:
        return sorted(type(each).__name__ for each in gc.get_objects() if isinstance(each, kinds))

    try:
        yield new_objects
    finally:
        gc.enable()


async def until_none(new_objects: Callable[[], list[str]]) -> None:
    try:
        await until(lambda: not new_objects(), timeout_s=10)
    except TimeoutError:
        raise AssertionError(f"not freed: {new_objects()}") from None


def fail_at_token_5(worker: StubWorker, job: JobId, sample: int, index: int) -> None:
    if index == 5:
        failure = Failure(code=Code.INVALID_ARGUMENT, reason=Reason.NO_TOKEN_LEFT, message="none")
        worker.fail_now(job, failure)


@pytest.mark.parametrize("path", BODIES)
async def test_ended_failed_and_left_requests_are_freed(gateway: HttpGateway, path: str) -> None:
    decode = gateway.cluster.scheduler.workers[1]
    usual = decode.before_token
    with no_collection(*PARTS) as new_objects:
        for body in (BODIES[path], BODIES[path] | {"stream": True}):
            decode.before_token = usual
            assert (await gateway.post(path, body)).status_code == 200
            await until_none(new_objects)
            assert (await gateway.post(path, body | {"temperature": "x"})).status_code == 400
            await until_none(new_objects)
            decode.before_token = fail_at_token_5
            assert "none" in (await gateway.post(path, body)).text
            await until_none(new_objects)
            decode.before_token = usual
            decode.step_s = 0.1  # the client leaves before the end
            raw = await gateway.connect()
            await raw.send(request_bytes(path, json.dumps(body).encode()))
            await until(lambda: gateway.cluster.gateway.num_open)
            await raw.close()
            await until_none(new_objects)
            decode.step_s = STEP_S


async def test_closed_connection_is_freed(gateway: HttpGateway) -> None:
    with no_collection(GatewayProtocol) as new_objects:
        raw = await gateway.connect(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await raw.read_until(b"200 OK")
        await raw.close()
        del raw
        await until_none(new_objects)
