"""Predictions compared with the steps that the engine would run."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_cost import MAX_PREFILL_SHARE, StepCostModel, StepWork
from baton.engine.scheduling.step_budget import MixedStep
from baton.scheduler.prediction.predict import longest_mixed_step_s, prefill_s, prompt_of, tpot_now_s, tpot_s
from baton.scheduler.state.worker_table import worker_table_of
from tests.unit.scheduler.measured_workers import COSTS, decoding, measured, queued, random_cluster, seen
from tests.unit.scheduler.policy_cases import asked

CHUNK, BLOCK = 512, 16


def steps_of(num_tokens: int, contexts: list[int], limit_s: float, costs: StepCostModel) -> list[float]:
    """Return the seconds of each engine step that computes a chunk of the prompt."""
    done, took_s = 0, []
    while done < num_tokens:
        left = num_tokens - done
        most = CHUNK - len(contexts)
        if contexts:
            most = MixedStep.of(costs, contexts, [(left, done)]).max_prefill_tokens(
                limit_s, done, at_most=most, at_least=BLOCK
            )
        part = min(left, most)
        took_s.append(costs.step_seconds(StepWork.of([(part, done)], contexts)))
        done += part
    return took_s


@given(
    num_tokens=st.integers(64, 6_000),
    seqs=st.integers(0, 40),
    limit_s=st.sampled_from([0.0, 0.02, 0.05, 0.2]),
    mixed_factor=st.sampled_from([1.0, 1.3, 2.5]),
    decode_factor=st.sampled_from([0.5, 1.0]),
)
def test_predicted_prefill_matches_the_engine_steps_shared_with_decodes(
    num_tokens: int, seqs: int, limit_s: float, mixed_factor: float, decode_factor: float
) -> None:
    costs = replace(COSTS, mixed_factor=mixed_factor, decode_factor=decode_factor)
    row = worker_table_of(seen(measured("d", "decode", slo_step_s=limit_s, costs=costs, **decoding(seqs)))).row(0)
    steps = steps_of(num_tokens, [500] * seqs, limit_s, costs)
    assert prefill_s(row, num_tokens, 0.0) == pytest.approx(sum(steps), rel=0.15, abs=2 * row.derived.mixed_step_s)
    assert longest_mixed_step_s(row, num_tokens, 0.0) == pytest.approx(max(steps), rel=0.15)


def test_joining_sequences_raise_the_prefill_share_and_prefill_workers_have_no_limit() -> None:
    """Prompts that wait at a prefill worker never decode there."""
    d, p = measured("d", "decode", **decoding(1)), measured("p", "prefill", **queued(3000, 5))
    alone, crowded = (
        worker_table_of(seen(d)).row(0),
        worker_table_of(seen(measured("d", "decode", waiting_seqs=20, **decoding(1)))).row(0),
    )
    assert crowded.derived.prefill_share_s > 2 * alone.derived.prefill_share_s, (
        "a step with more decoding sequences may take longer"
    )
    assert worker_table_of(seen(p)).row(0).derived.prefill_share_s == float("inf")


def tpots_s(share: float, horizon_s: float = 0.0, **changes: object) -> tuple[float, float]:
    """Return (TPOT in `horizon_s`, TPOT now) of a request on a hybrid worker where 8 sequences decode."""
    table = worker_table_of(seen(measured("h", "hybrid", recent_prefill_share=share, **decoding(8), **changes)))
    prompt = prompt_of(asked(500), {}, table)
    return tpot_s(table.row(0), prompt, horizon_s), tpot_now_s(table.row(0), prompt)


def test_tpot_is_as_long_as_the_recent_prefill_share_makes_it() -> None:
    """If prompts take 60 % of the step time, a token comes every 2.5 decode steps."""
    decode_s = COSTS.decode_step_s(9, 8 * 500 + 500)
    assert tpots_s(0.0) == pytest.approx((decode_s, decode_s))
    assert tpots_s(0.6) == pytest.approx((2.5 * decode_s, 2.5 * decode_s))
    longest_s = decode_s / (1 - MAX_PREFILL_SHARE)
    assert tpots_s(1.0) == pytest.approx((longest_s, longest_s)), "decodes always get a part of the step time"


def test_queued_prompts_are_part_of_the_recent_prefill_share() -> None:
    """10,000 queued tokens take 1 s, which is 10 ms for each of 100 tokens.

    That is more than a share of 0.5 and less than one of 0.9.
    """
    queue, computed = queued(10_000), queued(0)
    decode_s, queued_s = tpots_s(0.0, **computed)[0], tpots_s(0.0, **queue)[0]
    assert queued_s > decode_s + 0.009
    assert tpots_s(0.5, **queue)[0] == pytest.approx(queued_s)
    assert tpots_s(0.9, **queue)[0] == pytest.approx(10 * decode_s)


def test_sequences_end_later_if_prompts_delay_them() -> None:
    """So fewer of them have ended when the prompt of a new request is computed."""
    drains_s = [
        worker_table_of(seen(measured("h", "hybrid", recent_prefill_share=share, **decoding(8))))
        .row(0)
        .derived.decode_drain_s
        for share in (0.0, 0.75)
    ]
    assert drains_s[1] == pytest.approx(4 * drains_s[0])
    assert tpots_s(0.75, horizon_s=1.0)[0] > 4 * tpots_s(0.0, horizon_s=1.0)[0]


@given(seed=st.integers(0, 1_000_000), horizon_s=st.floats(0, 10))
def test_tpot_of_all_workers_at_once_equals_that_of_each(seed: int, horizon_s: float) -> None:
    table = worker_table_of(random_cluster(Random(seed)))
    prompt = prompt_of(asked(500), {}, table)
    of_each = [tpot_s(table.row(i), prompt, horizon_s) for i in range(len(table.views))]
    assert tpot_s(table, prompt, horizon_s).tolist() == pytest.approx(of_each)
