"""Servers that reject, break, send garbage or stop sending: each request has the right outcome and keeps its
data."""

import asyncio
import socket

import pytest

from loadgen.loadgen_errors import Unreachable
from loadgen.measure.request_metrics import NOT_SENT, RequestOutcome
from loadgen.send.client import ResolvedRequest, send_once
from loadgen.send.dialects import DIALECTS
from loadgen.send.http.http_client import HttpClient, HttpSettings
from loadgen.send.http.http_connection import ConnectionLimits
from loadgen.send.selftest.scripted_server import Script, ScriptedEnd, ScriptedServer, ServedRequest
from loadgen.send.target import Target, new_client
from loadgen.slo_target import SloTarget
from tests.free_port import free_port
from tests.integration.loadgen.rig import measure
from tests.unit.gateway.fakes import until
from tests.unit.loadgen.plans import plan, request

SILENT_S = 3.0
"""Timeout of the request that the server does not end."""
REFUSAL = b'{"error": {"message": "too long a queue", "type": "rate_limit_error", "code": "ttft_slo"}}'


def target(server: ScriptedServer) -> Target:
    return Target(urls=(server.url,), model="scripted", dialect="baton")


@pytest.mark.parametrize(
    ("script", "outcome", "error", "num_tokens"),
    [
        (
            Script(num_tokens=3, ending=ScriptedEnd.CLOSE),
            RequestOutcome.FAILED,
            "closed by the server in the middle of the response, after 3 tokens",
            3,
        ),
        (
            Script(num_tokens=3, ending=ScriptedEnd.RESET),
            RequestOutcome.FAILED,
            "by the server in the middle of the response",
            None,
        ),
        (Script(num_tokens=3, ending=ScriptedEnd.ERROR), RequestOutcome.FAILED, "scripted", 3),
        (Script(num_tokens=3, ending=ScriptedEnd.GARBAGE), RequestOutcome.FAILED, "invalid completion event: {]", 3),
        (Script(num_tokens=3, ending=ScriptedEnd.LONG_LINE), RequestOutcome.FAILED, "longer than", 3),
        (
            Script(num_tokens=3, ending=ScriptedEnd.SILENCE),
            RequestOutcome.TIMED_OUT,
            f"no complete response within {SILENT_S:g} s",
            3,
        ),
        (Script(ending=ScriptedEnd.NOTHING), RequestOutcome.FAILED, "closed by the server before a response", 0),
        (Script(num_tokens=0, ending=ScriptedEnd.CLOSE), RequestOutcome.FAILED, "closed by the server", 0),
        (Script(num_tokens=3, ending=ScriptedEnd.NO_DONE), RequestOutcome.TRUNCATED, "", 3),
        (Script(num_tokens=3, finish_reason="stop"), RequestOutcome.TRUNCATED, "", 3),
        (Script(num_tokens=0), RequestOutcome.FAILED, "", 0),
        (Script(is_compressed=True), RequestOutcome.GOOD, "", 5),
        (Script(token_ids=False, usage=False), RequestOutcome.GOOD, "", 5),
        (
            Script(status=429, body=REFUSAL, headers={"Retry-After": "2"}),
            RequestOutcome.REJECTED_EARLY,
            "too long a queue",
            0,
        ),
        (Script(status=429, body=REFUSAL, ttft_s=0.6), RequestOutcome.REJECTED_LATE, "too long a queue", 0),
        (Script(status=503, body=REFUSAL), RequestOutcome.REJECTED_EARLY, "too long a queue", 0),
        (Script(status=503, body=b"upstream is gone"), RequestOutcome.FAILED, "upstream is gone", 0),
        (Script(status=504, body=b""), RequestOutcome.TIMED_OUT, "status 504", 0),
        (Script(status=500, body=b'{"error": {"message": "oops"}}'), RequestOutcome.FAILED, "oops", 0),
        (
            Script(status=404, body=b'{"error": {"message": "no such model", "code": "model_not_found"}}'),
            RequestOutcome.FAILED,
            "no such",
            0,
        ),
        (
            Script(body=b'{"error": {"message": "in disguise", "code": 429}}'),
            RequestOutcome.REJECTED_EARLY,
            "in disguise",
            0,
        ),
        (Script(body=b"<html>hello</html>"), RequestOutcome.FAILED, "no event stream: <html>hello</html>", 0),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_each_kind_of_failure_has_its_outcome(
    script: Script, outcome: RequestOutcome, error: str, num_tokens: int | None
) -> None:
    planned = plan(request(0, (0, 8), output=5), slos={"default": SloTarget(ttft_s=0.5 if script.ttft_s else 10.0)})
    async with ScriptedServer(script) as server:
        timeout_s = SILENT_S if script.ending is ScriptedEnd.SILENCE else 20.0
        run = await measure(planned, target(server), timeout_s=timeout_s)
    (record,) = run.records
    assert (run.outcomes, error in record.error, bool(record.error)) == ([outcome], True, bool(error)), record.error
    if num_tokens is not None:
        assert sum(arrival.num_tokens for arrival in record.arrivals) == num_tokens
    assert record.sent_s is not None
    if script.body == REFUSAL:
        assert (record.status, record.reason) == (script.status, "ttft_slo")
    assert record.retry_after_s == (2.0 if script.headers else None)


async def test_responses_before_a_server_crash_are_kept() -> None:
    """Of 30 requests, 8 begin long before the crash, and 10 long after it."""
    planned = plan(
        *(
            request(index, (index, 8), at_s=index * 0.02 + (index > 7) + 2 * (index > 19), output=3)
            for index in range(30)
        )
    )
    tenth = asyncio.Event()

    def script(served: ServedRequest) -> Script:
        if served.number == 9:
            tenth.set()
        return Script(ttft_s=0.01)

    async def run_until_tenth() -> Target:
        async with ScriptedServer(script) as server:
            there.set_result(target(server))
            await tenth.wait()
            await until(lambda: all(len(served.sent_s) == 3 for served in server.served[:8]))
            for _ in range(2):  # in which the client reads them
                await asyncio.sleep(0.02)
        return target(server)

    there: asyncio.Future[Target] = asyncio.get_running_loop().create_future()
    death = asyncio.create_task(run_until_tenth())
    run = await measure(planned, await there)
    await death
    assert len(run.records) == 30
    assert run.outcomes[:8] == [RequestOutcome.GOOD] * 8
    assert run.outcomes[-10:] == [RequestOutcome.FAILED] * 10
    assert run.records[-1].error == "no connection: Connection refused"
    assert run.records[-1].sent_s is None


async def test_timeout_and_cancel_close_the_connection() -> None:
    planned = plan(
        request(0, (0, 8), at_s=0.0, output=5), request(1, (1, 8), at_s=0.0, output=100, cancel_after_tokens=2)
    )
    scripts = {5: Script(ttft_s=30.0), 100: Script(gaps_s=(0.01,))}
    async with ScriptedServer(lambda served: scripts[served.body["max_tokens"]]) as server:
        run = await measure(planned, target(server), timeout_s=3.0)
        await until(lambda: all(served.disconnected_s is not None for served in server.served))
    assert run.outcomes == [RequestOutcome.TIMED_OUT, RequestOutcome.CANCELLED]
    assert len(run.records[1].arrivals) == 2


async def test_requests_above_the_connection_limit_are_not_sent() -> None:
    planned = plan(*(request(index, (index, 8), at_s=0.0, output=2) for index in range(10)))
    async with ScriptedServer(Script(ttft_s=1.0)) as server:
        run = await measure(planned, target(server), client=new_client(target(server), max_connections=4))
    sent = [record for record in run.records if record.sent_s is not None]
    others = [record for record in run.records if record.sent_s is None]
    assert (len(sent), server.num_served) == (4, 4)
    assert all(record.error.startswith(f"{NOT_SENT}all 4 connections") for record in others)
    assert run.outcomes.count(RequestOutcome.FAILED) == 6


async def test_request_on_a_stale_connection_is_sent_again() -> None:
    """Some servers close idle connections early. Nothing was answered, so the request is sent again."""
    planned = plan(*(request(index, (index, 8), at_s=at_s, output=2) for index, at_s in enumerate((0.0, 1.5))))
    async with ScriptedServer(
        lambda served: Script(ending=ScriptedEnd.NOTHING if served.number == 1 else ScriptedEnd.DONE)
    ) as server:
        client = HttpClient(
            HttpSettings(
                urls=[server.url],
                model="scripted",
                dialect=DIALECTS["baton"],
                limits=ConnectionLimits(stale_s=30.0),  # a busy machine notices the end late
            )
        )
        run = await measure(planned, target(server), client=client)
    assert (run.outcomes, server.num_served) == ([RequestOutcome.GOOD] * 2, 3)


async def test_unreachable_server_raises() -> None:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(Unreachable, match="Connection refused"):
        await new_client(Target(urls=(url,), model="m")).open()
    with pytest.raises(Unreachable, match="name cannot be resolved"):
        await new_client(Target(urls=("http://no-such-host.invalid",), model="m")).open()


async def test_connection_attempt_without_answer_times_out() -> None:
    """A listener with a full backlog behaves like a server that has stopped accepting."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = HttpClient(HttpSettings(urls=[url], model="m", dialect=DIALECTS["openai"]))
        await client.open()
        first = await send_once(client, ResolvedRequest(index=0, token_ids=[1]), 0.2)
        rest = [await send_once(client, ResolvedRequest(index=index, token_ids=[1]), 0.2) for index in range(1, 4)]
        await client.aclose()
    assert first.timed_out
    assert all(exchange.timed_out for exchange in rest)
    assert any(exchange.sent_s is None for exchange in rest)
