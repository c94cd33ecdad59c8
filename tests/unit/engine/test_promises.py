"""What answers that are ahead of their promise lend to prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_cost import STALL_TIMES, StepCostModel
from baton.engine.scheduling import slo_slack
from baton.engine.scheduling.slo_slack import KEPT_PART, LENT_PART, SURE_PART
from baton.engine.scheduling.step_budget import StepTiming
from baton.engine.state.sequence import EngineSequence
from tests.builders import sequence_request
from tests.engine_rig import EngineRig

SLO_S = 0.01
COSTS = StepCostModel(
    step_s=4e-3, prefill_token_s=1e-4, prefill_attended_s=1e-8, decode_seq_s=2e-4, decode_context_s=1e-7
)


def decoding(
    num_left: int, came_s: float, *, num_tokens: int = 1, slo_s: float = SLO_S, ignore_eos: bool = True
) -> EngineSequence:
    """Its `num_tokens` tokens all came at `came_s`, and `num_left` are to come at most."""
    sampling = {"ignore_eos": ignore_eos}
    request = sequence_request(1, range(8), max_tokens=num_tokens + num_left, sampling=sampling, tpot_slo_s=slo_s)
    seq = EngineSequence(request, key=1, arrival=1)
    for token in range(num_tokens):
        slo_slack.token_came(seq, came_s)
        seq.append(token)
    return seq


def limit_s(
    seqs: list[EngineSequence],
    now_s: float,
    decode_s: float,
    *,
    later_s: float | None = None,
    mean_output_tokens: float = 0.0,
    max_model_len: int = 10_000,
) -> float:
    """`later_s`: as `decode_s` unless it is told: no prompts are to come."""
    return slo_slack.limit_s(
        seqs,
        now_s,
        decode_s,
        later_s=later_s or decode_s,
        mean_output_tokens=mean_output_tokens,
        max_model_len=max_model_len,
    )


def test_what_is_left_of_an_answer_makes_up_for_a_wait() -> None:
    """Due 9 ms apart, they come 4 ms apart: the next in time with 5 ms to spare, and 5 more for each after
    it."""
    assert limit_s([decoding(1, 0.0)], 0.0, 0.004) == pytest.approx(0.004 + LENT_PART * 0.005)
    assert limit_s([decoding(21, 0.0)], 0.0, 0.004) == pytest.approx(0.004 + LENT_PART * 21 * 0.005)


def test_a_wait_is_made_up_for_by_steps_in_which_prompts_have_what_they_always_get() -> None:
    """Of 20 later tokens 2 ms are gained each, not 5. Where they gain nothing, what is lent is what there is
    already."""
    assert limit_s([decoding(21, 0.0)], 0.0, 0.004, later_s=0.007) == pytest.approx(
        0.004 + LENT_PART * (0.005 + 20 * 0.002)
    )
    assert limit_s([decoding(21, 0.0)], 0.0, 0.004, later_s=0.012) == pytest.approx(0.004 + LENT_PART * 0.005)


def test_where_even_steps_without_prompts_lose_time_what_was_gained_is_kept_for_them() -> None:
    """0.09 s ahead, and 0.5 ms behind with each of 200 tokens to come: a tenth of a second."""
    assert limit_s([decoding(200, 0.0, num_tokens=11)], 0.0, 0.0095, later_s=0.017) == 0.0
    assert limit_s([decoding(20, 0.0, num_tokens=11)], 0.0, 0.0095, later_s=0.017) > 0.02


def test_tokens_that_came_early_are_time_to_spare() -> None:
    late, early = (limit_s([decoding(1, 0.0, num_tokens=count)], 0.0, 0.004) for count in (1, 11))
    assert early == pytest.approx(late + LENT_PART * 10 * KEPT_PART * SLO_S)


def test_samples_that_part_have_had_their_first_token_at_the_same_time() -> None:
    seq = decoding(100, 5.0)
    child = seq.fork(key=2, sample_index=1)
    slo_slack.token_came(seq, 6.0)
    slo_slack.token_came(child, 7.0)
    assert seq.due_s == child.due_s == pytest.approx(5.0 + 2 * KEPT_PART * SLO_S)


def test_of_an_answer_that_may_end_by_itself_little_is_counted_on() -> None:
    sure = limit_s([decoding(1000, 0.0, ignore_eos=False)], 0.0, 0.004, mean_output_tokens=400)
    assert sure == pytest.approx(0.004 + LENT_PART * SURE_PART * 400 * 0.005)
    unknown = limit_s([decoding(1000, 0.0, ignore_eos=False)], 0.0, 0.004)
    assert unknown == limit_s([decoding(1, 0.0)], 0.0, 0.004)


def test_the_one_that_can_wait_least_decides_unless_it_is_too_late_for_it() -> None:
    tight, loose, hopeless = decoding(1, 0.0), decoding(100, 0.0), decoding(5, -10.0)
    assert limit_s([loose, tight], 0.0, 0.004) == limit_s([tight], 0.0, 0.004)
    assert limit_s([loose, hopeless], 0.0, 0.004) == limit_s([loose], 0.0, 0.004)
    assert limit_s([hopeless], 0.0, 0.004) == 0.0, "and gets what everybody gets"


def test_an_answer_that_can_only_just_be_on_time_is_helped() -> None:
    """With 14 gaps in all it has 14 ms more than the 126 that it was meant to take; its five tokens take
    20."""
    loose = decoding(100, 0.0, num_tokens=20)
    just, hopeless = (limit_s([decoding(5, 0.0, num_tokens=10), loose], now_s, 0.004) for now_s in (0.119, 0.121))
    assert just == 0.0
    assert hopeless == limit_s([loose], 0.121, 0.004) > 0.0


def test_an_answer_that_may_still_be_long_is_not_given_up() -> None:
    """At 6 ms a token it gains 3 with each; that it is late is no reason to make it later."""
    late, loose = decoding(500, -0.02, ignore_eos=False), decoding(500, 0.0)
    assert limit_s([loose], 0.0, 0.006) > 0.1
    assert limit_s([late, loose], 0.0, 0.006) == 0.0


def test_nothing_is_made_up_in_tokens_that_the_model_has_no_room_for() -> None:
    assert limit_s([decoding(1000, 0.0)], 0.0, 0.004, max_model_len=30) == limit_s([decoding(21, 0.0)], 0.0, 0.004)


def test_beside_one_that_was_promised_nothing_there_is_no_limit_by_promises() -> None:
    assert limit_s([decoding(100, 0.0), decoding(100, 0.0, slo_s=0.0)], 0.0, 0.004) == 0.0
    assert limit_s([], 0.0, 0.004) == 0.0


@given(
    decode_s=st.floats(0.001, 0.008),
    times=st.floats(1.0, 1.8),
    num_tokens=st.integers(2, 300),
    wants=st.lists(st.booleans(), min_size=300, max_size=300),
)
def test_whoever_lends_only_what_it_may_is_on_time(
    decode_s: float, times: float, num_tokens: int, wants: list[bool]
) -> None:
    """Whenever a prompt wants it, a step takes all that it may, and in any case what prompts always get. At
    the end that may be one such step more than there is time for."""
    later_s = min(times * decode_s, KEPT_PART * SLO_S)
    seq, now_s = decoding(num_tokens - 1, 0.0), 0.0
    for token in range(num_tokens - 1):
        allowed_s = limit_s([seq], now_s, decode_s, later_s=later_s)
        assert allowed_s > decode_s or token, "there is time to spare at first"
        now_s += max(later_s, allowed_s) if wants[token] else decode_s
        slo_slack.token_came(seq, now_s)
        seq.append(token)
    assert now_s <= KEPT_PART * SLO_S * (num_tokens - 1) + (later_s - decode_s) + 1e-9


@given(
    decode_s=st.floats(0.001, 0.005),
    num_tokens=st.integers(2, 300),
    queued_s=st.lists(st.just(0.0) | st.floats(0.001, 0.03), min_size=300, max_size=300),
)
def test_a_queue_makes_an_answer_late_by_no_more_than_the_queue_takes(
    decode_s: float, num_tokens: int, queued_s: list[float]
) -> None:
    """Where many prompts wait a step takes what they get for that (`stall_free_step_s`), a promise or not.
    What was lent comes back all the same: late is only what such steps took beyond what the answer could
    expect, and lend."""
    later_s = STALL_TIMES * decode_s
    seq, now_s, beyond_s = decoding(num_tokens - 1, 0.0), 0.0, 0.0
    for token in range(num_tokens - 1):
        may_s = max(later_s, limit_s([seq], now_s, decode_s, later_s=later_s))
        beyond_s += max(0.0, queued_s[token] - may_s)
        now_s += max(may_s, queued_s[token])
        slo_slack.token_came(seq, now_s)
        seq.append(token)
    assert now_s <= KEPT_PART * SLO_S * (num_tokens - 1) + (later_s - decode_s) + beyond_s + 1e-9


def test_a_prompt_is_computed_in_one_go_beside_an_answer_that_can_wait() -> None:
    def largest_part(tpot_slo_s: float) -> int:
        rig = EngineRig(max_num_batched_tokens=512, num_blocks=400, max_model_len=1000)
        rig.engine.pace = StepTiming(costs=lambda: COSTS, now_s=lambda: 100.0)
        rig.add(sequence_request(1, range(10), max_tokens=200, sampling={"ignore_eos": True}, tpot_slo_s=tpot_slo_s))
        rig.step()
        assert (rig.engine.slo_step_s > 0.05) == bool(tpot_slo_s)
        rig.add(sequence_request(9, range(20, 520), max_tokens=2))
        return max(part.num_scheduled_tokens for part in rig.step().sequences)

    assert largest_part(0.01) == 500
    assert largest_part(0.0) <= 60


def test_more_prompts_that_wait_make_no_step_smaller() -> None:
    """That they are done sooner is worth more to those who wait for them than what answers could be lent is
    less."""
    rig = EngineRig(max_num_batched_tokens=512, num_blocks=600, max_model_len=1000)
    rig.engine.pace = StepTiming(costs=lambda: COSTS, now_s=lambda: 100.0)
    for seq_id in range(2):
        rig.add(sequence_request(seq_id, range(10), max_tokens=60, sampling={"ignore_eos": True}, tpot_slo_s=0.01))
    rig.step()
    budgets = []
    for seq_id in range(9, 29):
        rig.add(sequence_request(seq_id, range(20, 520), max_tokens=2))
        budgets.append(rig.engine.step_budget_tokens)
    assert budgets == sorted(budgets)
    assert 100 < budgets[0] < budgets[-1], "the promises allow more than prompts always get, and many get more still"
