"""SLO admission: which requests are rejected, with which reason, and when to retry."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.cluster.placement import Rejection
from baton.core.errors import Reason
from baton.core.request import Slo
from baton.scheduler.admission.slo_admission import (
    HEADROOM,
    MAX_RETRY_S,
    MIN_RETRY_S,
    AdmissionMode,
    check_slos,
    check_worker_queues,
)
from baton.scheduler.policies.kv_centric import kv_centric
from baton.scheduler.policies.policy_types import Choice, PolicyContext, Prediction
from tests.builders import query
from tests.unit.scheduler.measured_workers import decoding, measured, queued, random_cluster, seen

MODES = [AdmissionMode.EARLY, AdmissionMode.PREDICTIVE]


def expecting(**changes: float) -> Choice:
    """A choice with 0.5 s of queue, 1 s of prefill, a TPOT of 30 ms now and of 20 ms after prefill."""
    fields: dict[str, float] = {
        "queue_s": 0.5,
        "prefix_pull_s": 0.0,
        "prefill_s": 1.0,
        "transfer_s": 0.0,
        "ttft_s": 1.5,
        "least_queue_s": 0.5,
        "tpot_s": 0.02,
        "tpot_now_s": 0.03,
        "idle_tpot_s": 0.01,
        "decode_drain_s": 2.0,
    }
    return Choice(prefill=None, decode=None, predicted=Prediction(**(fields | changes)))


def answer(
    choice: Choice, mode: AdmissionMode = AdmissionMode.PREDICTIVE, *, attempt: int = 0, **slo: float
) -> Rejection | None:
    return check_slos(query(slo=Slo(**slo), attempt=attempt), choice, mode=mode)


def must_wait(choice: Choice, max_worker_queue_s: float | None, *, attempt: int = 0) -> Rejection | None:
    return check_worker_queues(
        query(attempt=attempt), choice, max_waiting_seqs=100, max_worker_queue_s=max_worker_queue_s
    )


@pytest.mark.parametrize("mode", MODES)
def test_predicted_ttft_over_slo_is_rejected_with_its_numbers(mode: AdmissionMode) -> None:
    refused = answer(expecting(), mode, ttft_s=1.2)
    assert refused is not None
    assert (refused.reason, refused.term, refused.predicted_s, refused.limit_s) == (
        Reason.TTFT_SLO,
        "ttft_s",
        HEADROOM * 1.5,
        1.2,
    )
    assert refused.retry_after_s == pytest.approx(HEADROOM * 1.5 - 1.2), "the queue shrinks by a second per second"
    assert answer(expecting(), mode, ttft_s=HEADROOM * 1.5) is None


def test_headroom_applies_when_judging_whether_waiting_can_help() -> None:
    """With a queue of 0.5 s in a TTFT of 1.5 s, an idle cluster is predicted to need HEADROOM seconds."""
    for ttft_s, is_hopeless in ((HEADROOM * 1.0 - 0.001, True), (HEADROOM * 1.0 + 0.001, False)):
        refused = answer(expecting(), ttft_s=ttft_s)
        assert refused is not None
        assert (refused.retry_after_s == MAX_RETRY_S) == is_hopeless
        assert ("an idle cluster would miss it" in refused.message) == is_hopeless


def test_early_mode_uses_current_tpot_and_predictive_mode_tpot_after_prefill() -> None:
    assert answer(expecting(), AdmissionMode.EARLY, tpot_s=0.025) is not None
    assert answer(expecting(), AdmissionMode.PREDICTIVE, tpot_s=0.025) is None
    filling = expecting(tpot_now_s=0.02, tpot_s=0.03)
    assert answer(filling, AdmissionMode.EARLY, tpot_s=0.025) is None
    refused = answer(filling, AdmissionMode.PREDICTIVE, tpot_s=0.025)
    assert refused is not None
    assert (refused.reason, refused.term, refused.predicted_s) == (Reason.TPOT_SLO, "tpot_s", HEADROOM * 0.03)
    assert refused.retry_after_s == pytest.approx(2.0 * math.log((HEADROOM * 0.03 - 0.01) / 0.015)), (
        "until enough other sequences have ended"
    )


def test_rejection_says_if_an_idle_cluster_would_miss_the_slo() -> None:
    for refused in (answer(expecting(), ttft_s=0.9), answer(expecting(), tpot_s=0.005)):
        assert refused is not None
        assert refused.retry_after_s == MAX_RETRY_S
        assert "idle" in refused.message


def test_drafts_count_when_judging_whether_an_idle_cluster_would_miss_the_slo() -> None:
    """An answer alone takes 2.5 ms a step, in which it gets two tokens."""
    busy = seen(measured("h", "hybrid", tokens_per_step=2.0, **decoding(8)))
    for tpot_slo_s, is_hopeless in ((0.002, False), (0.001, True)):
        asking = query(num_prompt_tokens=100, slo=Slo(tpot_s=tpot_slo_s))
        choice = kv_centric(asking, busy, PolicyContext(number=0, seed=0))
        assert isinstance(choice, Choice)
        refused = check_slos(asking, choice, mode=AdmissionMode.PREDICTIVE)
        assert refused is not None
        assert ("an idle cluster would miss it" in refused.message) == is_hopeless


def test_slos_are_not_checked_when_off_or_without_predictions() -> None:
    assert answer(expecting(), AdmissionMode.OFF, ttft_s=0.1, tpot_s=0.001) is None
    assert answer(Choice(prefill=None, decode=None), ttft_s=0.1, tpot_s=0.001) is None
    assert answer(expecting()) is None, "a request without SLOs passes"


@pytest.mark.parametrize("mode", MODES)
def test_later_attempt_is_never_rejected_for_load(mode: AdmissionMode) -> None:
    assert answer(expecting(), mode, attempt=1, ttft_s=0.1, tpot_s=0.001) is None
    assert not must_wait(expecting(), 0.1, attempt=1)


def test_request_waits_while_every_worker_queue_is_too_long() -> None:
    waits = must_wait(expecting(least_queue_s=2.0), 1.0)
    assert waits is not None
    assert (waits.reason, waits.predicted_s, waits.limit_s, waits.retry_after_s) == (Reason.QUEUE_FULL, 2.0, 1.0, 1.0)
    assert not must_wait(expecting(queue_s=3.0, least_queue_s=0.5), 1.0)
    assert not must_wait(Choice(prefill=None, decode=None), 1.0)
    assert not must_wait(expecting(least_queue_s=2.0), None)


def test_time_waited_and_requests_ahead_count_against_ttft() -> None:
    asking = query(slo=Slo(ttft_s=2.0))
    assert check_slos(asking, expecting(), mode=AdmissionMode.PREDICTIVE) is None
    assert check_slos(asking.after_waiting(0.4), expecting(), mode=AdmissionMode.PREDICTIVE) is None
    waited = check_slos(asking.after_waiting(0.6), expecting(), mode=AdmissionMode.PREDICTIVE)
    behind = check_slos(asking, expecting(), mode=AdmissionMode.PREDICTIVE, ahead_s=0.6)
    for refused in (waited, behind):
        assert refused is not None
        assert refused.predicted_s == pytest.approx(2.2, abs=0.03)
        assert refused.retry_after_s == pytest.approx(0.2, abs=0.03)


def test_least_queue_is_that_of_the_prefill_candidates() -> None:
    long, longer = measured("p0", "prefill", **queued(50_000)), measured("p1", "prefill", **queued(60_000))
    choice = kv_centric(
        query(),
        seen(long, longer, measured("d", "decode", **decoding(40), **queued(99_000))),
        PolicyContext(number=0, seed=0),
    )
    assert isinstance(choice, Choice)
    assert must_wait(choice, 1.0)
    idle = kv_centric(
        query(num_prompt_tokens=8000),
        seen(long, longer, measured("d", "decode", **decoding(40))),
        PolicyContext(number=0, seed=0),
    )
    assert isinstance(idle, Choice)
    assert idle.prefill is not None
    assert must_wait(idle, 1.0), "the empty queue of a decode worker does not count"
    local = kv_centric(
        query(num_prompt_tokens=100), seen(long, measured("d", "decode")), PolicyContext(number=0, seed=0)
    )
    assert isinstance(local, Choice)
    assert local.prefill is None
    assert not must_wait(local, 1.0), "unless it is the choice"


@given(seed=st.integers(0, 1_000_000), mode=st.sampled_from(MODES))
def test_requests_are_rejected_exactly_if_a_predicted_term_misses_its_slo(seed: int, mode: AdmissionMode) -> None:
    random = Random(seed)
    slo = Slo(ttft_s=random.choice([None, 0.05, 1.0, 60.0]), tpot_s=random.choice([None, 0.003, 0.02, 10.0]))
    asking = query(
        num_prompt_tokens=random.randrange(1, 700), max_tokens=100, slo=slo, attempt=random.choice([0, 0, 0, 1])
    )
    choice = kv_centric(asking, random_cluster(random), PolicyContext(number=seed, seed=seed))
    if isinstance(choice, Rejection):
        return
    refused = check_slos(asking, choice, mode=mode)
    misses = []
    if choice.predicted is not None and asking.attempt == 0:
        tpot_s = choice.predicted.tpot_now_s if mode is AdmissionMode.EARLY else choice.predicted.tpot_s
        misses = [
            limit_s is not None and value is not None and HEADROOM * value > limit_s
            for value, limit_s in ((choice.predicted.ttft_s, slo.ttft_s), (tpot_s, slo.tpot_s))
        ]
    assert (refused is not None) == any(misses)
    if refused is not None:
        assert MIN_RETRY_S <= refused.retry_after_s <= MAX_RETRY_S
        assert refused.predicted_s is not None
        assert refused.limit_s is not None
        assert refused.predicted_s > refused.limit_s
