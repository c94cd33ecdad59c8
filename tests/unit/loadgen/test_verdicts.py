"""Verdicts of trials, at their end and before: shares, backlogs, open requests, and split error
probabilities."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from loadgen.capacity.verdicts import LOOKS, TrialJudge, TrialVerdict, latest_good_s, look_errors, student_tail
from loadgen.measure.records import Record
from loadgen.measure.request_metrics import OutcomeRules
from loadgen.plan.plan import AnswerOf, Generated, Plan, PlannedRequest
from loadgen.plan.sources.workloads import DEFAULT_VOCABULARY
from loadgen.slo_target import SloTarget
from tests.loadgen_simulated_servers import OUTPUT_TOKENS, SYSTEMS, complete_record, plan_at, slots, trial


def judge_of(plan: Plan, target: float = 0.9) -> TrialJudge:
    return TrialJudge(plan, OutcomeRules(slos=plan.slos), target)


def answered(plan: Plan, ttft_s: Callable[[int], float], length_s: float = 0.1) -> list[Record]:
    """Records with the first token this long after the due time, and the last one `length_s` later."""
    return [
        complete_record(
            request,
            (request.at_s or 0.0) + ttft_s(request.index),
            (request.at_s or 0.0) + ttft_s(request.index) + length_s,
        )
        for request in plan.requests
    ]


def ended_by(records: Sequence[Record], now_s: float) -> list[Record]:
    return [record for record in records if record.ended_s <= now_s]


# At the end.


@pytest.mark.parametrize(
    ("late_every", "verdict"),
    [(10**9, TrialVerdict.MET), (40, TrialVerdict.MET), (10, TrialVerdict.UNDECIDED), (4, TrialVerdict.MISSED)],
)
def test_share_decides_if_its_interval_excludes_the_target(late_every: int, verdict: TrialVerdict) -> None:
    plan = plan_at(10, 60, seed=1)
    judgement = judge_of(plan).judge(answered(plan, lambda index: 0.9 if index % late_every == 1 else 0.1))
    assert judgement.verdict is verdict
    assert judgement.share == pytest.approx(1 - 1 / late_every, abs=0.01)
    assert judgement.interval.low <= judgement.share <= (judgement.interval.high or 0)
    assert not judgement.is_overloaded


def test_requests_in_the_ramp_are_not_judged() -> None:
    """Responses take 3 s, so the first 3 s of arrivals are the ramp; misses there do not count."""
    plan = plan_at(10, 60, seed=2)
    due_s = [request.at_s or 0.0 for request in plan.requests]
    judgement = judge_of(plan).judge(
        answered(plan, lambda index: 0.9 if due_s[index] < due_s[0] + 3 else 0.1, length_s=3.0)
    )
    assert judgement.share == 1
    assert judgement.num_judged == sum(at_s >= due_s[0] + 3.1 for at_s in due_s)


def test_failures_and_missing_responses_miss_the_slo() -> None:
    plan = plan_at(10, 60, seed=3)
    records = answered(plan, lambda _: 0.1)
    half = [record if record.index % 2 else replace(record, status=500, error="broken") for record in records]
    judge = judge_of(plan)
    assert judge.judge(half).share == pytest.approx(0.5, abs=0.01)
    lost = judge.judge([record for record in records if record.index % 2])
    assert (lost.num_judged, lost.num_open) == (judge.judge(records).num_judged, 0)
    assert lost.share == pytest.approx(0.5, abs=0.01)


def test_consecutive_misses_count_as_few_observations() -> None:
    """The same number of misses is weaker evidence in one stretch than spread over the trial."""
    plan = plan_at(10, 60, seed=4)
    total = len(plan.requests)
    spread = judge_of(plan).judge(answered(plan, lambda index: 0.9 if index % 7 == 0 else 0.1)).interval
    piece = (
        judge_of(plan)
        .judge(answered(plan, lambda index: 0.9 if 0.5 < index / total < 0.5 + 1 / 7 * 0.8 else 0.1))
        .interval
    )
    assert (piece.high or 0) - piece.low > 2 * ((spread.high or 0) - spread.low)


def test_empty_window_is_undecided() -> None:
    plan = plan_at(10, 60, seed=5)
    early = judge_of(plan).judge([], 0.5, look=0)
    assert (early.num_judged, early.verdict) == (0, TrialVerdict.UNDECIDED)
    assert math.isnan(early.share)


# The backlog.


def test_growing_backlog_is_overload_even_if_responses_are_in_time() -> None:
    slo = "ttft=60s"
    plan = plan_at(12, 60, seed=6, slo=slo)
    judgement = judge_of(plan).judge(slots(8, 1.0)(plan, random.Random(1)))
    assert judgement.share == 1
    assert judgement.growth_rps == pytest.approx(12 - 8, rel=0.3)
    assert (judgement.is_overloaded, judgement.verdict) == (True, TrialVerdict.MISSED)


def test_fluctuating_backlog_is_not_overload() -> None:
    """The load is half and nine tenths of the capacity. Overload may be reported in 2.5 % of trials."""
    for rate_rps, allowed in ((4.0, 1), (7.2, 3)):
        grown = 0
        for seed in range(40):
            plan = plan_at(rate_rps, 60, seed=seed, slo="ttft=60s")
            grown += judge_of(plan).judge(slots(8, 1.0)(plan, random.Random(seed))).is_overloaded
        assert grown <= allowed, rate_rps


def test_rejections_keep_the_backlog_short_but_miss_the_slo() -> None:
    plan = plan_at(10, 60, seed=7)
    records = answered(plan, lambda _: 0.1)
    shed = [
        replace(
            record,
            arrivals=(),
            status=429,
            is_complete=False,
            num_output_tokens=None,
            ended_s=record.intended_s + 0.001,
        )
        if record.index % 3 == 0
        else record
        for record in records
    ]
    judgement = judge_of(plan).judge(shed)
    assert (judgement.is_overloaded, judgement.verdict) == (False, TrialVerdict.MISSED)
    assert judgement.share == pytest.approx(2 / 3, abs=0.02)


# Early.


def test_clear_miss_is_detected_at_the_first_look() -> None:
    plan = plan_at(20, 60, seed=8)
    records = answered(plan, lambda _: 3.0)
    judgement = judge_of(plan).judge(ended_by(records, 15.0), 15.0, look=0)
    assert judgement.verdict is TrialVerdict.MISSED
    assert judgement.share == 0


def test_early_looks_never_report_met() -> None:
    plan = plan_at(20, 60, seed=9)
    records = answered(plan, lambda _: 0.01)
    judge = judge_of(plan)
    for look, part in enumerate(LOOKS[:-1]):
        now_s = part * 60
        assert judge.judge(ended_by(records, now_s), now_s, look=look).verdict is TrialVerdict.UNDECIDED
    assert judge.judge(records).verdict is TrialVerdict.MET


def test_open_requests_count_for_neither_side() -> None:
    """The SLO has only a TTFT bound and responses take 20 s. At 15 s few have ended, which must not count as
    missed."""
    plan = plan_at(20, 60, seed=10, slo="ttft=1s")
    records = answered(plan, lambda _: 0.1, length_s=20.0)
    judge = judge_of(plan)
    for now_s, look in ((15.0, 0), (30.0, 1)):
        judgement = judge.judge(ended_by(records, now_s), now_s, look=look)
        assert judgement.verdict is TrialVerdict.UNDECIDED
        assert not judgement.is_overloaded
    assert judge.judge(records).verdict is TrialVerdict.MET


def test_open_request_past_its_slo_counts_as_missed() -> None:
    """The e2e bound is 1 s and nothing ever ends."""
    plan = plan_at(20, 60, seed=11, slo="ttft=500ms,e2e=1s")
    first = answered(plan, lambda _: 0.1)[:30]
    judgement = judge_of(plan).judge(first, 30.0, look=1)
    assert 0 < judgement.num_open < 30  # of the last second
    assert judgement.num_judged > 500
    assert judgement.verdict is TrialVerdict.MISSED
    waiting = judge_of(replace(plan, slos={"default": SloTarget(ttft_s=0.5)})).judge(first, 30.0, look=1)
    assert waiting.num_open > 300


def test_error_probability_is_split_over_looks() -> None:
    errors = look_errors(0.025)
    assert sum(errors) == pytest.approx(0.025)
    assert errors[0] < 1e-4
    assert list(errors) == sorted(errors)


def test_trials_that_meet_the_slo_rarely_end_early() -> None:
    """A server at three quarters of its capacity, in 60 trials with three early looks each."""
    system = SYSTEMS["8 slots"]
    broken = [
        trial(system, 0.75 * system.capacity_rps, 60.0, seed)[0].verdict is TrialVerdict.MISSED for seed in range(60)
    ]
    assert sum(broken) <= 3


# Sessions and formulas.


def test_session_requests_are_judged_after_the_ramp() -> None:
    """Three turns, 8 s apart: the first 16 s are the ramp, although responses take only 0.1 s."""
    requests: list[PlannedRequest] = []
    for session in range(100):
        at_s, before = session * 0.6, None
        for turn in range(3):
            index = len(requests)
            prompt: tuple[Generated | AnswerOf, ...] = (Generated(segment_id=index, num_tokens=8),)
            later = {"after": before, "think_s": 8.0} if before is not None else {"at_s": at_s}
            requests.append(
                PlannedRequest(
                    index=index, segments=prompt, output_tokens=OUTPUT_TOKENS, session=f"s{session}", turn=turn, **later
                )  # type: ignore[arg-type]
            )
            before = index
    plan = Plan(
        name="s",
        seed=0,
        vocabulary=DEFAULT_VOCABULARY,
        requests=tuple(requests),
        slos={"default": SloTarget(ttft_s=0.5)},
    )
    records = []
    for request in requests:
        due_s = (request.index // 3) * 0.6 + request.turn * 8.1
        records.append(replace(complete_record(replace(request, at_s=due_s), due_s + 0.05, due_s + 0.1)))
    judgement = judge_of(plan).judge(records)
    assert judgement.num_judged == sum(16 <= record.intended_s <= 59.4 for record in records)
    assert not judgement.is_overloaded
    assert judgement.verdict is TrialVerdict.MET
    now_s = 30.0
    early = judge_of(plan).judge(ended_by(records, now_s), now_s, look=1)
    assert 0 < early.num_judged < judgement.num_judged
    assert early.share == 1


def test_latest_age_of_a_good_response() -> None:
    assert latest_good_s(SloTarget(), 8) == math.inf
    assert latest_good_s(SloTarget(ttft_s=1.0), 8) == math.inf
    assert latest_good_s(SloTarget(ttft_s=1.0), 1) == 1.0
    assert latest_good_s(SloTarget(tpot_s=0.1), 8) == math.inf
    assert latest_good_s(SloTarget(ttft_s=1.0, tpot_s=0.1), 8) == pytest.approx(1.7)
    assert latest_good_s(SloTarget(ttft_s=1.0, tpot_s=0.1, e2e_s=1.5), 8) == 1.5


def test_student_tail_matches_tables() -> None:
    assert student_tail(0.0, 7) == pytest.approx(0.5)
    assert student_tail(2.365, 7) == pytest.approx(0.025, abs=1e-4)
    assert student_tail(3.499, 7) == pytest.approx(0.005, abs=1e-5)
    assert student_tail(12.706, 1) == pytest.approx(0.025, abs=1e-5)
    assert student_tail(3.182, 3) == pytest.approx(0.025, abs=1e-5)
    assert student_tail(math.inf, 7) == pytest.approx(0.0, abs=1e-12)
