"""Traces of requests over a cluster of real processes, as an OTLP collector receives them."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from itertools import pairwise
from typing import Any

import httpx
import pytest
import pytest_asyncio

from baton.rpc.channel import channel_options, open_channel
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.cluster import ProcessCluster, process_cluster
from tests.otlp_collector import Collector, ReceivedSpan
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

SPANS = {"request", "placement", "prefill", "decode", "kv pull", "kv lease"}
SETTINGS = {
    "device": "emulated",
    "emulated_costs": "step=5ms,prefill_token=100us,decode_seq=100us",
    "transfer": "local",
    **LONG_TIMES,
}
PROCESSES = ("gateway", "d0", "p0", "scheduler")
SLACK_S = 0.05
MAX_TRACES = 5
"""Requests until one is seen whose times no stall has shifted."""
MAX_TRIALS = 300
"""Requests of about 0.1 s each. An export ends after 5 s, and the next begins at once."""
CLIENT_TRACE, CLIENT_SPAN = "c0ffee" + "0" * 25 + "1", "ab" * 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def collector() -> AsyncIterator[Collector]:
    collector = Collector()
    await collector.start()
    yield collector
    await collector.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(collector: Collector) -> AsyncIterator[ProcessCluster]:
    async with process_cluster(prefill=1, decode=1, otlp_endpoint=collector.endpoint, **SETTINGS) as running:
        yield running


async def complete(
    cluster: ProcessCluster, prompt: str, traceparent: str | None = None, **changes: Any
) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60.0) as client:
        headers = {} if traceparent is None else {"traceparent": traceparent}
        body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "ignore_eos": True} | changes
        return await client.post(f"{cluster.url}/v1/completions", json=body, headers=headers)


async def trace_of(
    collector: Collector, request_id: str, names: Collection[str] = frozenset(SPANS)
) -> dict[str, ReceivedSpan]:
    """Wait for these spans of a request's trace. Return all that have arrived by name."""

    def found() -> dict[str, ReceivedSpan]:
        mine = [span for span in collector.spans if span.attributes.get("baton.request_id") == request_id]
        return collector.of_trace(mine[0].trace_id) if mine else {}

    await collector.until(lambda: found().keys() >= set(names))
    return found()


def check_parents(trace: dict[str, ReceivedSpan]) -> None:
    assert trace.keys() == SPANS
    request = trace["request"]
    assert {name: trace[name].parent_id for name in ("placement", "prefill", "decode")} == dict.fromkeys(
        ("placement", "prefill", "decode"), request.span_id
    )
    assert trace["kv pull"].parent_id == trace["decode"].span_id
    assert trace["kv lease"].parent_id == trace["kv pull"].span_id
    assert {
        name: (span.service, span.instance) for name, span in trace.items() if name not in ("request", "placement")
    } == {
        "prefill": ("baton-worker", "p0"),
        "kv lease": ("baton-worker", "p0"),
        "decode": ("baton-worker", "d0"),
        "kv pull": ("baton-worker", "d0"),
    }
    assert (request.service, trace["placement"].service) == ("baton-gateway", "baton-scheduler")


async def test_request_has_one_trace_over_all_its_processes(cluster: ProcessCluster, collector: Collector) -> None:
    answer, trace = await in_order(cluster, collector)
    check_parents(trace)
    request, placement, prefill, pull, decode = (
        trace[name] for name in ("request", "placement", "prefill", "kv pull", "decode")
    )
    usage = answer.json()["usage"]
    assert request.parent_id == ""
    assert request.attributes["gen_ai.request.model"] == "demo"
    assert (
        request.attributes["gen_ai.usage.input_tokens"]
        == usage["prompt_tokens"]
        == prefill.attributes["baton.prompt_tokens"]
    )
    assert request.attributes["gen_ai.usage.output_tokens"] == decode.attributes["baton.output_tokens"] == 8
    assert (request.attributes["baton.attempts"], request.attributes["baton.outcome"]) == (1, "finished")
    assert placement.attributes["baton.policy"] == "least_loaded"
    assert (placement.attributes["baton.prefill"], placement.attributes["baton.decode"]) == ("p0", "d0")
    assert prefill.attributes["baton.output_tokens"] == 1
    assert prefill.attributes["baton.compute_s"] > 0
    assert pull.attributes["baton.source"] == "p0"
    assert pull.attributes["baton.bytes"] > 0
    assert (pull.attributes["baton.outcome"], pull.attributes["baton.pulls"]) == ("received", "prompt")
    assert pull.attributes["baton.transport"]
    assert trace["kv lease"].attributes["baton.outcome"] == "released"
    assert decode.attributes["baton.first_decode_s"] > 0
    assert [span.problem for span in trace.values()] == [""] * len(SPANS)
    assert request.start_s <= request.events["placed"] <= request.events["first token"]
    assert pull.events["first ready"] <= pull.events["final ready"] <= pull.end_s
    assert all(span.start_s <= span.end_s for span in (placement, prefill, decode, pull))


async def in_order(cluster: ProcessCluster, collector: Collector) -> tuple[httpx.Response, dict[str, ReceivedSpan]]:
    """Return an answer and its trace, whose times are in the right order.

    Clocks are read one after the other, and an event loop's time is cached for milliseconds. A process that
    is stopped in between shifts the times of a span, so another request is sent.
    """
    problems: list[str] = []
    for number in range(MAX_TRACES):
        began_s = time.time()
        answer = await complete(cluster, f"{number}. What does os.path.join do? " * 20)
        ended_s = time.time()
        assert answer.status_code == 200, answer.text
        trace = await trace_of(collector, answer.headers["x-request-id"])
        problems = out_of_order(trace, began_s, ended_s)
        if not problems:
            return answer, trace
    raise AssertionError(f"out of order: {problems}")


def out_of_order(trace: dict[str, ReceivedSpan], began_s: float, ended_s: float) -> list[str]:
    """Return the pairs of times that are in the wrong order by more than 50 ms."""
    request, prefill, pull, decode = (trace[name] for name in ("request", "prefill", "kv pull", "decode"))
    chains = {
        "request": (began_s, request.start_s, request.events["first token"], request.end_s, ended_s),
        "prefill": (prefill.start_s, prefill.events["admitted"], prefill.end_s),
        "kv pull": (pull.end_s, decode.events["first token"]),
        **{f"start of {name}": (request.start_s, trace[name].start_s) for name in ("placement", "prefill", "decode")},
        "start of pull": (request.start_s, pull.start_s),
    }
    return [
        f"{name}: {earlier} before {later}"
        for name, times in chains.items()
        for earlier, later in pairwise(times)
        if earlier > later + SLACK_S
    ]


@pytest.mark.parametrize("door", ["http", "grpc"])
async def test_request_span_is_a_child_of_the_client_span(
    cluster: ProcessCluster, collector: Collector, door: str
) -> None:
    trace_id = CLIENT_TRACE[:-1] + {"http": "2", "grpc": "3"}[door]
    context = f"00-{trace_id}-{CLIENT_SPAN}-01"
    if door == "http":
        answer = await complete(cluster, f"Traced over {door}. " * 20, context)
        request_id = answer.headers["x-request-id"]
    else:
        async with open_channel(cluster.grpc_address, channel_options(10.0)) as channel:
            message = inference_pb2.GenerateRequest(prompt=f"Traced over {door}. " * 20, max_tokens=8, ignore_eos=True)
            call = inference_pb2_grpc.InferenceStub(channel).Generate(message, metadata=(("traceparent", context),))
            request_id = str(dict(await call.initial_metadata())["x-request-id"])
            async for _ in call:
                pass
    trace = await trace_of(collector, request_id)
    check_parents(trace)
    assert (trace["request"].trace_id, trace["request"].parent_id) == (trace_id, CLIENT_SPAN)


async def test_unsampled_client_trace_is_not_recorded(cluster: ProcessCluster, collector: Collector) -> None:
    unrecorded = CLIENT_TRACE[:-1] + "4"
    assert (await complete(cluster, "Not recorded. " * 20, f"00-{unrecorded}-{CLIENT_SPAN}-00")).status_code == 200
    after = await complete(cluster, "Recorded. " * 20)
    await trace_of(collector, after.headers["x-request-id"])
    assert collector.of_trace(unrecorded) == {}


async def test_invalid_trace_context_starts_a_new_trace(cluster: ProcessCluster, collector: Collector) -> None:
    answer = await complete(cluster, "Odd context. " * 20, f"00-{'0' * 32}-{CLIENT_SPAN}-01")
    trace = await trace_of(collector, answer.headers["x-request-id"])
    check_parents(trace)
    assert trace["request"].parent_id == ""


async def test_failed_request_has_its_reason_in_the_spans(cluster: ProcessCluster, collector: Collector) -> None:
    answer = await complete(cluster, "x " * 20_000)  # refused by validation, before a span is created
    assert answer.status_code == 400
    answer = await complete(cluster, "Too late. " * 20, max_tokens=400, timeline=True)
    assert answer.status_code == 200
    async with httpx.AsyncClient(timeout=60.0) as client:
        headers = {"x-baton-timeout-ms": "300"}
        body = {"model": "demo", "prompt": "Too late. " * 20, "max_tokens": 3000, "ignore_eos": True}
        late = await client.post(f"{cluster.url}/v1/completions", json=body, headers=headers)
    assert late.status_code == 504
    # The deadline may pass at any time, so some spans of the other processes may be missing.
    trace = await trace_of(collector, late.headers["x-request-id"], {"request"})
    assert (trace["request"].attributes["baton.outcome"], trace["request"].problem) == ("deadline", "deadline")


def logged(cluster: ProcessCluster, name: str, event: str) -> int:
    return sum(entry["event"] == event for entry in cluster.log_entries(name))


async def test_absent_collector_fails_no_request_and_is_logged_once(
    cluster: ProcessCluster, collector: Collector
) -> None:
    await collector.stop()
    for number in range(10):
        assert (await complete(cluster, f"No collector, {number}. " * 5)).status_code == 200
    await collector.until(lambda: logged(cluster, "gateway", "trace_export_failed") == 1)
    await asyncio.sleep(1.0)
    assert logged(cluster, "gateway", "trace_export_failed") == 1
    await collector.start()

    async def until_recovered() -> None:
        while not logged(cluster, "gateway", "trace_export_recovered"):
            await complete(cluster, "The collector is back. " * 5)
            await asyncio.sleep(0.2)

    await asyncio.wait_for(until_recovered(), 60)


@pytest.mark.long  # `make test` covers this by tests/unit/runtime/test_tracing.py
async def test_requests_and_the_end_of_a_process_do_not_wait_for_exports(
    cluster: ProcessCluster, collector: Collector
) -> None:
    """Must run last: it stops the cluster while the collector accepts calls and never answers."""
    collector.answers = False
    for _ in range(MAX_TRIALS):
        num_ended, num_waiting = collector.num_ended, len(collector.waiting)
        assert (await complete(cluster, "The collector hangs. " * 5)).status_code == 200
        if num_waiting == len(PROCESSES) and collector.num_ended == num_ended:
            break
    else:
        pytest.fail("no request ended while an export of each process waited all the time")
    loop = asyncio.get_running_loop()
    for name in PROCESSES:
        began_s = loop.time()
        assert await cluster.stop_one(name) == 0
        assert loop.time() - began_s < 10.0, name
