"""The engine step by step. The fake device checks every slot that a step attends to."""

import pytest

from baton.core.errors import ConfigError
from baton.core.request import FinishReason
from baton.core.step_cost import attended_tokens
from baton.engine.state.outcome import MEAN_OVER_SAMPLES
from baton.engine.state.step import StepPlan
from tests.builders import hashes_of, sequence_request
from tests.engine_rig import EngineRig


def scheduled(plan: StepPlan) -> list[int]:
    """Return the scheduled tokens of each sequence of a plan."""
    return [part.num_scheduled_tokens for part in plan.sequences]


def test_inconsistent_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        EngineRig(max_num_batched_tokens=4, max_num_seqs=5)
    with pytest.raises(ConfigError, match="max_model_len"):
        EngineRig(max_model_len=0)


# -- steps ---------------------------------------------------------------------------------------------------
# ---------------------------


def test_prompt_is_computed_in_chunks_then_one_token_per_step() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    request = rig.add(sequence_request(tokens=range(10, 30), max_tokens=3))
    plans = [rig.step() for _ in range(5)]
    assert [scheduled(plan) for plan in plans] == [[8], [8], [4], [1], [1]]
    assert [plan.sequences[0].sample is not None for plan in plans] == [False, False, True, True, True]
    assert [plan.sequences[0].position_begin for plan in plans] == [0, 8, 16, 20, 21]
    assert rig.step().is_empty
    rig.assert_answered(request)
    rig.assert_clean()


def test_decodes_continue_during_prefill() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    first = rig.add(sequence_request(1, range(10, 14), max_tokens=10))
    rig.step()
    second = rig.add(sequence_request(2, range(20, 40)))
    assert [scheduled(rig.step()) for _ in range(3)] == [[1, 7], [1, 7], [1, 6]]
    assert scheduled(rig.step()) == [1, 1]
    rig.run()
    rig.assert_answered(first, second)


def test_step_can_contain_several_prompts() -> None:
    rig = EngineRig(max_num_batched_tokens=32)
    requests = [rig.add(sequence_request(i, range(i * 10, i * 10 + 6))) for i in range(1, 4)]
    assert scheduled(rig.step()) == [6, 6, 6]
    rig.run()
    rig.assert_answered(*requests)


def test_output_index_counts_over_attempts() -> None:
    rig = EngineRig()
    whole = sequence_request(1, (5, 6, 7), max_tokens=8, sampling={"ignore_eos": True})
    answer, finish = rig.expected(whole, 0)
    again = rig.add(
        sequence_request(2, [5, 6, 7, *answer[:5]], num_prompt_tokens=3, max_tokens=8, sampling={"ignore_eos": True})
    )
    rig.run()
    assert [output.output_index for output in rig.all_outputs] == [5, 6, 7]
    assert (rig.outputs[2, 0], rig.ends[2, 0]) == (answer[5:], finish)
    rig.assert_answered(again)


def test_min_tokens_bans_end_tokens_until_reached() -> None:
    rig = EngineRig(eos_token_ids=(3,))
    rig.add(sequence_request(tokens=range(10), max_tokens=4, sampling={"min_tokens": 2, "stop_token_ids": (8,)}))
    samples = [part.sample for _ in range(3) for part in rig.step().sequences]
    assert [sample.banned_token_ids for sample in samples if sample] == [(3, 8), (3, 8), ()]


def test_at_most_max_num_seqs_run() -> None:
    rig = EngineRig(max_num_seqs=2)
    requests = [rig.add(sequence_request(i, range(i, i + 5), max_tokens=4)) for i in range(5)]
    assert len(rig.step().sequences) == 2
    assert (rig.engine.running_seqs, rig.engine.waiting_seqs) == (2, 3)
    rig.run()
    rig.assert_answered(*requests)


def test_requests_run_by_priority_then_arrival() -> None:
    rig = EngineRig(max_num_seqs=1)
    for seq_id, priority in ((1, 0), (2, 1), (3, -1), (4, 0)):
        rig.add(sequence_request(seq_id, range(seq_id, seq_id + 5), max_tokens=1, priority=priority))
    rig.run()
    assert [output.seq_id for output in rig.all_outputs] == [3, 1, 4, 2]


# -- prefix cache --------------------------------------------------------------------------------------------
# ---------------------------


@pytest.mark.parametrize(("num_tokens", "num_cached_blocks"), [(4, 0), (7, 1), (8, 1), (9, 2), (12, 2)])
def test_cached_prompt_computes_at_least_one_token(num_tokens: int, num_cached_blocks: int) -> None:
    rig = EngineRig()
    requests = []
    for seq_id in (1, 2):
        requests.append(rig.add(sequence_request(seq_id, range(10, 10 + num_tokens), max_tokens=2)))
        rig.run()
    assert rig.admissions[2].num_cached_blocks == num_cached_blocks
    assert {output.num_cached_tokens for output in rig.all_outputs if output.seq_id == 2} == {4 * num_cached_blocks}
    assert rig.engine.counters.cached_tokens == 4 * num_cached_blocks
    rig.assert_answered(*requests)


def test_output_blocks_are_cached_under_the_hash_chain_of_a_prompt() -> None:
    rig = EngineRig()
    first = rig.add(sequence_request(1, (10, 11, 12), max_tokens=10, sampling={"ignore_eos": True}))
    rig.run()
    tokens = [10, 11, 12, *rig.outputs[1, 0]]
    assert set(rig.pool.hashes()) == set(hashes_of(tokens[:-1]))  # the KV of the last token is never computed
    second = rig.add(sequence_request(2, [*tokens, 9], max_tokens=2))
    rig.run()
    assert rig.admissions[2].num_cached_blocks == 3
    rig.assert_answered(first, second)


def test_block_is_shared_only_after_its_step_has_ended() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.add(sequence_request(tokens=range(10, 30)))
    plan = rig.plan()
    assert rig.pool.hashes() == []
    rig.apply(plan)
    assert tuple(rig.pool.hashes()) == hashes_of(range(10, 18))


def test_running_sequences_share_prefix_blocks() -> None:
    rig = EngineRig()
    first = rig.add(sequence_request(1, range(10, 22), max_tokens=6))
    rig.step()
    second = rig.add(sequence_request(2, [*range(10, 18), 40, 41], max_tokens=6))
    rig.step()
    assert rig.admissions[2].block_table[:2] == rig.admissions[1].block_table[:2]
    rig.run()
    rig.assert_answered(first, second)
    rig.assert_clean()


# -- samples -------------------------------------------------------------------------------------------------
# ---------------------------


def test_samples_share_prompt_blocks_and_copy_the_partial_one() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10, 16), sample_indices=(0, 1, 2), sampling={"ignore_eos": True}))
    prompt = rig.step()
    assert scheduled(prompt) == [6]
    first = rig.step()
    assert len(first.block_copies) == 2
    assert len({source for source, _ in first.block_copies}) == 1
    assert len({part.block_table[0] for part in first.sequences}) == 1
    assert len({part.block_table[1] for part in first.sequences}) == 3
    assert not rig.step().block_copies
    rig.run()
    rig.assert_answered(request)
    rig.assert_clean()


def test_full_last_block_is_not_copied() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10, 18), sample_indices=(0, 1), sampling={"ignore_eos": True}))
    rig.run()
    assert rig.engine.counters.block_copies == 0
    rig.assert_answered(request)


def test_sample_that_ends_with_its_first_token_does_not_fork() -> None:
    rig = EngineRig()
    request = sequence_request(tokens=range(10, 16), sample_indices=(0, 1))
    first = rig.expected(request, 0)[0][0]
    request = rig.add(
        sequence_request(tokens=range(10, 16), sample_indices=(0, 1), sampling={"stop_token_ids": (first,)})
    )
    rig.step()
    assert (rig.ends, rig.engine.running_seqs) == ({(1, 0): FinishReason.STOP}, 1)
    rig.run()
    assert rig.engine.counters.block_copies == 0
    rig.assert_answered(request)


def test_samples_reserve_slots_before_they_fork() -> None:
    rig = EngineRig(max_num_seqs=3)
    two = [rig.add(sequence_request(i, range(i, i + 5), sample_indices=(0, 1))) for i in (1, 2)]
    assert len(rig.step().sequences) == 1
    rig.run()
    rig.assert_answered(*two)


def test_samples_without_blocks_to_fork_are_preempted_and_computed_later() -> None:
    rig = EngineRig(num_blocks=4)
    request = rig.add(
        sequence_request(tokens=range(10, 20), max_tokens=6, sample_indices=(0, 1, 2), sampling={"ignore_eos": True})
    )
    rig.run()
    assert rig.engine.counters.preemptions > 0
    rig.assert_answered(request)
    rig.assert_clean()


# -- counts --------------------------------------------------------------------------------------------------
# ---------------------------


def test_mean_output_length_follows_recent_samples() -> None:
    rig = EngineRig()
    counters = rig.engine.counters
    rig.add(sequence_request(1, range(10, 30), max_tokens=9, prefill_only=True))
    rig.add(sequence_request(2, range(30, 40), max_tokens=3))
    rig.add(sequence_request(3, range(50, 60), max_tokens=5, sample_indices=(0, 1)))
    rig.run()
    assert (counters.ended_samples, counters.mean_output_tokens) == (3, pytest.approx((3 + 5 + 5) / 3))
    for _ in range(20 * MEAN_OVER_SAMPLES):
        counters.sample_ended(100)
    assert counters.mean_output_tokens == pytest.approx(100, rel=1e-6)


def test_counts_for_worker_reports() -> None:
    rig = EngineRig(max_num_batched_tokens=8, max_num_seqs=3)
    rig.add(sequence_request(1, range(10, 30)))
    rig.add(sequence_request(2, range(30, 40), pulled=True))
    rig.add(sequence_request(3, range(50, 60)))
    engine = rig.engine
    assert (engine.waiting_seqs, engine.running_seqs, engine.waiting_prefill_tokens) == (3, 0, 30)
    rig.step()
    assert (engine.waiting_seqs, engine.running_seqs) == (1, 2)
    assert (engine.waiting_prefill_tokens, engine.running_context_tokens) == (12 + 10, 8 + 10)
    assert engine.waiting_prefill_attended_tokens == attended_tokens(12, 8) + attended_tokens(10, 0)


def test_shared_prefix_of_queued_prompts_is_counted_once() -> None:
    rig = EngineRig(max_num_batched_tokens=8, max_num_seqs=3)
    block = rig.engine.config.block_size_tokens
    first, more = range(10, 10 + 5 * block), range(10, 10 + 6 * block)
    rig.add(sequence_request(1, first))
    rig.add(sequence_request(2, more))
    rig.add(sequence_request(3, first))
    waiting = rig.engine.waiting_prefill_tokens
    assert waiting == 5 * block + block + block, "the last block of a fully shared prompt is computed again"
    assert rig.engine.waiting_prefill_attended_tokens == (
        attended_tokens(5 * block, 0) + attended_tokens(block, 5 * block) + attended_tokens(block, 4 * block)
    )
    rig.engine.cancel(1)
    rig.engine.cancel(2)
    rig.engine.cancel(3)
    assert len(rig.engine.queued_prefix) == 0
    rig.add(sequence_request(4, first))
    assert rig.engine.waiting_prefill_tokens == 5 * block, "no queued prompt shares it any more"
