"""Summaries of handwritten records compared with values by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.measure.measures import Measures
from loadgen.measure.records import Record
from loadgen.measure.request_metrics import OutcomeRules, RequestOutcome
from loadgen.measure.summary import in_flight_when_due, rate, steady_window, summarise, throughput
from loadgen.slo_target import SloTarget
from tests.loadgen_builders import any_record, any_terms, record, refused, rules


def answer(index: int, due: float, ttft: float, gaps: tuple[float, ...] = (0.1, 0.1), **changes: object) -> Record:
    """A response due at `due`, sent immediately, with its first token after `ttft`."""
    times = np.cumsum([due + ttft, *gaps]).tolist()
    return record(index, tokens=times, intended_s=due, sent_s=due, **changes)


FIVE = (
    answer(0, 0.0, 0.1),
    answer(1, 1.0, 0.2),
    answer(2, 2.0, 0.9),  # late by ttft
    answer(3, 3.0, 0.3, (0.5, 0.5)),  # late by tpot
    refused(4, intended_s=4.0, sent_s=4.0, ended_s=4.1),
)
"""One a second; SLO ttft 600 ms, tpot 200 ms."""


def test_outcomes_attainment_and_goodput_equal_values_by_hand() -> None:
    found = summarise(Measures.of(FIVE, rules()))
    assert {name: count for name, count in found.outcomes.items() if count} == {
        RequestOutcome.GOOD: 2,
        RequestOutcome.LATE: 2,
        RequestOutcome.REJECTED_EARLY: 1,
    }
    assert found.offered == sum(found.outcomes.values()) == 5
    assert (found.joint.kept, found.joint.of) == (2, 5)
    assert (found.attainment["ttft"].kept, found.attainment["ttft"].of) == (3, 5)
    assert (found.attainment["tpot"].kept, found.attainment["tpot"].of) == (3, 5)
    assert "e2e" not in found.attainment
    assert found.offered_rps == pytest.approx(1.0)
    assert found.goodput_rps is not None
    assert found.goodput_rps.value == pytest.approx(0.4)


def test_distributions_cover_complete_responses_and_offered_requests() -> None:
    """ttft 0.1, 0.2, 0.3, 0.9 and one missing: the median of the offered requests is the third."""
    found = summarise(Measures.of(FIVE, rules())).latency["ttft"]
    assert found.count == 4
    assert found.mean.value == pytest.approx(0.375)
    assert found.percentiles[50].value == pytest.approx(0.25)
    assert found.percentiles[90].value == pytest.approx(0.72)
    assert (found.minimum, found.maximum) == pytest.approx((0.1, 0.9))
    assert found.of_offered[50] == pytest.approx(0.3)
    assert math.isinf(found.of_offered[90])


def test_gaps_are_pooled_over_complete_responses() -> None:
    cut = record(9, tokens=(2.0, 50.0), intended_s=1.5, is_complete=False)
    found = summarise(Measures.of([*FIVE, cut], rules())).latency["itl"]
    assert found.count == 8
    assert found.mean.value == pytest.approx((6 * 0.1 + 2 * 0.5) / 8)
    assert found.maximum == pytest.approx(0.5)


def test_slo_bound_counts_only_requests_that_have_it() -> None:
    has_slo = OutcomeRules(slos={"default": SloTarget.parse("ttft=150ms"), "batch": SloTarget.parse("e2e=350ms")})
    found = summarise(Measures.of([*FIVE[:3], answer(7, 5.0, 0.1, slo_class="batch")], has_slo))
    assert (found.attainment["ttft"].kept, found.attainment["ttft"].of) == (1, 3)
    assert (found.attainment["e2e"].kept, found.attainment["e2e"].of) == (1, 1)
    assert (found.joint.kept, found.joint.of) == (2, 4)


def test_incomplete_response_meets_no_slo() -> None:
    """It was in time as far as it went."""
    cut = answer(0, 0.0, 0.1, is_complete=False)
    found = summarise(Measures.of([cut, answer(1, 1.0, 0.1)], rules()))
    assert [(share.kept, share.of) for share in found.attainment.values()] == [(1, 2)] * 3


def test_throughput_excludes_ramp_and_tail() -> None:
    """Arrivals from 0 to 40 s with e2e 2 s: the window is 2 to 40 s, although the last end is at 42 s."""
    rows = [answer(i, float(i), 1.0, (0.5, 0.5)) for i in range(41)]
    measures = Measures.of(rows, rules("ttft=2s"))
    assert steady_window(measures) == pytest.approx((2.0, 40.0))
    found = throughput(measures)
    assert found is not None
    assert found.steady["requests_per_s"] == pytest.approx(39 / 38)
    assert found.steady["good_requests_per_s"] == pytest.approx(39 / 38)
    assert found.steady["output_tokens_per_s"] == pytest.approx(
        (39 + 39 + 38) / 38
    )  # first, last and middle tokens in 2 … 40 s
    assert found.raw_s == pytest.approx(42.0)
    assert found.raw["requests_per_s"] == pytest.approx(41 / 42)
    assert found.raw["prompt_tokens_per_s"] == pytest.approx(410 / 42)


def test_ramp_is_at_most_a_quarter() -> None:
    rows = [answer(i, float(i), 30.0) for i in range(9)]
    assert steady_window(Measures.of(rows, rules())) == pytest.approx((2.0, 8.0))


def test_prefix_hits_count_only_reported_values() -> None:
    rows = [
        answer(0, 0.0, 0.1, num_prompt_tokens=100, num_cached_tokens=60),
        answer(1, 1.0, 0.1, num_prompt_tokens=300, num_cached_tokens=0),
        answer(2, 2.0, 0.1, num_prompt_tokens=500, num_cached_tokens=None),
    ]
    found = summarise(Measures.of(rows, rules())).prefix
    assert (found.cached_tokens, found.prompt_tokens, found.requests) == (60, 400, 2)
    assert found.ratio == pytest.approx(0.15)


def test_in_flight_counts_earlier_unfinished_requests() -> None:
    rows = [answer(0, 0.0, 10.0), answer(1, 1.0, 0.5, ()), answer(2, 2.0, 0.5), answer(3, 2.2, 0.5)]
    assert in_flight_when_due(Measures.of(rows, rules())).tolist() == [0, 1, 1, 2]


def test_rate_of_times_needs_two_distinct_times() -> None:
    assert rate(np.array([0.0, 0.5, 1.0])) == pytest.approx(2.0)
    assert rate(np.array([1.0])) is None
    assert rate(np.array([1.0, 1.0])) is None


def test_tokens_per_message_is_the_mean() -> None:
    found = summarise(Measures.of([record(tokens=(1.5, (1.6, 3)))], rules()))
    assert found.tokens_per_message == 2.0


def test_selected_rows_equal_their_own_measures() -> None:
    rows = [answer(0, 0.0, 0.1), answer(1, 1.0, 0.2, (0.3,)), answer(2, 2.0, 0.3, (0.4, 0.5, 0.6))]
    part = Measures.of(rows, rules()).select([0, 2])
    alone = Measures.of([rows[0], rows[2]], rules())
    assert part.gaps.tolist() == alone.gaps.tolist()
    assert part.gap_rows.tolist() == alone.gap_rows.tolist()
    assert part.token_rows.tolist() == alone.token_rows.tolist()
    assert part.columns["ttft"].tolist() == alone.columns["ttft"].tolist()
    assert part.outcomes == alone.outcomes


def test_summary_without_responses_has_no_latencies() -> None:
    found = summarise(Measures.of([refused(0), refused(1, intended_s=2.0)], rules()))
    assert found.latency == {}
    assert found.joint.value == 0.0
    assert found.goodput_rps is not None
    assert found.goodput_rps.value == 0.0


@settings(deadline=None, max_examples=60)
@given(st.lists(any_record, min_size=1, max_size=12), any_terms)
def test_outcomes_sum_to_offered_for_any_records(records: list[Record], has_slo: OutcomeRules) -> None:
    found = summarise(Measures.of(records, has_slo))
    assert sum(found.outcomes.values()) == found.offered == len(records)
    assert set(found.outcomes) == set(RequestOutcome)
    assert found.joint.kept == found.outcomes[RequestOutcome.GOOD]
    for share in found.attainment.values():
        assert 0 <= share.kept <= share.of <= len(records)
