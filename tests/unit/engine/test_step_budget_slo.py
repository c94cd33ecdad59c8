"""Sequences that are ahead of their TPOT SLO give time to prefill, and still meet the SLO."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_cost import STALL_FACTOR, StepCostModel
from baton.engine.scheduling.step_budget import (
    EXPECTED_OUTPUT_SHARE,
    SLACK_SHARE_PER_STEP,
    SLO_TARGET_SHARE,
    record_token,
    slo_limit_s,
)
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
    """Return a sequence whose `num_tokens` tokens all came at `came_s`, with at most `num_left` more to
    come."""
    sampling = {"ignore_eos": ignore_eos}
    request = sequence_request(1, range(8), max_tokens=num_tokens + num_left, sampling=sampling, tpot_slo_s=slo_s)
    seq = EngineSequence(request, key=1, arrival=1)
    for token in range(num_tokens):
        record_token(seq, came_s)
        seq.append(token)
    return seq


def limit_s(
    seqs: list[EngineSequence],
    now_s: float,
    decode_s: float,
    *,
    baseline_s: float | None = None,
    mean_output_tokens: float = 0.0,
    max_model_len: int = 10_000,
) -> float:
    """Call `slo_limit_s`. `baseline_s` defaults to `decode_s`: later steps carry no prefill."""
    return slo_limit_s(
        seqs,
        now_s,
        decode_s,
        baseline_s=baseline_s or decode_s,
        mean_output_tokens=mean_output_tokens,
        max_model_len=max_model_len,
    )


def test_remaining_tokens_of_a_response_recover_a_delay() -> None:
    """Tokens are due 9 ms apart and come 4 ms apart: 5 ms of slack now, and 5 ms more per later token."""
    assert limit_s([decoding(1, 0.0)], 0.0, 0.004) == pytest.approx(0.004 + SLACK_SHARE_PER_STEP * 0.005)
    assert limit_s([decoding(21, 0.0)], 0.0, 0.004) == pytest.approx(0.004 + SLACK_SHARE_PER_STEP * 21 * 0.005)


def test_delay_is_recovered_in_steps_of_baseline_length() -> None:
    """Each of 20 later tokens recovers 2 ms, not 5. If they recover nothing, only the present slack is
    used."""
    assert limit_s([decoding(21, 0.0)], 0.0, 0.004, baseline_s=0.007) == pytest.approx(
        0.004 + SLACK_SHARE_PER_STEP * (0.005 + 20 * 0.002)
    )
    assert limit_s([decoding(21, 0.0)], 0.0, 0.004, baseline_s=0.012) == pytest.approx(
        0.004 + SLACK_SHARE_PER_STEP * 0.005
    )


def test_slack_is_kept_for_later_decode_steps_that_exceed_the_target_gap() -> None:
    """The sequence is 0.09 s ahead and falls behind by 0.5 ms with each of 200 later tokens: a tenth of a
    second."""
    assert limit_s([decoding(200, 0.0, num_tokens=11)], 0.0, 0.0095, baseline_s=0.017) == 0.0
    assert limit_s([decoding(20, 0.0, num_tokens=11)], 0.0, 0.0095, baseline_s=0.017) > 0.02


def test_early_tokens_add_slack() -> None:
    late, early = (limit_s([decoding(1, 0.0, num_tokens=count)], 0.0, 0.004) for count in (1, 11))
    assert early == pytest.approx(late + SLACK_SHARE_PER_STEP * 10 * SLO_TARGET_SHARE * SLO_S)


def test_forked_samples_share_the_time_of_their_first_token() -> None:
    seq = decoding(100, 5.0)
    child = seq.fork(key=2, sample_index=1)
    record_token(seq, 6.0)
    record_token(child, 7.0)
    assert seq.due_s == child.due_s == pytest.approx(5.0 + 2 * SLO_TARGET_SHARE * SLO_S)


def test_only_a_share_of_the_mean_length_is_expected_of_a_response_that_may_end_early() -> None:
    expected = limit_s([decoding(1000, 0.0, ignore_eos=False)], 0.0, 0.004, mean_output_tokens=400)
    assert expected == pytest.approx(0.004 + SLACK_SHARE_PER_STEP * EXPECTED_OUTPUT_SHARE * 400 * 0.005)
    unknown = limit_s([decoding(1000, 0.0, ignore_eos=False)], 0.0, 0.004)
    assert unknown == limit_s([decoding(1, 0.0)], 0.0, 0.004)


def test_smallest_slack_decides_unless_that_sequence_has_missed_its_slo() -> None:
    tight, loose, hopeless = decoding(1, 0.0), decoding(100, 0.0), decoding(5, -10.0)
    assert limit_s([loose, tight], 0.0, 0.004) == limit_s([tight], 0.0, 0.004)
    assert limit_s([loose, hopeless], 0.0, 0.004) == limit_s([loose], 0.0, 0.004)
    assert limit_s([hopeless], 0.0, 0.004) == 0.0, "only the stall-free rule applies"


def test_sequence_that_can_just_meet_its_slo_is_not_delayed() -> None:
    """It has 14 gaps in all, so the SLO allows 14 ms beyond the target of 126 ms. Its last five tokens take
    20 ms."""
    loose = decoding(100, 0.0, num_tokens=20)
    just, hopeless = (limit_s([decoding(5, 0.0, num_tokens=10), loose], now_s, 0.004) for now_s in (0.119, 0.121))
    assert just == 0.0
    assert hopeless == limit_s([loose], 0.121, 0.004) > 0.0


def test_late_sequence_with_many_tokens_left_is_not_given_up() -> None:
    """At 6 ms a token it recovers 3 ms with each, so it must not be delayed further."""
    late, loose = decoding(500, -0.02, ignore_eos=False), decoding(500, 0.0)
    assert limit_s([loose], 0.0, 0.006) > 0.1
    assert limit_s([late, loose], 0.0, 0.006) == 0.0


def test_tokens_beyond_max_model_len_recover_nothing() -> None:
    assert limit_s([decoding(1000, 0.0)], 0.0, 0.004, max_model_len=30) == limit_s([decoding(21, 0.0)], 0.0, 0.004)


def test_slo_limit_is_zero_if_a_sequence_has_no_slo() -> None:
    assert limit_s([decoding(100, 0.0), decoding(100, 0.0, slo_s=0.0)], 0.0, 0.004) == 0.0
    assert limit_s([], 0.0, 0.004) == 0.0


@given(
    decode_s=st.floats(0.001, 0.008),
    times=st.floats(1.0, 1.8),
    num_tokens=st.integers(2, 300),
    wants=st.lists(st.booleans(), min_size=300, max_size=300),
)
def test_response_meets_its_slo_if_every_step_keeps_the_limit(
    decode_s: float, times: float, num_tokens: int, wants: list[bool]
) -> None:
    """Each step with prefill takes all that it may, and at least the baseline. The last one may be too
    many."""
    baseline_s = min(times * decode_s, SLO_TARGET_SHARE * SLO_S)
    seq, now_s = decoding(num_tokens - 1, 0.0), 0.0
    for token in range(num_tokens - 1):
        allowed_s = limit_s([seq], now_s, decode_s, baseline_s=baseline_s)
        assert allowed_s > decode_s or token, "there is slack at first"
        now_s += max(baseline_s, allowed_s) if wants[token] else decode_s
        record_token(seq, now_s)
        seq.append(token)
    assert now_s <= SLO_TARGET_SHARE * SLO_S * (num_tokens - 1) + (baseline_s - decode_s) + 1e-9


@given(
    decode_s=st.floats(0.001, 0.005),
    num_tokens=st.integers(2, 300),
    queued_s=st.lists(st.just(0.0) | st.floats(0.001, 0.03), min_size=300, max_size=300),
)
def test_queue_delays_a_response_by_no_more_than_the_time_it_takes_beyond_the_limit(
    decode_s: float, num_tokens: int, queued_s: list[float]
) -> None:
    """Steps grow with the queue by `stall_free_step_s`, whatever the SLO. Used slack is recovered all the
    same."""
    baseline_s = STALL_FACTOR * decode_s
    seq, now_s, beyond_s = decoding(num_tokens - 1, 0.0), 0.0, 0.0
    for token in range(num_tokens - 1):
        may_s = max(baseline_s, limit_s([seq], now_s, decode_s, baseline_s=baseline_s))
        beyond_s += max(0.0, queued_s[token] - may_s)
        now_s += max(may_s, queued_s[token])
        record_token(seq, now_s)
        seq.append(token)
    assert now_s <= SLO_TARGET_SHARE * SLO_S * (num_tokens - 1) + (baseline_s - decode_s) + beyond_s + 1e-9


def test_prompt_is_computed_in_one_step_if_decodes_have_slack() -> None:
    def largest_part(tpot_slo_s: float) -> int:
        rig = EngineRig(
            max_num_batched_tokens=512,
            num_blocks=400,
            max_model_len=1000,
            step_costs=lambda: COSTS,
            clock=lambda: 100.0,
        )
        rig.add(sequence_request(1, range(10), max_tokens=200, sampling={"ignore_eos": True}, tpot_slo_s=tpot_slo_s))
        rig.step()
        assert (rig.engine.next_step_budget().slo_step_s > 0.05) == bool(tpot_slo_s)
        rig.add(sequence_request(9, range(20, 520), max_tokens=2))
        return max(part.num_scheduled_tokens for part in rig.step().sequences)

    assert largest_part(0.01) == 500
    assert largest_part(0.0) <= 60


def test_longer_queue_never_makes_the_budget_smaller() -> None:
    """A long queue raises the stall-free limit above what the SLO slack allows."""
    rig = EngineRig(
        max_num_batched_tokens=512, num_blocks=600, max_model_len=1000, step_costs=lambda: COSTS, clock=lambda: 100.0
    )
    for seq_id in range(2):
        rig.add(sequence_request(seq_id, range(10), max_tokens=60, sampling={"ignore_eos": True}, tpot_slo_s=0.01))
    rig.step()
    budgets = []
    for seq_id in range(9, 29):
        rig.add(sequence_request(seq_id, range(20, 520), max_tokens=2))
        budgets.append(rig.engine.next_step_budget().num_tokens)
    assert budgets == sorted(budgets)
    assert 100 < budgets[0] < budgets[-1], "slack allows more than the baseline, and a long queue more than slack"
