"""The first line of `baton explain`."""

from dataclasses import replace
from typing import Any

import pytest

from baton.cli.admin.explain_verdict import verdict
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Rejection
from baton.core.errors import Reason
from baton.core.messages.jobs import PrefixSource
from baton.core.request import Slo
from tests.builders import decision_record, placement, query, worker_ref


def served(
    ttft_s: float | None, *, queue_s: float = 0.0, compute_s: float = 0.0, predicted: Any = None, **actuals: Any
) -> DecisionRecord:
    """A finished request, prefilled on w0; `predicted` are fields of its placement."""
    predicted = {"ttft_s": 0.0021, "queue_s": 0.0, "prefill_s": 0.0021, **(predicted or {})}
    leg = {"worker_id": "w0", "queue_s": queue_s, "compute_s": compute_s}
    facts = {"outcome": "finished", "ttft_s": ttft_s, "legs": [{"worker_id": "w1"}, leg], **actuals}
    return decision_record(placement=placement(**predicted), actuals=facts)


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            served(0.024, compute_s=0.005, queue_s=0.001),
            "TTFT 24 ms, predicted 2.1 ms: 18 ms of it between gateway and worker",
        ),
        (served(0.2, compute_s=0.192), "TTFT 200 ms, predicted 2.1 ms: prefill 192 ms instead of 2.1 ms"),
        (served(0.2, queue_s=0.192), "TTFT 200 ms, predicted 2.1 ms: queue 192 ms instead of 0 ms"),
        (
            served(0.2, predicted={"waiting_s": 0.15}),
            "TTFT 200 ms, predicted 2.1 ms: 150 ms of it in the scheduler's queue",
        ),
        (
            served(0.01, compute_s=0.009, predicted={"ttft_s": 0.05, "prefill_s": 0.05}),
            "TTFT 10 ms, predicted 50 ms: prefill 9 ms instead of 50 ms",
        ),
        (served(0.003, compute_s=0.002), "TTFT 3 ms, as predicted: mostly prefill (2 ms)"),
        (served(0.003, legs=[]), "TTFT 3 ms, as predicted"),
        (served(0.003, compute_s=0.002, predicted={"ttft_s": None}), "TTFT 3 ms: mostly prefill (2 ms)"),
        (
            served(0.003, legs=[], tpot_s=0.05, predicted={"tpot_s": 0.003}),
            "TTFT 3 ms, as predicted; TPOT 50 ms, predicted 3 ms",
        ),
        (served(0.003, legs=[], tpot_s=0.05), "TTFT 3 ms, as predicted; TPOT 50 ms"),
        (served(None, legs=[], outcome="worker_lost"), "ended: worker_lost"),
        (served(None, legs=[]), "finished"),
        (
            decision_record(placement=placement(ttft_s=0.004)),
            "still running, or its gateway is gone; predicted TTFT 4 ms",
        ),
        (decision_record(), "still running, or its gateway is gone"),
        (decision_record(placement=None), "not placed"),
    ],
)
def test_verdict_names_the_largest_difference(record: DecisionRecord, line: str) -> None:
    assert verdict([record]) == line


def test_pulled_prefix_is_part_of_the_queue() -> None:
    source = PrefixSource(worker=worker_ref("w7"), num_blocks=3)
    record = served(0.2, queue_s=0.192, predicted={"prefix_source": source, "prefix_pull_s": 0.05, "ttft_s": 0.0521})
    assert verdict([record]).endswith("queue and prefix pull 192 ms instead of 50 ms")


def test_refusal_and_missed_slo_are_said() -> None:
    refusal = Rejection(reason=Reason.TTFT_SLO, message="too late", retry_after_s=1.0)
    assert verdict([decision_record(placement=None, rejection=refusal)]) == "refused, ttft_slo: too late"
    slow = replace(served(0.2, legs=[], tpot_s=0.05), query=query(slo=Slo(ttft_s=0.1, tpot_s=0.01)))
    assert verdict([slow]).endswith("; missed the TTFT SLO of 100 ms; missed the TPOT SLO of 10 ms")


def test_ttft_of_a_resumed_request_is_that_of_the_attempt_with_the_first_token() -> None:
    lost = served(0.024, legs=[], outcome="worker_lost")
    line = verdict([lost, replace(served(None, legs=[], tpot_s=0.003), attempt=1)])
    assert line == "2 attempts; TTFT 24 ms, predicted 2.1 ms; TPOT 3 ms"
