"""Runs against a server with known delays: times match the script, and metrics match values computed by hand.

The server records when it sent each event, by the same clock. No event may arrive earlier. How much later it
arrives is the error of loadgen and the machine, which has only a loose bound here (`loadgen selftest`
measures it).
"""

import ssl
from itertools import pairwise

import pytest
import trustme

from loadgen.loadgen_errors import Unreachable
from loadgen.measure import request_metrics
from loadgen.measure.records import Record
from loadgen.measure.request_metrics import RequestOutcome
from loadgen.send.selftest.scripted_server import Script, ScriptedServer, ServedRequest
from loadgen.send.selftest.selftest import event_errors_s
from loadgen.send.target import Target
from loadgen.slo_target import SloTarget
from tests.integration.loadgen.rig import Measured, measure
from tests.unit.loadgen.plans import plan, request

SLACK_S = 5.0
"""What a busy machine may add."""
STALL, LATE_S, MAX_TRIALS = (0.3, 2.3), 1.05, 5
EXACT_S = 1e-9


def target(server: ScriptedServer, **changes: object) -> Target:
    return Target(**{"urls": (server.url,), "model": "scripted", "dialect": "baton", **changes})


async def test_metrics_match_the_scripted_delays() -> None:
    """0.2 s to the first token, then gaps of 0.1 s, 0.3 s and 0.05 s each; six messages with two tokens
    each."""
    script = Script(ttft_s=0.2, gaps_s=(0.1, 0.3, 0.05), tokens_per_event=2)
    planned = plan(
        *(request(index, (index, 20), at_s=index * 0.05, output=12) for index in range(4)),
        slos={"default": SloTarget(ttft_s=10)},
    )
    async with ScriptedServer(script) as server:
        run = await measure(planned, target(server))
    assert run.outcomes == [RequestOutcome.GOOD] * 4
    for record, served in zip(run.records, server.served, strict=True):
        assert [arrival.num_tokens for arrival in record.arrivals] == [2] * 6
        assert (request_metrics.num_output_tokens(record), record.num_prompt_tokens, len(record.token_ids)) == (
            12,
            20,
            12,
        )
        assert served.body["prompt"]
        assert record.intended_s == pytest.approx(record.index * 0.05, abs=EXACT_S)
        assert record.sent_s is not None
        assert 0 <= record.sent_s - record.intended_s <= served.received_s - run.started_s - record.intended_s < SLACK_S
        errors = event_errors_s(record, run.started_s)
        assert len(errors) == 6
        assert all(0 <= error < SLACK_S for error in errors)
        for sent_s, script_s in zip(served.sent_s, (0.2, 0.3, 0.6, 0.65, 0.7, 0.75), strict=True):
            assert script_s - EXACT_S <= sent_s - served.received_s < script_s + SLACK_S
        check_by_hand(record, record.sent_s)


def check_by_hand(record: Record, sent_s: float) -> None:
    """Tokens of one message arrive together, so every other one of the 11 gaps is 0, and two are a tenth."""
    arrivals = [arrival.at_s for arrival in record.arrivals]
    first, last = arrivals[0], arrivals[-1]
    waits = [later - earlier for earlier, later in pairwise(arrivals)]
    expected = {
        "ttft": (request_metrics.ttft_s(record), first - record.intended_s),
        "ttft_sent": (request_metrics.ttft_s(record, from_intended=False), first - sent_s),
        "tpot": (request_metrics.tpot_s(record), (last - first) / 11),
        "tbt": (request_metrics.longest_tenth(request_metrics.itl_s(record)), sum(sorted(waits)[-2:]) / 2),
        "e2e": (request_metrics.e2e_s(record), last - record.intended_s),
        "e2e_sent": (request_metrics.e2e_s(record, from_intended=False), last - sent_s),
        "normalised": (request_metrics.normalised_s(record), (last - record.intended_s) / 12),
        "send_lag": (request_metrics.send_lag_s(record), sent_s - record.intended_s),
    }
    for name, (value, by_hand) in expected.items():
        assert value == pytest.approx(by_hand, rel=0, abs=EXACT_S), name
    gaps = [0.0, waits[0], 0.0, waits[1], 0.0, waits[2], 0.0, waits[3], 0.0, waits[4], 0.0]
    assert list(request_metrics.itl_s(record)) == pytest.approx(gaps, rel=0, abs=EXACT_S)


async def test_stall_shows_in_every_request_due_during_it() -> None:
    """One stall of 2 s. Requests are still sent at their times; those during the stall wait for its end.

    It is repeated if the machine itself stalls, which a loadgen that waits for responses does each time.
    """
    for _ in range(MAX_TRIALS):
        run, end = await measured_stall()
        lags = [record.sent_s - record.intended_s for record in run.records if record.sent_s is not None]
        ttfts = [request_metrics.ttft_s(record) for record in run.records]
        waits = [max(0.0, end - record.intended_s) for record in run.records]
        late = [ttft - wait for ttft, wait in zip(ttfts, waits, strict=True) if ttft is not None]
        assert len(lags) == len(late) == len(run.records)
        begin = end - STALL[1] + STALL[0]
        for record, since_end in zip(run.records, late, strict=True):
            assert since_end >= -EXACT_S or not begin <= record.intended_s < end - 0.02
        if max(lags) < 1.0 and max(late) < 1.0:
            break
    else:
        pytest.fail(f"sent {max(lags):.2f} s late, answered {max(late):.2f} s after the stall")
    assert 6 <= run.outcomes.count(RequestOutcome.LATE) <= 20


async def measured_stall() -> tuple[Measured, float]:
    """Return a run with 26 requests, and when the server's stall ended, relative to the run's start."""
    planned = plan(
        *(request(index, (index, 8), at_s=index * 0.1, output=2) for index in range(26)),
        slos={"default": SloTarget(ttft_s=LATE_S)},
    )
    async with ScriptedServer(Script(ttft_s=0.01, gaps_s=(0.01,)), stalls=[STALL]) as server:
        run = await measure(planned, target(server))
    assert server.first_s is not None
    return run, server.first_s + STALL[1] - run.started_s


async def test_outcomes_sum_to_offered_for_a_mixed_plan() -> None:
    """The plan has sessions, cancels, rejections and failures."""
    refused = Script(
        status=429, body=b'{"error": {"message": "full", "code": "queue_full"}}', headers={"Retry-After": "2"}
    )

    def script(served: ServedRequest) -> Script:
        return (
            refused
            if served.number % 5 == 3
            else Script(ttft_s=0.01, gaps_s=(0.005,), num_tokens=3 if served.number % 7 == 5 else None)
        )

    requests = [request(index, (index, 8), at_s=index * 0.01, output=4, session=f"s{index}") for index in range(20)]
    requests += [
        request(20 + index, (index, 8), index, output=4, after=index, session=f"s{index}", turn=1, think_s=0.01)
        for index in range(20)
    ]
    requests += [request(40, (50, 8), at_s=0.3, output=30, cancel_after_tokens=5)]
    planned = plan(*requests, slos={"default": SloTarget(ttft_s=5)})
    async with ScriptedServer(script) as server:
        run = await measure(planned, target(server))
    counts = {outcome: run.outcomes.count(outcome) for outcome in RequestOutcome}
    assert sum(counts.values()) == 41 == len(run.records)
    assert counts[RequestOutcome.REJECTED_EARLY] == sum(1 for served in server.served if served.number % 5 == 3)
    assert counts[RequestOutcome.GOOD] > 0 < counts[RequestOutcome.TRUNCATED]
    not_whole = {
        record.index
        for record, outcome in zip(run.records, run.outcomes, strict=True)
        if outcome is not RequestOutcome.GOOD
    }
    assert all(run.outcomes[20 + index] is RequestOutcome.CANCELLED for index in range(20) if index in not_whole)
    assert run.outcomes[40] in (RequestOutcome.CANCELLED, RequestOutcome.REJECTED_EARLY)


async def test_requests_alternate_between_endpoints() -> None:
    planned = plan(*(request(index, (index, 8), at_s=index * 0.01, output=2) for index in range(10)))
    async with ScriptedServer(Script()) as one, ScriptedServer(Script()) as two:
        run = await measure(planned, target(one, urls=(one.url, f"{two.url}/v1")))
    assert (one.num_served, two.num_served) == (5, 5)
    assert [record.endpoint for record in run.records] == [one.url, two.url] * 5


@pytest.mark.parametrize(("api", "prompts"), [("chat", "text"), ("completions", "text"), ("completions", "ids")])
async def test_request_bodies_have_all_fields(api: str, prompts: str) -> None:
    planned = plan(
        request(0, (0, 6), output=2, session="s"),
        request(1, (0, 6), 0, (1, 3), output=2, session="s", turn=1, after=0, priority=3),
        slos={"default": SloTarget(ttft_s=1.5, tpot_s=0.25)},
    )
    async with ScriptedServer(Script()) as server:
        run = await measure(
            planned,
            target(
                server,
                api=api,
                prompts=prompts,
                headers={"X-Team": "a"},
                more={"temperature": 0.5, "user": "me"},
                timeout_s=9,
            ),
        )
    assert run.outcomes == [RequestOutcome.GOOD] * 2
    served = server.served[1]
    body = {name: value for name, value in served.body.items() if name not in ("prompt", "messages")}
    assert body == {
        "model": "scripted",
        "max_tokens": 2,
        "ignore_eos": True,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "timeline": True,
        "priority": 3,
        "session": "s",
        "slo": {"ttft_ms": 1500.0, "tpot_ms": 250.0},
        "user": "me",
    }
    assert (served.headers["x-team"], served.headers["x-baton-timeout-ms"]) == ("a", "9000")
    answer = run.records[0].token_ids
    if api == "chat":
        messages = served.body["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant", "user"]
        assert messages[1]["content"].split() == [f"t{token}" for token in answer]
        assert [len(message["content"].split()) for message in messages] == [6, 2, 3]
    elif prompts == "text":
        assert len(served.body["prompt"].split()) == 11
    else:
        assert served.body["prompt"][6:8] == list(answer)
        assert len(served.body["prompt"]) == 11


async def test_run_over_tls() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(tls)
    planned = plan(*(request(index, (index, 2000), at_s=index * 0.01, output=3) for index in range(5)))
    async with ScriptedServer(Script(gaps_s=(0.01,)), tls=tls) as server:
        run = await measure(planned, target(server, is_insecure=True))
        with pytest.raises(Unreachable, match="TLS"):
            await measure(planned, target(server))
    assert run.outcomes == [RequestOutcome.GOOD] * 5
    assert all(record.sent_s is not None for record in run.records)


async def test_long_prompt_counts_as_sent_at_its_last_byte() -> None:
    """The prompt exceeds any socket buffer, so its rest is written as the server reads."""
    planned = plan(request(0, (0, 1_500_000), output=2))
    async with ScriptedServer(Script()) as server:
        run = await measure(planned, target(server), timeout_s=50.0)
    (record,) = run.records
    assert run.outcomes == [RequestOutcome.GOOD]
    assert record.sent_s is not None
    assert record.sent_s <= record.arrivals[0].at_s
    assert record.num_prompt_tokens == 1_500_000
