"""The HTTP server over loopback: invalid requests, deadlines, disconnects, draining and overload."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.core.errors import Code, Failure, Reason
from baton.gateway.http.http_pipelining import HEAD_PIECE_BYTES, MAX_PIPELINED
from tests.integration.gateway.http_gateway import HttpGateway, http_gateway, request_bytes, stream_events
from tests.invalid_requests import INVALID_JSON, WRONG_CONTENT_TYPES
from tests.unit.gateway.fakes import until

PD = (("p0", "prefill"), ("d0", "decode"))
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
HELLO_PROMPT = b"user: hello\nassistant: "


@pytest.fixture
async def gateway() -> AsyncIterator[HttpGateway]:
    async with http_gateway(*PD) as g:
        yield g


GET_HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.fault("F-37")
async def test_pipelined_requests_are_parsed_as_responses_leave(gateway: HttpGateway) -> None:
    """A connection that sends thousands of requests at once holds only some of them."""
    number, longest, received = 4000, 0, bytearray()
    connection = await gateway.connect()
    sending = asyncio.create_task(connection.send(GET_HEALTH * number))
    while received.count(b"HTTP/1.1 200 OK") < number:
        received += await connection.reader.read(2**16)
        longest = max([longest, *(len(each.pipeline) for each in gateway.server.connections)])
    await sending
    assert 1 < longest <= MAX_PIPELINED + HEAD_PIECE_BYTES // len(GET_HEALTH) + 1
    await connection.close()


async def test_requests_that_follow_an_unanswered_one_are_not_read(gateway: HttpGateway) -> None:
    """The gateway reads no more of a connection until an earlier response has been sent."""
    for worker in gateway.cluster.scheduler.workers:
        worker.is_paused = True
    connection = await gateway.connect()
    body = json.dumps({"prompt": "x"}).encode()
    sending = asyncio.create_task(connection.send(request_bytes(COMPLETIONS, body) + GET_HEALTH * 300_000))
    await until(lambda: any(len(each.pipeline) >= MAX_PIPELINED for each in gateway.server.connections))
    await asyncio.sleep(0.3)
    (waiting,) = [each for each in gateway.server.connections if each.pipeline]
    assert len(waiting.pipeline) <= MAX_PIPELINED + HEAD_PIECE_BYTES // len(GET_HEALTH) + 1
    assert len(waiting._unparsed) < 2**20
    assert not sending.done()
    sending.cancel()
    connection.writer.transport.abort()
    for worker in gateway.cluster.scheduler.workers:
        worker.is_paused = False
    await until_no_open_jobs(gateway)


async def until_no_open_jobs(gateway: HttpGateway) -> None:
    """Wait until no worker runs a job: all cancels have arrived."""
    service, workers = gateway.cluster.gateway, gateway.cluster.scheduler.workers
    await until(lambda: not service.num_open and not any(worker.open_jobs for worker in workers))


# Invalid HTTP requests. Fields are tested with the validator.


async def test_invalid_bodies_are_rejected(gateway: HttpGateway) -> None:
    for content, error_words in INVALID_JSON:
        answer = await gateway.post(COMPLETIONS, content=content)
        assert answer.status_code == 400, (content[:40], answer.text)
        assert error_words in answer.json()["error"]["message"], content[:40]
    assert (await gateway.client.get("/health")).status_code == 200


async def test_wrong_content_types_are_rejected(gateway: HttpGateway) -> None:
    for headers in WRONG_CONTENT_TYPES:
        answer = await gateway.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == 415, headers
        assert "application/json" in answer.json()["error"]["message"]
    good = await gateway.post(
        COMPLETIONS, content=b'{"prompt": "x"}', headers={"Content-Type": 'Application/JSON; charset="UTF-8"'}
    )
    assert good.status_code == 200


async def test_invalid_timeout_headers_are_rejected(gateway: HttpGateway) -> None:
    for text in ("0", "-1", "1.5", "abc", "", "9" * 30, "1_000"):
        answer = await gateway.post(COMPLETIONS, {"prompt": "x"}, headers={"x-baton-timeout-ms": text})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-baton-timeout-ms"), text


async def test_body_over_the_limit_is_rejected_and_the_connection_stays_usable() -> None:
    async with http_gateway(*PD, max_body_bytes=10_000) as gateway:
        raw = await gateway.connect()
        await raw.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100000000\r\n\r\n"
        )
        assert (await raw.read_until(b'"status": 413')).startswith(b"HTTP/1.1 413 ")
        await raw.close()
        # If the complete body is sent, the client still gets the response, and the connection stays usable.
        for _ in range(2):
            answer = await gateway.post(COMPLETIONS, content=b"x" * 3_000_000)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert (await gateway.post(COMPLETIONS, {"prompt": "x"})).status_code == 200

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b" " * 1000

        answer = await gateway.client.post(COMPLETIONS, content=endless(), headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert (await gateway.post(COMPLETIONS, content=b'{"prompt": "' + b"x" * 900 + b'"}')).status_code == 200


async def test_head_over_the_limit_is_rejected(gateway: HttpGateway) -> None:
    raw = await gateway.connect()

    async def send_head() -> None:
        await raw.send(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        for _ in range(1000):
            await raw.send(b"x-header: " + b"y" * 10_000 + b"\r\n")

    with pytest.raises(OSError):  # noqa: PT011 - which one depends on what the kernel notices first
        await send_head()
    await raw.close()


# Deadlines.


async def test_slow_heads_and_bodies_are_closed_at_the_receive_deadline() -> None:
    async with http_gateway(*PD, receive_deadline_s=1.0) as gateway:

        async def send_slowly(data: bytes) -> bytes:
            raw = await gateway.connect(first=data[:1])

            async def send() -> None:
                for byte in data[1:]:
                    await raw.send(bytes([byte]))
                    await asyncio.sleep(0.05)

            sending = asyncio.create_task(send())
            try:
                return await raw.read_until_closed()
            finally:
                sending.cancel()
                await asyncio.wait((sending,))
                await raw.close()

        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        body = request_bytes(COMPLETIONS, b'{"prompt": "' + b"x" * 200)
        complete_head = body[: body.index(b"\r\n\r\n") + 4]
        answers = await asyncio.gather(
            *[send_slowly(head * 3) for _ in range(10)],
            *[_send_body_slowly(gateway, complete_head, b"x" * 200) for _ in range(10)],
        )
        assert all(answer.startswith(b"HTTP/1.1 408 ") and b'"status": 408' in answer for answer in answers)
        raw = await gateway.connect()  # sends nothing at all
        assert await raw.read_until_closed() == b""
        await raw.close()
        metrics = (await gateway.client.get("/metrics")).text
        assert 'baton_requests_total{code="408",endpoint="",reason="deadline"} 10.0' in metrics, (
            "the endpoint is unknown until the head is complete"
        )
        assert 'baton_requests_total{code="408",endpoint="completions",reason="deadline"} 10.0' in metrics
        assert 'code="499"' not in metrics
        assert (await gateway.post(COMPLETIONS, {"prompt": "x"})).status_code == 200


async def _send_body_slowly(gateway: HttpGateway, head: bytes, body: bytes) -> bytes:
    raw = await gateway.connect(first=head)

    async def send() -> None:
        for byte in body:
            await raw.send(bytes([byte]))
            await asyncio.sleep(0.05)

    sending = asyncio.create_task(send())
    try:
        return await raw.read_until_closed()
    finally:
        sending.cancel()
        await asyncio.wait((sending,))
        await raw.close()


async def test_response_may_take_longer_than_the_receive_deadline() -> None:
    async with http_gateway(*PD, receive_deadline_s=0.3) as gateway:
        gateway.cluster.scheduler.workers[1].step_s = 0.1
        raw = await gateway.connect(
            first=request_bytes(COMPLETIONS, b'{"prompt": "x", "max_tokens": 8, "stream": true}')
        )
        await raw.read_until(b"data: [DONE]\n\n")
        await raw.close()


async def test_connection_stays_open_after_a_streamed_response() -> None:
    """The timeout for unread responses must not close a connection whose response was read."""
    async with http_gateway(("h0", "hybrid"), receive_deadline_s=1.0) as gateway:
        # All tokens in one step, so that the response and the call end in the same event loop iteration.
        gateway.cluster.scheduler.workers[0].tokens_a_step = 8
        request = request_bytes(COMPLETIONS, b'{"prompt": "x", "max_tokens": 3, "stream": true}')
        raw = await gateway.connect(first=request)
        for number in range(1, 3):
            if number > 1:
                await raw.send(request)
            async with asyncio.timeout(20):
                while raw.seen.count(b"[DONE]") < number:
                    raw.seen += await raw.reader.read(65536)
            await asyncio.sleep(1.2)
            assert not raw.reader.at_eof()
        await raw.close()


@pytest.mark.fault("F-35")
@pytest.mark.parametrize("stream", [False, True])
async def test_deadline_before_the_first_token_returns_504(gateway: HttpGateway, stream: bool) -> None:
    gateway.cluster.scheduler.workers[0].prefill_s = 10
    gateway.cluster.scheduler.workers[1].prefill_s = 10
    answer = await gateway.post(COMPLETIONS, {"prompt": "x", "stream": stream}, headers={"x-baton-timeout-ms": "150"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
    await until_no_open_jobs(gateway)


@pytest.mark.fault("F-35")
async def test_deadline_within_a_stream_sends_an_error_event_without_done(gateway: HttpGateway) -> None:
    gateway.cluster.scheduler.workers[1].step_s = 0.1
    body = {"prompt": "x", "max_tokens": 500, "stream": True}
    for _ in range(5):
        answer = await gateway.post(COMPLETIONS, body, headers={"x-baton-timeout-ms": "1500"})
        if answer.status_code == 200:
            break
        assert answer.status_code == 504, "the deadline passed before the first token"
    assert answer.status_code == 200
    *_, last, end = answer.text.split("\n\n")
    assert (last.split("\n")[0], end) == ("event: error", "")
    error = json.loads(last.split("\n")[1].removeprefix("data: "))["error"]
    assert (error["status"], error["code"], error["type"]) == (504, "deadline", "timeout_error")
    await until_no_open_jobs(gateway)


# Clients that disconnect or do not read.


@pytest.mark.fault("F-34")
@pytest.mark.parametrize("phase", ["queued", "prefill", "stream", "non-streaming"])
async def test_disconnect_cancels_the_request_on_all_workers(gateway: HttpGateway, phase: str) -> None:
    p0, d0 = gateway.cluster.scheduler.workers
    p0.prefill_s = d0.prefill_s = 30 if phase == "prefill" else 0.01
    gateway.cluster.scheduler.hangs = phase == "queued"
    d0.step_s = 0.05
    raw = await gateway.connect()
    body = {"prompt": "x", "max_tokens": 500, "stream": phase != "non-streaming"}
    await raw.send(request_bytes(COMPLETIONS, json.dumps(body).encode()))
    if phase == "stream":
        await raw.read_until(b"data: ")
    else:
        await until(lambda: gateway.cluster.gateway.num_open)
        await until(lambda: phase == "queued" or d0.jobs)
    assert gateway.cluster.gateway.num_open == 1
    await raw.close()
    await until_no_open_jobs(gateway)
    if phase != "queued":
        assert {cancel.reason for cancel in d0.cancels} == {Reason.CANCELLED}
    gateway.cluster.scheduler.hangs = False
    metrics = (await gateway.client.get("/metrics")).text
    assert 'baton_requests_total{code="499",endpoint="completions",reason="cancelled"} 1.0' in metrics


@pytest.mark.fault("F-42")
async def test_slow_reader_is_cancelled_and_others_are_served() -> None:
    async with http_gateway(*PD, stream_buffer_bytes=16 * 1024, send_buffer_bytes=2**16) as gateway:
        p0, d0 = gateway.cluster.scheduler.workers
        for worker in (p0, d0):
            worker.report = replace(worker.report, max_model_len=10**6)
            worker.token_at = lambda _prompt, _sample, _index: 97
        gateway.cluster.scheduler.publish()
        d0.step_s, d0.tokens_a_step = 0.02, 500
        await until(lambda: gateway.cluster.gateway.view.max_model_len == 10**6)
        raw = await gateway.connect()
        body = {"prompt": "x", "max_tokens": 100_000, "stream": True, "return_token_ids": True, "n": 4}
        await raw.send(request_bytes(COMPLETIONS, json.dumps(body).encode()))
        await until(lambda: d0.cancels, timeout_s=60)
        assert {cancel.reason for cancel in d0.cancels} == {Reason.SLOW_READER}
        await until_no_open_jobs(gateway)
        assert b"[DONE]" not in await raw.read_until_closed()
        await raw.close()
        d0.step_s, d0.tokens_a_step = 0.01, 1
        assert (await gateway.post(COMPLETIONS, {"prompt": "x", "max_tokens": 5})).status_code == 200


async def test_pipelined_requests_on_one_connection_are_all_answered(gateway: HttpGateway) -> None:
    raw = await gateway.connect()
    one = request_bytes(COMPLETIONS, b'{"prompt": "a", "max_tokens": 3}')
    await raw.send(one + one + one[:50])
    await raw.read_until(b'"finish_reason": "length"')
    await asyncio.sleep(0.3)
    await raw.send(one[50:])
    async with asyncio.timeout(20):
        while raw.seen.count(b"HTTP/1.1 200") < 3 or raw.seen.count(b'"usage"') < 3:
            raw.seen += await raw.reader.read(65536)
    assert raw.seen.count(b'"finish_reason": "length"') == 3
    await raw.close()


# Draining and overload.


async def test_draining_gateway_finishes_streams_and_rejects_new_requests(gateway: HttpGateway) -> None:
    gateway.cluster.scheduler.workers[1].step_s = 0.05
    stream = asyncio.create_task(stream_events(gateway, COMPLETIONS, {"prompt": "x", "max_tokens": 40}))
    await until(lambda: gateway.cluster.scheduler.workers[1].jobs)
    drained = asyncio.create_task(gateway.cluster.gateway.drain(60.0))
    await asyncio.sleep(0)
    ready, health = await gateway.client.get("/ready"), await gateway.client.get("/health")
    assert (ready.status_code, ready.json()["reasons"], health.status_code) == (503, ["draining"], 200)
    refused = await gateway.post(COMPLETIONS, {"prompt": "y"})
    assert (refused.status_code, refused.json()["error"]["code"], refused.headers["connection"]) == (
        503,
        "draining",
        "close",
    )
    assert refused.headers["retry-after"] == "1"
    assert not drained.done()
    assert len(await stream) == 40
    await drained


async def test_request_above_the_limit_of_open_requests_is_rejected() -> None:
    async with http_gateway(*PD, max_open_requests=2) as gateway:
        gateway.cluster.scheduler.workers[1].step_s = 0.2
        running = [asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "x", "max_tokens": 8})) for _ in range(2)]
        await until(lambda: gateway.cluster.gateway.num_open == 2)
        refused = await gateway.post(COMPLETIONS, {"prompt": "y"})
        assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == (
            429,
            "queue_full",
            "1",
        )
        assert [(await answer).status_code for answer in running] == [200, 200]


async def test_failure_of_one_prompt_fails_the_call(gateway: HttpGateway) -> None:
    failure = Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message="nan")
    gateway.cluster.scheduler.workers[1].fail_job = lambda job: failure if bytes(job.token_ids) else None
    gateway.cluster.scheduler.workers[0].prefill_s = 1.0
    answer = await gateway.post(COMPLETIONS, {"prompt": ["a", "b"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "numerical_error")
    await until_no_open_jobs(gateway)


async def test_responses_are_not_delayed_by_nagles_algorithm(gateway: HttpGateway) -> None:
    """Nagle's algorithm with delayed acknowledgements would add 40 ms on a reused connection."""
    await gateway.client.get("/health")
    sockets = [connection.transport.get_extra_info("socket") for connection in gateway.server.connections]
    assert sockets
    assert all(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in sockets)
