"""Metrics of handwritten records compared with values by hand, and every outcome."""

import numpy as np
import pytest
from hypothesis import given, settings

from loadgen.measure import request_metrics
from loadgen.measure.records import Record
from loadgen.measure.request_metrics import OutcomeRules, RequestOutcome, classify
from loadgen.slo_target import SloTarget
from tests.loadgen_builders import any_record, any_terms, record, refused, rules


def test_every_metric_of_a_response_equals_its_value_by_hand() -> None:
    """Due at 1.0, sent at 1.1; tokens at 1.5, 1.6, 1.8 and two in one message at 2.4."""
    answer = record(tokens=(1.5, 1.6, 1.8, (2.4, 2)))
    assert request_metrics.num_output_tokens(answer) == 5
    assert request_metrics.ttft_s(answer) == pytest.approx(0.5)
    assert request_metrics.ttft_s(answer, from_intended=False) == pytest.approx(0.4)
    assert request_metrics.tpot_s(answer) == pytest.approx(0.9 / 4)
    assert request_metrics.itl_s(answer) == pytest.approx([0.1, 0.2, 0.6, 0.0])
    assert request_metrics.longest_tenth(request_metrics.itl_s(answer)) == pytest.approx(0.6)
    assert request_metrics.e2e_s(answer) == pytest.approx(1.4)
    assert request_metrics.e2e_s(answer, from_intended=False) == pytest.approx(1.3)
    assert request_metrics.normalised_s(answer) == pytest.approx(1.4 / 5)
    assert request_metrics.send_lag_s(answer) == pytest.approx(0.1)


def test_mean_gap_is_tpot_for_any_bundling() -> None:
    for tokens in [(1.5, 1.6, 1.8), ((1.5, 3), 1.9, (2.5, 4)), ((1.5, 2),)]:
        answer = record(tokens=tokens)
        assert np.mean(request_metrics.itl_s(answer)) == pytest.approx(request_metrics.tpot_s(answer))


def test_tbt_is_the_mean_of_the_longest_tenth() -> None:
    gaps = [0.01] * 18 + [0.5, 0.3, 0.2]  # 21 gaps: the longest 3
    assert request_metrics.longest_tenth(
        request_metrics.itl_s(record(tokens=np.cumsum([1.5, *gaps]).tolist()))
    ) == pytest.approx(1.0 / 3)


def test_one_token_has_no_tpot_and_meets_its_slo() -> None:
    answer = record(tokens=(1.5,))
    assert request_metrics.tpot_s(answer) is None
    assert request_metrics.longest_tenth(request_metrics.itl_s(answer)) is None
    assert request_metrics.e2e_s(answer) == request_metrics.ttft_s(answer)
    assert request_metrics.met_slos(answer, SloTarget.parse("tpot=1us")) == {"tpot": True}
    assert classify(answer, rules("ttft=600ms,tpot=1us")) is RequestOutcome.GOOD


def test_usage_counts_tokens_of_text_messages() -> None:
    answer = record(tokens=(1.5, 2.0), num_output_tokens=6)
    assert request_metrics.tpot_s(answer) == pytest.approx(0.5 / 5)
    assert request_metrics.itl_s(answer) == pytest.approx([0.5])


def test_token_ids_then_arrivals_count_without_usage() -> None:
    assert request_metrics.num_output_tokens(record(num_output_tokens=None, token_ids=(7, 8, 9, 10))) == 4
    assert request_metrics.num_output_tokens(record(num_output_tokens=None)) == 3


def test_empty_messages_are_not_the_first_token() -> None:
    assert request_metrics.ttft_s(record(tokens=((1.2, 0), 1.5, (1.9, 0)))) == pytest.approx(0.5)
    assert request_metrics.e2e_s(record(tokens=((1.2, 0), 1.5, (1.9, 0)))) == pytest.approx(0.5)


def test_queue_time_comes_from_the_timeline() -> None:
    leg = {"worker_id": "w0", "queue_s": 0.25, "compute_s": 0.1, "num_computed_tokens": "12"}
    assert request_metrics.queue_s(record(timeline={"legs": [leg]})) == 0.25
    assert request_metrics.queue_s(record(timeline={"legs": []})) is None
    assert request_metrics.queue_s(record()) is None


def test_late_send_counts_against_ttft() -> None:
    """The generator sent 2 s late; the response came immediately, but the user has waited."""
    answer = record(sent_s=3.0, tokens=(3.1, 3.2))
    assert request_metrics.ttft_s(answer, from_intended=False) == pytest.approx(0.1)
    assert classify(answer, rules("ttft=500ms")) is RequestOutcome.LATE


@pytest.mark.parametrize(
    ("expected", "seen"),
    [
        (RequestOutcome.GOOD, record()),
        (RequestOutcome.GOOD, record(tokens=(1.6, 1.8))),
        (RequestOutcome.LATE, record(tokens=(1.7, 1.8))),
        (RequestOutcome.LATE, record(tokens=(1.5, 2.0))),
        (RequestOutcome.REJECTED_EARLY, refused(after_s=0.6)),
        (RequestOutcome.REJECTED_LATE, refused(after_s=0.7)),
        (RequestOutcome.REJECTED_EARLY, refused(reason="")),
        (RequestOutcome.REJECTED_EARLY, refused(status=503)),
        (RequestOutcome.REJECTED_EARLY, refused(status=503, reason="", retry_after_s=1.0)),
        (RequestOutcome.FAILED, refused(status=503, reason="")),
        (RequestOutcome.FAILED, refused(status=400)),
        (RequestOutcome.FAILED, refused(status=429, tokens=(1.2,))),
        (RequestOutcome.TIMED_OUT, refused(status=None, reason="", timed_out=True)),
        (RequestOutcome.TIMED_OUT, refused(status=504)),
        (RequestOutcome.TIMED_OUT, record(is_complete=False, timed_out=True, error="no token for 10 s")),
        (RequestOutcome.CANCELLED, record(is_complete=False, left_early=True)),
        (RequestOutcome.CANCELLED, refused(status=None, reason="", sent_s=None, left_early=True)),
        (RequestOutcome.CANCELLED, refused(status=None, reason="", sent_s=None)),
        (RequestOutcome.FAILED, refused(status=None, reason="", sent_s=None, error="connection refused")),
        (RequestOutcome.FAILED, refused(status=200, reason="")),
        (RequestOutcome.FAILED, record(error="not an event: <html>")),
        (RequestOutcome.FAILED, record(is_complete=False, error="the connection was reset")),
        (RequestOutcome.TRUNCATED, record(is_complete=False)),
        (RequestOutcome.TRUNCATED, record(planned_output_tokens=4, finish_reason="stop")),
        (RequestOutcome.TRUNCATED, record(tokens=(), num_output_tokens=0)),
    ],
)
def test_each_record_has_its_outcome(expected: RequestOutcome, seen: Record) -> None:
    assert classify(seen, rules("ttft=600ms,tpot=200ms")) is expected


def test_shorter_response_is_complete_without_ignore_eos() -> None:
    shorter = record(planned_output_tokens=4, finish_reason="stop")
    assert classify(shorter, rules(ignore_eos=False)) is RequestOutcome.GOOD


def test_finish_reason_decides_without_token_counts() -> None:
    silent = record(tokens=(1.5, 1.6), num_output_tokens=None, planned_output_tokens=8)
    assert classify(silent, rules()) is RequestOutcome.GOOD
    assert classify(
        record(tokens=(1.5, 1.6), num_output_tokens=None, planned_output_tokens=8, finish_reason="stop"), rules()
    ) is (RequestOutcome.TRUNCATED)


def test_each_slo_class_has_its_own_slo() -> None:
    class_slos = OutcomeRules(slos={"default": SloTarget.parse("ttft=100ms"), "batch": SloTarget.parse("e2e=10s")})
    assert classify(record(), class_slos) is RequestOutcome.LATE
    assert classify(record(slo_class="batch"), class_slos) is RequestOutcome.GOOD
    assert classify(record(slo_class="unheard of"), class_slos) is RequestOutcome.LATE
    assert classify(record(), OutcomeRules()) is RequestOutcome.GOOD


@settings(deadline=None)
@given(any_record, any_terms)
def test_any_record_has_one_outcome_and_only_complete_ones_are_good(seen: Record, rules: OutcomeRules) -> None:
    outcome = classify(seen, rules)
    assert outcome in RequestOutcome
    if outcome in request_metrics.COMPLETE:
        assert request_metrics.is_complete_response(seen, rules)
        meets_all = all(request_metrics.met_slos(seen, rules.slo_of(seen)).values())
        assert meets_all == (outcome is RequestOutcome.GOOD)


def due_each(gap_s: float, count: int, lag_s: float = 0.0, **changes: object) -> list[Record]:
    return [record(i, intended_s=i * gap_s, sent_s=i * gap_s + lag_s, **changes) for i in range(count)]


def test_run_on_time_is_valid() -> None:
    sent = request_metrics.sending(due_each(0.01, 100, 0.001))
    assert sent.due_rps == pytest.approx(100)
    assert sent.achieved_rps == pytest.approx(100)
    assert (sent.lag_p50_s, sent.lag_p99_s, sent.lag_max_s) == pytest.approx((0.001, 0.001, 0.001))
    assert request_metrics.invalid_reasons(due_each(0.01, 100, 0.001), rules()) == ()


@pytest.mark.parametrize(
    ("slo", "limit_s"), [("ttft=100ms", 0.002), ("ttft=500ms", 0.005), ("tpot=1s", 0.002), ("", 0.002)]
)
def test_send_lag_limit_follows_from_the_ttft_slo(slo: str, limit_s: float) -> None:
    assert request_metrics.lag_limit_s(rules(slo)) == pytest.approx(limit_s)
    assert not request_metrics.invalid_reasons(due_each(0.01, 100, 0.999 * limit_s), rules(slo))
    (reason,) = request_metrics.invalid_reasons(due_each(0.01, 100, 1.001 * limit_s), rules(slo))
    assert "p99 send lag" in reason


def test_slow_generator_misses_the_rate() -> None:
    """Due within 0.99 s, sent within 1.04 s."""
    slow = [record(i, intended_s=i * 0.01, sent_s=i * 0.0105) for i in range(100)]
    assert request_metrics.sending(slow).achieved_rps == pytest.approx(99 / (99 * 0.0105))
    assert any("off by -4.8%" in reason for reason in request_metrics.invalid_reasons(slow, rules("ttft=10s")))


def test_dropped_requests_miss_the_rate_but_cancelled_ones_do_not() -> None:
    sent = due_each(0.01, 98)
    lost = [refused(98 + i, intended_s=0.98 + 0.01 * i, sent_s=None, status=None, reason="") for i in range(2)]
    assert request_metrics.sending(sent + lost).achieved_rps == pytest.approx(98)
    assert any("off by" in reason for reason in request_metrics.invalid_reasons(sent + lost, rules("ttft=10s")))
    given_up = [
        refused(98 + i, intended_s=0.98 + 0.01 * i, sent_s=None, status=None, reason="", left_early=True)
        for i in range(2)
    ]
    assert request_metrics.invalid_reasons(sent + given_up, rules("ttft=10s")) == ()


def test_connection_refused_does_not_invalidate_the_run() -> None:
    refused_connections = [
        refused(i, intended_s=0.01 * i, sent_s=None, status=None, reason="", error="connection refused")
        for i in range(50)
    ]
    assert request_metrics.invalid_reasons(due_each(0.01, 50) + refused_connections, rules("ttft=10s")) == ()


def test_missing_records_invalidate_the_run() -> None:
    assert (
        "2 of 5 offered requests have no record"
        in request_metrics.invalid_reasons(due_each(0.01, 3), rules(), num_offered=5)[0]
    )
    assert request_metrics.invalid_reasons([], rules()) == ("no request was offered",)


def test_no_slo_is_an_infinite_bound() -> None:
    assert classify(refused(after_s=1e6), rules("tpot=1ms")) is RequestOutcome.REJECTED_EARLY
