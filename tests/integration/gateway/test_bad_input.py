"""Invalid requests to a gateway process over HTTP and gRPC are rejected with equal errors (F-36 to F-38).

After each case the gateway is alive, answers a valid request correctly, and its memory has grown by less
than a bound. No client error returns a 5xx status.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.request_limits import MAX_HEAD_BYTES
from baton.gateway.http.asgi_io import TIMEOUT_HEADER
from tests import grpc_methods
from tests.grpc_methods import EXPECTED_CODES, OK, Method, call
from tests.integration.gateway.gateway_process import GatewayProcess, gateway_process, valid_body
from tests.integration.gateway.stub_cluster import MAX_MODEL_LEN, MAX_NUM_SEQS
from tests.invalid_requests import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    HELLO,
    JSON_HEADERS,
    TOKENIZE,
    Case,
    accepted_bodies,
    bodies,
    cases,
    error_over_grpc,
    grpc_only,
    message_of,
    mutated_bytes,
    mutated_value,
)
from tests.malformed_connections import (
    HTTP2_START,
    Canary,
    broken_http2,
    exchange,
    grpc_call,
    grpc_message,
    internal_errors,
)
from tests.scale import sized
from tests.unit.gateway.fakes import until
from tests.unit.rpc.strategies import messages

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

VOCAB_SIZE = 4096
MAX_BODY_BYTES = 2**21
RECEIVE_DEADLINE_S = 5.0
MAX_GROWTH_BYTES = 200 * 2**20
"""Bound for memory growth. Each of the larger inputs would exceed it if it were not rejected early."""
LONG_LIMITS: dict[str, Any] = {"listen_s": 60.0, "quiet_s": 60.0}
"""For an exchange that ends with the answer, or with the connection."""
FUZZ = settings(
    max_examples=sized(30, 1000),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
GENERATE = "/baton.v1.Inference/Generate"
CASES = cases(max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS, vocab_size=VOCAB_SIZE)
PUBLIC = [method for method in grpc_methods.all_methods() if method.service.startswith("baton.v1.")]


class CheckedGateway:
    """A gateway and the checks that must hold after each case."""

    def __init__(self, process: GatewayProcess) -> None:
        self.process = process
        self.http = process.http
        self.before_bytes = process.rss_bytes

    async def check(self) -> None:
        await self.process.check()
        growth_bytes = self.process.rss_bytes - self.before_bytes
        assert growth_bytes < MAX_GROWTH_BYTES, f"grown by {growth_bytes >> 20} MiB"

    async def post(self, path: str, content: bytes, headers: Any = None) -> tuple[int, dict[str, Any]]:
        """Return status and error object of the response, which must be a success or a client error."""
        answer = await self.http.post(path, content=content, headers=JSON_HEADERS if headers is None else headers)
        assert answer.status_code in (200, 400, 404, 405, 413, 415), (content[:200], answer.text)
        if answer.status_code == 200:
            return 200, {}
        error = answer.json()["error"]
        assert error["status"] == answer.status_code
        assert error["type"] == "invalid_request_error"
        return answer.status_code, error

    async def generate(self, message: bytes) -> grpc_methods.CallEnd:
        return await call(self.process.channel, GENERATE, [message], wait_s=20, max_replies=10_000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[CheckedGateway]:
    async with gateway_process(
        max_body_bytes=MAX_BODY_BYTES,
        receive_deadline_s=RECEIVE_DEADLINE_S,
        log_level="warning",
        max_open_requests=4096,
    ) as process:
        for _ in range(20):
            await process.check()
        await process.check_grpc()
        yield CheckedGateway(process)
        await process.check_grpc()
        assert internal_errors(process.log.splitlines()) == [], "invalid input is not logged as an internal error"


# The corpus.


@pytest.mark.fault("F-37", "F-38")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_http_and_grpc_reject_an_invalid_request_with_the_same_message(
    gateway: CheckedGateway, case: Case
) -> None:
    status, error = await gateway.post(case.path, case.content, case.headers)
    assert (status, error.get("code")) == (case.status, case.code)
    assert all(words in error["message"] for words in case.error_words), error["message"]
    if (message := case.message) is not None:
        answered = await gateway.generate(message.SerializeToString())
        expected = grpc.StatusCode.NOT_FOUND if case.status == 404 else grpc.StatusCode.INVALID_ARGUMENT
        assert (answered.code, answered.details) == (
            expected,
            error_over_grpc(error["message"], has_ids=bool(message.token_ids)),
        )
    await gateway.check()


async def test_invalid_grpc_messages_without_http_equivalent_are_rejected(gateway: CheckedGateway) -> None:
    for name, raw, error_words in grpc_only():
        answered = await gateway.generate(raw)
        assert answered.code is grpc.StatusCode.INVALID_ARGUMENT, (name, answered)
        assert error_words in answered.details, name
        await gateway.check()


async def test_ignored_fields_are_accepted(gateway: CheckedGateway) -> None:
    for path, body in accepted_bodies():
        assert (await gateway.post(path, json.dumps(body).encode()))[0] == 200, body
    await gateway.check()


async def test_prompt_of_the_largest_size_is_served(gateway: CheckedGateway) -> None:
    body = {"prompt": [5] * (MAX_MODEL_LEN - 10), "max_tokens": 10}
    assert (await gateway.post(COMPLETIONS, json.dumps(body).encode()))[0] == 200
    assert (await gateway.generate(message_of(body).SerializeToString())).code is OK  # type: ignore[union-attr]


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.fault("F-38")
@FUZZ
@given(body=bodies(numbers=NUMBERS, max_prompt=60))
async def test_http_and_grpc_give_the_same_result_for_any_parameters(
    gateway: CheckedGateway, body: dict[str, Any]
) -> None:
    status, error = await gateway.post(COMPLETIONS, json.dumps(body).encode())
    message = message_of(body)
    assert message is not None
    answered = await gateway.generate(message.SerializeToString())
    if status == 200:
        assert answered.code is OK
    else:
        assert answered.code is grpc.StatusCode.INVALID_ARGUMENT
        # Over gRPC, lists that are too long are refused before anything else is read.
        too_long = re.match("([a-z_]+) has ([0-9]+) items; at most", answered.details)
        assert answered.details == error_over_grpc(error["message"], has_ids=bool(message.token_ids)) or (
            too_long is not None and len(body[too_long[1]]) == int(too_long[2])
        )
    await gateway.check()


# Sizes and deadlines.


@pytest.mark.fault("F-36")
async def test_body_over_the_limit_is_rejected_before_it_is_read(gateway: CheckedGateway) -> None:
    before_bytes = gateway.process.rss_bytes
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    mib = b" " * 2**20

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield mib

    for content in (b" " * (MAX_BODY_BYTES + 1), chunks()):
        answer = await gateway.http.post(COMPLETIONS, content=content, headers=JSON_HEADERS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    for pieces in (
        [head + b"content-length: %d\r\n\r\n" % 10**15],  # the announced body is never sent
        [head + b"content-length: 104857600\r\n\r\n", *[mib] * 100],
        [head + b"transfer-encoding: chunked\r\n\r\n", *[b"100000\r\n" + mib + b"\r\n"] * 100],
    ):
        refused = await exchange(gateway.process.http_port, pieces, until=b'"status": 413', **LONG_LIMITS)
        assert status_of(refused.data) == 413
    answered = await gateway.generate(b"\x12" + bytes(100 * 2**20))
    assert answered.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await until(lambda: gateway.process.rss_bytes - before_bytes < 16 * 2**20)
    assert (await gateway.post(COMPLETIONS, json.dumps(valid_body(user="x" * 500)).encode().ljust(MAX_BODY_BYTES)))[
        0
    ] == 200
    await gateway.check()


async def test_small_message_that_decompresses_to_a_large_one_is_rejected(gateway: CheckedGateway) -> None:
    large_message = message_of({"prompt": "x" * (20 * 2**20)})
    assert large_message is not None
    generate = gateway.process.channel.unary_stream(GENERATE, request_serializer=type(large_message).SerializeToString)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate(large_message, compression=grpc.Compression.Gzip).read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await gateway.check()


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (COMPLETIONS, b'{"prompt": [' + b"1," * 500_000 + b"1]}"),
        (COMPLETIONS, b'{"prompt": [' + b"[]," * 300_000 + b"[]]}"),
        (COMPLETIONS, b'{"prompt": "x", "stop": [' + b'"",' * 300_000 + b'""]}'),
        (COMPLETIONS, b'{"prompt": "x", "logit_bias": {' + b",".join(b'"%d": 1' % i for i in range(60_000)) + b"}}"),
        (COMPLETIONS, json.dumps({"prompt": "\u20ac" * 150_000}).encode()),
        (COMPLETIONS, json.dumps({f"key{i}": i for i in range(50_000)}).encode()),
        (CHAT, json.dumps({"messages": [{"role": "user", "content": "ab " * 300_000}]}).encode()),
        (CHAT, json.dumps({"messages": [{"role": "user", "content": "x"}] * 20_000}).encode()),
        (DETOKENIZE, b'{"tokens": [' + b"7," * 400_000 + b"7]}"),
    ],
)
async def test_largest_bodies_do_not_delay_other_clients(gateway: CheckedGateway, path: str, content: bytes) -> None:
    """Each body is rejected, and other clients are served meanwhile."""
    assert len(content) <= MAX_BODY_BYTES
    large = asyncio.create_task(gateway.post(path, content))
    while not large.done():
        assert (await gateway.http.get("/health")).status_code == 200
        await asyncio.sleep(0.01)
    assert (await large)[0] == 400
    await gateway.check()


async def test_rejections_are_counted_by_status(gateway: CheckedGateway) -> None:
    before = await gateway.process.requests()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    port = gateway.process.http_port
    responses = await asyncio.gather(
        exchange(port, [head], **LONG_LIMITS),
        exchange(port, [head + b"content-length: 100\r\n\r\n{"], **LONG_LIMITS),
        exchange(port, [head + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\nnonsense\r\n"], **LONG_LIMITS),
        exchange(port, [b"nonsense\r\n\r\n"], **LONG_LIMITS),
        exchange(port, [head + b"x-header: " + b"y" * (2 * MAX_HEAD_BYTES)] + [b"y" * 1000] * 100, **LONG_LIMITS),
    )
    statuses = [status_of(each.data) for each in responses]
    assert statuses[:4] == [408, 408, 400, 400]
    assert statuses[4] in (413, None), "the response may be lost when a connection with unread bytes closes"
    await gateway.post(COMPLETIONS, b"{")
    await gateway.post(COMPLETIONS, b" " * (MAX_BODY_BYTES + 1))
    await gateway.post(COMPLETIONS, b"{}", {"content-type": "text/plain"})
    assert await gateway.process.requests() - before == {
        ("", "408"): 1,
        ("", "400"): 1,
        ("", "413"): 1,
        ("completions", "408"): 1,
        ("completions", "400"): 2,
        ("completions", "413"): 1,
        ("completions", "415"): 1,
    }
    await gateway.check()


def status_of(answer: bytes) -> int | None:
    found = re.match(rb"HTTP/1\.1 (\d\d\d) ", answer)
    return int(found[1]) if found else None


# Mutated bodies and bytes over HTTP.

VALID_BODIES: list[tuple[str, Any]] = [
    (
        COMPLETIONS,
        valid_body(temperature=0.5, stop=["x"], logit_bias={"7": 1}, slo={"ttft_ms": 5000}, stream=True, seed=1),
    ),
    (COMPLETIONS, {"prompt": ["one", "two"], "n": 2, "max_tokens": 3, "logprobs": 2, "metadata": {"a": "b"}}),
    (
        CHAT,
        HELLO | {"max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2, "stream_options": None, "tools": []},
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "bob"}], "max_tokens": 3},
    ),
    (TOKENIZE, {"prompt": "hello", "add_special_tokens": False, "model": "demo"}),
    (TOKENIZE, dict(HELLO)),
    (DETOKENIZE, {"tokens": [5, 6, 7]}),
]


@pytest.mark.fault("F-37")
@pytest.mark.parametrize("seed", range(sized(30, 1000)))
async def test_mutated_bodies_are_served_or_rejected(gateway: CheckedGateway, seed: int) -> None:
    rng = Random(seed)
    path, body = rng.choice(VALID_BODIES)
    content = json.dumps(mutated_value(rng, body)).encode()
    await gateway.post(path, content)
    await gateway.post(path, mutated_bytes(rng, content))
    await gateway.check()


def requests_to_mutate() -> Iterator[bytes]:
    """Return complete requests whose bytes will be mutated."""
    body = json.dumps(valid_body()).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    yield head + b"content-length: %d\r\n\r\n" % len(body) + body
    yield head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    yield head + b"expect: 100-continue\r\nx-baton-timeout-ms: 5000\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    yield b"GET /v1/models/demo?x=%41#y HTTP/1.1\r\nhost: localhost\r\ncookie: a=b\r\n\r\n" * 2
    yield b"GET /debug/decisions/00112233445566778899aabbccddeeff HTTP/1.0\r\n\r\n"
    yield (
        b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-key: eA==\r\n\r\n"
    )


POST_JSON = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
BAD_HTTP = [
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET / ",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}   ",
    POST_JSON + b"content-length: " + b"9" * 30 + b"\r\n\r\n{}",
    POST_JSON + b"content-length: -1\r\n\r\n{}",
    POST_JSON + b"content-length: 0x10\r\n\r\n{}",
    POST_JSON + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    POST_JSON + b"transfer-encoding: chunked\r\n\r\n-1\r\n{}\r\n",
    POST_JSON + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\0b\r\n\r\n",
    b"GET /health HTTP/1.1\nhost: x\n\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET \xff\xfe HTTP/1.1\r\n\r\n",
    b"GET /%ff%00%zz HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /debug/decisions/%20%0a HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /debug/decisions/" + b"ab" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET //v1/models/../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http://[::1/health HTTP/1.1\r\nhost: x\r\n\r\n",
    b"CONNECT localhost:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    b"BREW /health HTTP/1.1\r\nhost: x\r\n\r\n",
    b"\r\n" * 1000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
]


async def test_any_bytes_on_the_http_port_are_answered_or_closed(gateway: CheckedGateway, tmp_path: Path) -> None:
    rng, canary = Random(37), Canary(tmp_path)
    canary.check_payloads()
    valid = list(requests_to_mutate())
    broken = [mutated_bytes(rng, rng.choice(valid)) for _ in range(sized(50, 2000))]
    slots = asyncio.Semaphore(16)

    async def send(data: bytes) -> None:
        async with slots:
            responses = await exchange(gateway.process.http_port, [data], quiet_s=0.15)
            statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d\d\d) ", responses.data)]
            assert all(status < 500 for status in statuses), (data, responses.data)
            await gateway.check()

    await asyncio.gather(*[send(data) for data in (*BAD_HTTP, *canary.payloads, *broken)])
    canary.check()


async def test_invalid_timeouts_are_rejected(gateway: CheckedGateway) -> None:
    for text in ("0", "-1", "1.5", "abc", "", "9" * 30, "1_000", "\u0661".encode()):
        status, error = await gateway.post(
            COMPLETIONS, json.dumps(valid_body()).encode(), {**JSON_HEADERS, TIMEOUT_HEADER: text}
        )
        assert (status, error["param"]) == (400, TIMEOUT_HEADER), text


# Mutated frames and messages on the gRPC port.


async def test_broken_http2_only_ends_its_own_connection(gateway: CheckedGateway) -> None:
    rng = Random(38)
    message = message_of(valid_body(return_token_ids=None))
    assert message is not None
    valid = HTTP2_START + grpc_call(GENERATE, grpc_message(message.SerializeToString()))
    broken = [*broken_http2(GENERATE).values(), *(mutated_bytes(rng, valid) for _ in range(sized(30, 1000)))]
    slots = asyncio.Semaphore(16)

    async def send(data: bytes) -> None:
        async with slots:
            await exchange(gateway.process.grpc_port, [data], quiet_s=0.15)
            await gateway.check()

    await asyncio.gather(*[send(data) for data in broken])
    await gateway.process.check_grpc()


@pytest.mark.parametrize("method", PUBLIC, ids=[method.path for method in PUBLIC])
@settings(FUZZ, max_examples=sized(6, 200))
@given(data=st.data())
async def test_any_message_to_any_method_is_served_or_rejected(
    gateway: CheckedGateway, method: Method, data: st.DataObject
) -> None:
    raw = data.draw(
        st.one_of(st.binary(max_size=60), messages(method.message).map(lambda message: message.SerializeToString()))
    )
    answered = await call(gateway.process.channel, method.path, [raw], wait_s=20, max_replies=10_000)
    assert answered.code in EXPECTED_CODES | {OK}, answered
    await gateway.check()


async def test_pickle_sent_to_any_method_is_not_loaded(gateway: CheckedGateway, tmp_path: Path) -> None:
    canary = Canary(tmp_path)
    for method in PUBLIC:
        for payload in canary.payloads:
            answered = await call(gateway.process.channel, method.path, [payload], wait_s=20)
            assert answered.code is grpc.StatusCode.INVALID_ARGUMENT, (method, answered)
    for payload in canary.payloads:
        assert (await gateway.post(COMPLETIONS, payload))[0] == 400
        await gateway.post(
            COMPLETIONS, json.dumps(valid_body(user=payload.decode("latin-1").replace("\0", ""))).encode()
        )
    canary.check()
    await gateway.check()
