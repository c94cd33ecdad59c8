"""Predictions compared with the steps that the engine would run."""

from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.cluster.cluster_snapshot import WorkerView
from baton.core.request import Slo
from baton.core.step_cost import StepCostModel, attended_tokens
from baton.core.step_targets import PLANNED_SHARE
from baton.scheduler.prediction.predict import first_token, full_part, prompt_of, tpot_now_s, tpot_s
from baton.scheduler.state.worker_data import WorkerRow
from baton.scheduler.state.worker_row import MAX_PREFILL_SHARE
from baton.scheduler.state.worker_table import worker_table_of
from baton.worker.costs.step_cost_keeper import work_of
from tests.builders import sequence_request
from tests.engine_rig import EngineRig
from tests.scale import sized
from tests.unit.scheduler.measured_workers import COSTS, decoding, measured, queued, random_cluster, seen
from tests.unit.scheduler.policy_cases import asked

CHUNK, BLOCK = 512, 16


def engine_times_s(
    costs: StepCostModel, num_answers: int, num_queued: int, num_tokens: int, answer_tokens: int
) -> tuple[float, float]:
    """Run an engine: answers begin, then `num_queued` prompts arrive and one of `num_tokens` tokens.

    Returns (seconds until the queued prompts are computed, seconds after that until the new one is).
    """
    now_s = 0.0
    rig = EngineRig(
        num_blocks=4_000,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=64,
        max_model_len=8_000,
        block_size_tokens=BLOCK,
        step_costs=lambda: costs,
        clock=lambda: now_s,
    )

    def add(seq_id: int, length: int, max_tokens: int) -> None:
        tokens = range(10_000 * seq_id, 10_000 * seq_id + length)
        sampling = {"ignore_eos": True}
        rig.add(sequence_request(seq_id, tokens, max_tokens=max_tokens, sampling=sampling, block_size_tokens=BLOCK))

    def step() -> None:
        nonlocal now_s
        plan = rig.plan()
        now_s += costs.step_seconds(work_of(plan))
        rig.apply(plan)

    for seq_id in range(1, num_answers + 1):
        add(seq_id, 32, answer_tokens)
    while len(rig.outputs) < num_answers:
        step()
    began_s, done_s = now_s, []
    for seq_id in range(100, 101 + num_queued):
        add(seq_id, num_tokens, 1)
    for seq_id in range(100, 101 + num_queued):
        while (seq_id, 0) not in rig.outputs:
            step()
        done_s.append(now_s)
    queued_s = done_s[-2] - began_s if num_queued else 0.0
    return queued_s, done_s[-1] - began_s - queued_s


@pytest.mark.parametrize("num_queued", [0, 3])
@pytest.mark.parametrize(
    ("num_answers", "mixed_factor"), sized([(0, 1.0), (3, 1.2)], [(0, 1.0), (1, 1.0), (3, 1.0), (3, 1.2)])
)
def test_predicted_ttft_matches_the_engine(num_answers: int, num_queued: int, mixed_factor: float) -> None:
    """The engine keeps the target of each answer, the prediction that of mean ones."""
    num_tokens, answer_tokens = 1_500, 100
    costs = replace(COSTS, mixed_factor=mixed_factor, decode_seq_s=2e-4)
    queue_s, prefill_s = engine_times_s(costs, num_answers, num_queued, num_tokens, answer_tokens)
    report = measured(
        "h",
        "hybrid",
        costs=costs,
        mean_output_tokens=float(answer_tokens),
        waiting_prefill_tokens=num_queued * num_tokens,
        waiting_prefill_attended_tokens=num_queued * attended_tokens(num_tokens, 0),
        **decoding(num_answers, 32),
    )
    row = worker_table_of(seen(report)).row(0)
    first = first_token(row, asked(num_tokens), 0.0)
    predicted_s = first.queue_s + first.prefill_s(row, num_tokens, 0.0)
    tolerance = 0.3 if mixed_factor == 1.0 else 0.6  # answers of various ages have less to spare than mean ones
    assert predicted_s == pytest.approx(queue_s + prefill_s, rel=tolerance)


def test_share_of_prompts_falls_with_decodes_and_with_the_queue() -> None:
    """The more prompts, the less of their time is what answers can spare at once."""

    def share_of(num_tokens: int = 8_000, role: str = "hybrid", **report: Any) -> float:
        row = worker_table_of(seen(measured("w", role, **report))).row(0)
        return first_token(row, asked(num_tokens), 0.0).share

    assert share_of() == share_of(role="prefill", **queued(9_000, 4)) == 1.0, "nothing decodes there"
    few, many = share_of(**decoding(1)), share_of(**decoding(5))
    assert 0.2 < many < few < 1.0
    assert share_of(waiting_prefill_tokens=4_000, **decoding(1)) < few
    assert share_of(target_step_s=1.4 * COSTS.decode_step_s(1, 500), **decoding(1)) < few
    assert share_of(tpot_target_factor=2.0, **decoding(1)) < few
    assert share_of(400, **decoding(1)) == 1.0, "100 tokens can spare 40 ms"


def test_wait_before_placement_leaves_less_of_the_target() -> None:
    """The wait at the gateway and at the scheduler counts, but not for a retry after tokens."""
    row = worker_table_of(seen(measured("h", "hybrid", **decoding(4)))).row(0)
    fresh, waited, again = (
        first_token(row, asked(2_000, waited_s=waited_s, num_output_tokens=num_outputs), 0.0)
        for waited_s, num_outputs in ((0.0, 0), (0.6, 0), (0.6, 5))
    )
    assert fresh.target_s == again.target_s
    assert waited.target_s == pytest.approx(fresh.target_s - 0.6)


def slo_share(ttft_s: float | None, tpot_slo_s: float | None = None, num_decoding: int = 4) -> float:
    """Return the share of a prompt of 4,000 tokens at a worker where sequences of 500 tokens decode."""
    view = WorkerView(report=measured("h", "hybrid", **decoding(num_decoding)), tpot_slo_s=tpot_slo_s)
    row = worker_table_of(seen(view)).row(0)
    return first_token(row, asked(4_000, slo=Slo(ttft_s=ttft_s)), 0.0).share


def test_ttft_slo_has_precedence_over_derived_tpot_targets_only() -> None:
    """The prompt takes 0.42 s alone. By their derived targets, 4 answers leave it 0.64 of the step time."""
    compute_s = 4_000 * COSTS.prefill_token_s + attended_tokens(4_000, 0) * COSTS.prefill_attended_s
    step_s = COSTS.decode_step_s(4, 2_000)
    assert slo_share(0.65) == pytest.approx(compute_s / (PLANNED_SHARE * 0.65))
    assert slo_share(0.3) == pytest.approx(0.64, abs=0.01), "it is late in any case"
    assert slo_share(0.65, 1.05 * step_s / PLANNED_SHARE) == pytest.approx(0.05 / 1.05, abs=0.005)


def test_loose_tpot_slo_takes_the_place_of_the_derived_target() -> None:
    """Steps of 8 answers take 6.4 ms. By derived targets they may take 6.9 ms."""
    assert slo_share(None, num_decoding=8) < 0.1
    assert slo_share(None, 0.06, num_decoding=8) > 0.2


@given(
    seed=st.integers(0, 1_000_000),
    num_tokens=st.integers(1, 6_000),
    waited_s=st.floats(0, 5),
    ttft_s=st.sampled_from([None, 0.2, 2.0]),
)
@settings(max_examples=50)
def test_first_token_of_all_workers_at_once_equals_that_of_each(
    seed: int, num_tokens: int, waited_s: float, ttft_s: float | None
) -> None:
    table = worker_table_of(random_cluster(Random(seed)))
    query, cached = asked(num_tokens, waited_s=waited_s, slo=Slo(ttft_s=ttft_s)), 0.0
    together = first_token(table, query, cached)
    for i in range(len(table.views)):
        alone = first_token(table.row(i), query, cached)
        assert together.share.item(i) == pytest.approx(alone.share)
        assert together.queue_s.item(i) == pytest.approx(alone.queue_s)


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


def late_share(num_queued: int, waited_s: float = 0.0, **changes: object) -> float:
    """Return the predicted share of full steps of a worker with 8 decodes and queued prompts of 500."""
    queue = {"waiting_prefill_tokens": 500 * num_queued, "waiting_seqs": num_queued}
    table = worker_table_of(seen(measured("h", "hybrid", **decoding(8), **queue, **changes)))
    return full_part(table.row(0), prompt_of(asked(500, waited_s=waited_s), {}, table))


def test_steps_are_predicted_full_once_most_requests_are_late() -> None:
    shares = [late_share(count) for count in (0, 4, 10, 20, 40, 80, 160)]
    assert shares == sorted(shares)
    assert shares[:2] == [0.0, 0.0]
    assert shares[-1] > 0.9
    assert late_share(4, waited_s=5.0) > late_share(4, waited_s=1.0) > 0, "they have waited at the scheduler before"
    assert late_share(40, ttft_target_factor=1000.0, tpot_target_factor=3.0) == 0.0, "none is late"


def test_full_steps_make_tpot_as_long_as_their_largest_chunk() -> None:
    queue = {"waiting_prefill_tokens": 160 * 500, "waiting_seqs": 1, "mean_output_tokens": 1e6}
    decode_s = COSTS.decode_step_s(10, 10 * 500)
    chunk_s = (CHUNK - 8) * (COSTS.prefill_token_s + COSTS.prefill_attended_s * 250)
    assert tpots_s(0.0, 20.0, **queue)[0] == pytest.approx(decode_s + chunk_s, rel=0.02)
    slow = WorkerView(report=measured("h", "hybrid", **decoding(8), **queue), tpot_slo_s=4 * decode_s)
    table = worker_table_of(seen(slow))
    prompt = prompt_of(asked(500), {}, table)
    assert tpot_s(table.row(0), prompt, 60.0) == pytest.approx(PLANNED_SHARE * 4 * decode_s, rel=0.02), (
        "an SLO limits it"
    )


def test_drafts_give_more_tokens_in_the_same_time() -> None:
    plain, faster = tpots_s(0.3), tpots_s(0.3, tokens_per_step=1.5)
    assert faster == pytest.approx([one / 1.5 for one in plain])
    assert tpots_s(0.3, tokens_per_step=0.0) == plain == tpots_s(0.3, tokens_per_step=0.5)


@pytest.mark.parametrize("tokens", [1.0, 1.25])
def test_queued_prompts_delay_an_answer_as_much_with_drafts_as_without(tokens: float) -> None:
    """Their time is spread over the 100 tokens of the answer, however few steps these need."""
    never_late = {"ttft_target_factor": 1e6, "tpot_target_factor": 3.0}
    report = measured("h", "hybrid", tokens_per_step=tokens, **decoding(8), **queued(10_000), **never_late)
    table = worker_table_of(seen(report))
    row, prompt = table.row(0), prompt_of(asked(500), {}, table)
    decode_s = COSTS.decode_step_s(10, 10 * 500)
    assert tpot_s(row, prompt, 0.0) == pytest.approx(decode_s / tokens + row.derived.queue_s / 100, rel=0.01)


def test_drafts_leave_more_of_the_step_time_to_prompts() -> None:
    """At 12 answers a step takes longer than the target of one token, but not than that of two."""

    def row_of(num_decoding: int, tokens: float) -> WorkerRow:
        report = measured("h", "hybrid", tokens_per_step=tokens, **decoding(num_decoding))
        return worker_table_of(seen(report)).row(0)

    longest_s = 2 * PLANNED_SHARE * 3 * COSTS.decode_step_s(1, 500)
    assert [row_of(12, tokens).derived.longest_step_s for tokens in (1.0, 2.0)] == [inf, pytest.approx(longest_s)]
    few, many = (first_token(row_of(4, tokens), asked(8_000), 0.0).share for tokens in (1.0, 2.0))
    assert few < many


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
