"""The audit of a storm: which requests may fail, how many must finish, and their finish reasons."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from baton.core.request import FinishReason
from baton.sim.chaos.audit import MIN_FINISHED, check_outcomes
from baton.sim.chaos.profile import StormSettings, draw_settings
from baton.sim.chaos.report import ChaosReport, Downtime
from baton.sim.chaos.requests import TIMEOUT_S
from baton.sim.sim_clients import GATEWAY_LOST, SimAnswer, SimRequest, expected_answer

VOCAB_SIZE = 251


def settings(admission: str = "off") -> StormSettings:
    drawn = draw_settings(Random(0))
    return replace(drawn, config=replace(drawn.config, admission=admission))  # type: ignore[arg-type]


def answer(failure: str = "", *, timeout_s: float = TIMEOUT_S, **more: Any) -> SimAnswer:
    request = SimRequest(number=0, start_s=10.0, prompt=(1, 2, 3), max_tokens=4, timeout_s=timeout_s)
    return SimAnswer(request=request, failure=failure, gateway="gateway", ended_s=12.0, **more)


def check(*answers: SimAnswer, admission: str = "off", deaths: tuple[Downtime, ...] = ()) -> None:
    check_outcomes(answers, settings(admission), ChaosReport(seed=0, deaths=list(deaths)))


def test_cancelled_and_hurried_requests_need_not_finish() -> None:
    check(answer(was_cancelled=True), answer("deadline", timeout_s=1.0), answer())
    with pytest.raises(AssertionError, match="1 requests failed without need: request 0 at gateway: deadline"):
        check(answer("deadline"), answer())
    with pytest.raises(AssertionError, match="worker_lost"):
        check(answer("worker_lost", timeout_s=1.0))


def test_refusal_is_excused_by_admission_control_only() -> None:
    check(answer("ttft_slo"), *[answer()] * 9, admission="predictive")
    with pytest.raises(AssertionError, match="ttft_slo"):
        check(answer("ttft_slo"), *[answer()] * 9)


@pytest.mark.parametrize(
    ("down", "num_needed"),
    [((), 64), (("decode-0",), 32), (("decode-0", "decode-1"), 32), (("prefill-0",), 32)],
)
def test_full_queue_is_excused_by_as_many_requests_at_that_time(down: tuple[str, ...], num_needed: int) -> None:
    drawn = settings()
    config = replace(drawn.config, prefill=2, decode=2, hybrid=0, max_queued_jobs=64)
    report = ChaosReport(seed=0, pauses=[Downtime(process=name, start_s=0.0) for name in down])
    refused, earlier = answer("queue_full"), replace(answer(), ended_s=11.0)
    answers = [refused, *[answer()] * (num_needed - 1), earlier]
    check_outcomes(answers, replace(drawn, config=config), report)
    with pytest.raises(AssertionError, match="queue_full"):
        check_outcomes([refused, *answers[2:]], replace(drawn, config=config), report)


def test_too_few_finished_requests_are_a_failure_whatever_excuses_the_others() -> None:
    num_refused = round(20 * (1 - MIN_FINISHED)) + 1
    answers = [*[answer("ttft_slo")] * num_refused, *[answer()] * (20 - num_refused)]
    with pytest.raises(AssertionError, match=f"only {20 - num_refused} of 20 wanted requests finished"):
        check(*answers, admission="predictive")
    check(*answers[1:], answer(), admission="predictive")


@pytest.mark.parametrize(
    ("process", "start_s", "end_s", "is_wanted"),
    [
        ("gateway", 10.5, 11.0, False),
        ("scheduler-1", 11.5, 13.0, False),
        ("gateway-1", 10.5, 11.0, True),
        ("decode-0", 10.5, 11.0, True),
        ("gateway", 8.0, 9.0, True),
    ],
    ids=["its gateway", "a scheduler", "another gateway", "a worker", "earlier"],
)
def test_refusals_after_a_pause_that_delayed_them_do_not_count(
    process: str, start_s: float, end_s: float, is_wanted: bool
) -> None:
    pause = Downtime(process=process, start_s=start_s, end_s=end_s)
    report = ChaosReport(seed=0, pauses=[pause])
    answers = [*[answer("ttft_slo")] * 20, *[answer()] * 5]
    if is_wanted:
        with pytest.raises(AssertionError, match="only 5 of 25 wanted requests finished"):
            check_outcomes(answers, settings("predictive"), report)
    else:
        check_outcomes(answers, settings("predictive"), report)


@pytest.mark.parametrize(
    ("process", "start_s", "end_s", "is_excused"),
    [
        ("gateway", 11.5, 13.0, True),
        ("gateway-1", 11.5, 13.0, False),
        ("gateway", 8.0, 9.0, False),
        ("gateway", 10.5, 11.0, False),
        ("gateway", 12.5, 13.0, False),
    ],
    ids=["killed", "another gateway", "earlier", "running again", "later"],
)
def test_lost_gateway_must_have_been_killed_at_that_time(
    process: str, start_s: float, end_s: float, is_excused: bool
) -> None:
    answers = [answer(GATEWAY_LOST), *[answer()] * 9]
    death = Downtime(process=process, start_s=start_s, end_s=end_s)
    if is_excused:
        check(*answers, deaths=(death,))
    else:
        with pytest.raises(AssertionError, match=GATEWAY_LOST):
            check(*answers, deaths=(death,))


def test_requests_of_gateways_that_could_not_serve_them_need_not_finish() -> None:
    """One gateway was killed. The other was started again while the stores did not work."""
    lost, unserved = answer(GATEWAY_LOST), replace(answer("scheduler_lost"), gateway="gateway-1")
    deaths = [
        Downtime(process="gateway", start_s=11.0, end_s=13.0),
        Downtime(process="gateway-1", start_s=8.0, end_s=9.0),
    ]
    outage = Downtime(process="", start_s=7.0, end_s=11.0)
    report = ChaosReport(seed=0, deaths=deaths, store_outages=[outage])
    num_refused = round(20 * (1 - MIN_FINISHED))
    answers = [*[lost, unserved] * 20, *[answer("ttft_slo")] * num_refused, *[answer()] * (20 - num_refused)]
    check_outcomes(answers, settings("predictive"), report)
    with pytest.raises(AssertionError, match=f"only {19 - num_refused} of 20 wanted requests finished"):
        check_outcomes([*answers[:-1], answer("ttft_slo")], settings("predictive"), report)
    with pytest.raises(AssertionError, match="scheduler_lost"):
        check_outcomes([*answers, unserved], settings(), replace(report, store_outages=[]))


def answered(request: SimRequest, *, finish: FinishReason | None, num_tokens: int, failure: str = "") -> SimAnswer:
    tokens = expected_answer(request, 0, VOCAB_SIZE)[:num_tokens]
    finishes = {} if finish is None else {0: finish}
    return SimAnswer(request=request, tokens={0: tokens}, finishes=finishes, failure=failure)


def test_finish_reason_is_compared_with_the_expected_one() -> None:
    request = SimRequest(number=0, start_s=0.0, prompt=(1, 2, 3), max_tokens=4)
    answered(request, finish=FinishReason.LENGTH, num_tokens=4).check(VOCAB_SIZE)
    with pytest.raises(AssertionError, match=r"finish reason .*STOP, expected .*LENGTH"):
        answered(request, finish=FinishReason.STOP, num_tokens=4).check(VOCAB_SIZE)
    with pytest.raises(AssertionError, match="finish reason None"):
        answered(request, finish=None, num_tokens=4).check(VOCAB_SIZE)
    stopped = replace(request, stop_token=expected_answer(request, 0, VOCAB_SIZE)[1])
    answered(stopped, finish=FinishReason.STOP, num_tokens=2).check(VOCAB_SIZE)
    with pytest.raises(AssertionError, match=r"expected .*STOP"):
        answered(stopped, finish=FinishReason.LENGTH, num_tokens=2).check(VOCAB_SIZE)


def test_part_of_a_failed_answer_needs_no_finish_reason_and_one_that_it_has_ends_the_whole() -> None:
    request = SimRequest(number=0, start_s=0.0, prompt=(1, 2, 3), max_tokens=4)
    answered(request, finish=None, num_tokens=2, failure="worker_lost").check(VOCAB_SIZE)
    with pytest.raises(AssertionError, match="got"):
        answered(request, finish=FinishReason.LENGTH, num_tokens=2, failure="worker_lost").check(VOCAB_SIZE)


def test_outages_with_too_short_a_time_between_them_count_as_one() -> None:
    report = ChaosReport(seed=1)
    report.deaths.append(Downtime(process="gateway", start_s=1.0, end_s=2.0))
    report.store_outages += [
        Downtime(process="stores", start_s=6.0, end_s=8.0),
        Downtime(process="stores", start_s=1.5, end_s=5.5),
    ]
    assert report.knew_no_scheduler("gateway", 7.0, margin_s=0.6)
    assert not report.knew_no_scheduler("gateway", 7.0, margin_s=0.4)
    assert not report.knew_no_scheduler("gateway", 9.0, margin_s=0.6)
    assert not report.knew_no_scheduler("gateway-1", 7.0, margin_s=0.6)
