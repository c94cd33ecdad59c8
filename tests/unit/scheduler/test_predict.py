"""Predictions compared with the steps that the engine would run."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_cost import StepCostModel, StepWork
from baton.engine.scheduling.step_budget import MixedStep
from baton.scheduler.prediction.predict import longest_mixed_step_s, prefill_s
from baton.scheduler.state.worker_table import worker_table_of
from tests.unit.scheduler.measured_workers import COSTS, decoding, measured, queued, seen

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
