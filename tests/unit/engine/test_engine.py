"""What one engine does with requests, a step at a time. The fake device checks every slot that a step attends to."""

from typing import Any

import pytest

from baton.core.costs import attended_tokens
from baton.core.errors import Code, ConfigError, Failure, Reason, Refused
from baton.core.request import FinishReason
from baton.engine.outcome import MEAN_OVER_SAMPLES
from baton.engine.step import SampledToken, StepPlan
from tests.builders import hashes_of, sequence_request
from tests.engine_rig import EngineRig

FAILURE = Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message="injected")


def scheduled(plan: StepPlan) -> list[int]:
    """Tokens of each sequence of a plan."""
    return [part.num_scheduled_tokens for part in plan.sequences]


def test_config_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        EngineRig(max_num_batched_tokens=4, max_num_seqs=5)
    with pytest.raises(ConfigError, match="max_model_len"):
        EngineRig(max_model_len=0)


# -- steps ------------------------------------------------------------------------------------------------------------------------------


def test_a_prompt_in_chunks_then_a_token_a_step() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    request = rig.add(sequence_request(tokens=range(10, 30), max_tokens=3))
    plans = [rig.step() for _ in range(5)]
    assert [scheduled(plan) for plan in plans] == [[8], [8], [4], [1], [1]]
    assert [plan.sequences[0].sample is not None for plan in plans] == [False, False, True, True, True]
    assert [plan.sequences[0].position_begin for plan in plans] == [0, 8, 16, 20, 21]
    assert rig.step().is_empty
    rig.assert_answered(request)
    rig.assert_clean()


def test_running_sequences_are_carried_while_a_prompt_is_computed() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    first = rig.add(sequence_request(1, range(10, 14), max_tokens=10))
    rig.step()
    second = rig.add(sequence_request(2, range(20, 40)))
    assert [scheduled(rig.step()) for _ in range(3)] == [[1, 7], [1, 7], [1, 6]]
    assert scheduled(rig.step()) == [1, 1]
    rig.run()
    rig.assert_answered(first, second)


def test_several_prompts_share_a_step() -> None:
    rig = EngineRig(max_num_batched_tokens=32)
    requests = [rig.add(sequence_request(i, range(i * 10, i * 10 + 6))) for i in range(1, 4)]
    assert scheduled(rig.step()) == [6, 6, 6]
    rig.run()
    rig.assert_answered(*requests)


def test_output_index_counts_over_attempts() -> None:
    rig = EngineRig()
    whole = sequence_request(1, (5, 6, 7), max_tokens=8, sampling={"ignore_eos": True})
    answer, finish = rig.expected(whole, 0)
    again = rig.add(sequence_request(2, [5, 6, 7, *answer[:5]], num_prompt_tokens=3, max_tokens=8, sampling={"ignore_eos": True}))
    rig.run()
    assert [output.output_index for output in rig.all_outputs] == [5, 6, 7]
    assert (rig.outputs[2, 0], rig.ends[2, 0]) == (answer[5:], finish)
    rig.assert_answered(again)


def test_min_tokens_bans_every_end_of_text_until_then() -> None:
    rig = EngineRig(eos_token_ids=(3,))
    rig.add(sequence_request(tokens=range(10), max_tokens=4, sampling={"min_tokens": 2, "stop_token_ids": (8,)}))
    samples = [part.sample for _ in range(3) for part in rig.step().sequences]
    assert [sample.banned_token_ids for sample in samples if sample] == [(3, 8), (3, 8), ()]


def test_no_more_than_max_num_seqs() -> None:
    rig = EngineRig(max_num_seqs=2)
    requests = [rig.add(sequence_request(i, range(i, i + 5), max_tokens=4)) for i in range(5)]
    assert len(rig.step().sequences) == 2
    assert (rig.engine.running_seqs, rig.engine.waiting_seqs) == (2, 3)
    rig.run()
    rig.assert_answered(*requests)


def test_priority_then_arrival() -> None:
    rig = EngineRig(max_num_seqs=1)
    for seq_id, priority in ((1, 0), (2, 1), (3, -1), (4, 0)):
        rig.add(sequence_request(seq_id, range(seq_id, seq_id + 5), max_tokens=1, priority=priority))
    rig.run()
    assert [output.seq_id for output in rig.all_outputs] == [3, 1, 4, 2]


# -- prefix cache -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_cached_blocks"), [(4, 0), (7, 1), (8, 1), (9, 2), (12, 2)])
def test_a_known_prompt_computes_at_least_one_token(num_tokens: int, num_cached_blocks: int) -> None:
    rig = EngineRig()
    requests = []
    for seq_id in (1, 2):
        requests.append(rig.add(sequence_request(seq_id, range(10, 10 + num_tokens), max_tokens=2)))
        rig.run()
    assert rig.admissions[2].num_cached_blocks == num_cached_blocks
    assert {output.num_cached_tokens for output in rig.all_outputs if output.seq_id == 2} == {4 * num_cached_blocks}
    assert rig.engine.counters.cached_tokens == 4 * num_cached_blocks
    rig.assert_answered(*requests)


def test_outputs_are_cached_under_the_chain_that_a_prompt_would_have() -> None:
    rig = EngineRig()
    first = rig.add(sequence_request(1, (10, 11, 12), max_tokens=10, sampling={"ignore_eos": True}))
    rig.run()
    tokens = [10, 11, 12, *rig.outputs[1, 0]]
    assert set(rig.pool.hashes()) == set(hashes_of(tokens[:-1]))  # the last token was never computed
    second = rig.add(sequence_request(2, [*tokens, 9], max_tokens=2))
    rig.run()
    assert rig.admissions[2].num_cached_blocks == 3
    rig.assert_answered(first, second)


def test_a_block_is_shared_only_when_its_step_has_finished() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.add(sequence_request(tokens=range(10, 30)))
    plan = rig.plan()
    assert rig.pool.hashes() == []
    rig.apply(plan)
    assert tuple(rig.pool.hashes()) == hashes_of(range(10, 18))


def test_a_step_can_use_blocks_that_another_sequence_still_uses() -> None:
    rig = EngineRig()
    first = rig.add(sequence_request(1, range(10, 22), max_tokens=6))
    rig.step()
    second = rig.add(sequence_request(2, [*range(10, 18), 40, 41], max_tokens=6))
    rig.step()
    assert rig.admissions[2].block_table[:2] == rig.admissions[1].block_table[:2]
    rig.run()
    rig.assert_answered(first, second)
    rig.assert_clean()


# -- samples ----------------------------------------------------------------------------------------------------------------------------


def test_samples_share_the_prompt_and_copy_its_tail() -> None:
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


def test_a_full_last_block_is_not_copied() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10, 18), sample_indices=(0, 1), sampling={"ignore_eos": True}))
    rig.run()
    assert rig.engine.counters.block_copies == 0
    rig.assert_answered(request)


def test_a_sample_that_ends_with_its_first_token_has_no_sequence() -> None:
    rig = EngineRig()
    request = sequence_request(tokens=range(10, 16), sample_indices=(0, 1))
    first = rig.expected(request, 0)[0][0]
    request = rig.add(sequence_request(tokens=range(10, 16), sample_indices=(0, 1), sampling={"stop_token_ids": (first,)}))
    rig.step()
    assert (rig.ends, rig.engine.running_seqs) == ({(1, 0): FinishReason.STOP}, 1)
    rig.run()
    assert rig.engine.counters.block_copies == 0
    rig.assert_answered(request)


def test_samples_take_places_before_they_part() -> None:
    rig = EngineRig(max_num_seqs=3)
    two = [rig.add(sequence_request(i, range(i, i + 5), sample_indices=(0, 1))) for i in (1, 2)]
    assert len(rig.step().sequences) == 1
    rig.run()
    rig.assert_answered(*two)


def test_samples_that_find_no_room_to_part_are_computed_later() -> None:
    rig = EngineRig(num_blocks=4)
    request = rig.add(sequence_request(tokens=range(10, 20), max_tokens=6, sample_indices=(0, 1, 2), sampling={"ignore_eos": True}))
    rig.run()
    assert rig.engine.counters.preemptions > 0
    rig.assert_answered(request)
    rig.assert_clean()


# -- memory -----------------------------------------------------------------------------------------------------------------------------


def test_the_youngest_of_the_lowest_priority_is_preempted_and_replayed() -> None:
    rig = EngineRig(num_blocks=8)
    requests = [
        rig.add(sequence_request(i, range(i * 10, i * 10 + 7), max_tokens=6, priority=p, sampling={"ignore_eos": True}))
        for i, p in ((1, 0), (2, 1), (3, 0))
    ]
    rig.step()
    rig.step()
    plan = rig.step()
    assert rig.engine.counters.preemptions == 1
    tables = {part.block_table[0] for part in plan.sequences}
    assert rig.admissions[2].block_table[0] not in tables
    rig.run()
    rig.assert_answered(*requests)
    rig.assert_clean()


def test_a_preempted_sequence_comes_back_from_cache_before_anyone_new() -> None:
    rig = EngineRig(num_blocks=8)
    old = rig.add(sequence_request(1, range(10, 17), max_tokens=12, sampling={"ignore_eos": True}))
    young = rig.add(sequence_request(2, range(20, 37), max_tokens=8, sampling={"ignore_eos": True}))
    rig.run_until(lambda: rig.engine.counters.preemptions > 0)
    new = rig.add(sequence_request(3, range(50, 53), max_tokens=2, priority=-5))
    rig.run_until(lambda: 3 in rig.admissions)
    back = rig.executor.plans[-1].sequences[0]
    assert (back.token_ids[-1], back.kv_begin) == (
        rig.outputs[2, 0][-2],
        12,
    )  # all that it had, but for the two blocks that the old one took
    rig.run()
    rig.assert_answered(old, young, new)


def test_who_does_not_fit_is_not_overtaken() -> None:
    rig = EngineRig(num_blocks=6)
    first = rig.add(sequence_request(1, range(10, 22), max_tokens=4, sampling={"ignore_eos": True}))
    rig.step()
    large, small = rig.add(sequence_request(2, range(30, 46), max_tokens=2)), rig.add(sequence_request(3, (1, 2), max_tokens=2))
    rig.step()
    assert list(rig.admissions) == [1]
    rig.run()
    assert list(rig.admissions) == [1, 2, 3]
    rig.assert_answered(first, large, small)


def test_a_spare_block_is_kept_for_each_running_sequence() -> None:
    rig = EngineRig(num_blocks=5)
    running = rig.add(sequence_request(1, range(10, 17), max_tokens=5, sampling={"ignore_eos": True}))
    rig.step()
    waiting = rig.add(sequence_request(2, range(20, 31), max_tokens=2))
    rig.step()  # 3 blocks are free and 3 are wanted, but one is the other's next
    assert list(rig.admissions) == [1]
    rig.run()
    assert rig.engine.counters.preemptions == 0
    rig.assert_answered(running, waiting)


def test_cached_blocks_that_a_sequence_is_to_use_are_no_room_for_the_rest() -> None:
    rig = EngineRig(num_blocks=5)
    known = rig.add(sequence_request(1, range(20, 33), max_tokens=2))
    rig.run()
    running = rig.add(sequence_request(2, range(10, 13), max_tokens=5, sampling={"ignore_eos": True}))
    rig.step()  # 1 is running, 3 are cached, 1 is free
    again = rig.add(sequence_request(3, range(20, 33), max_tokens=2))
    rig.step()
    assert list(rig.admissions) == [1, 2]  # 3 from cache and 1 new, but that one is spare
    rig.run()
    rig.assert_answered(known, running, again)


def test_landing_waits_for_a_step_that_may_still_write() -> None:
    rig = EngineRig(num_blocks=6)
    rig.add(sequence_request(1, range(20, 29), max_tokens=2))
    rig.run()
    blocks = rig.pool.allocate(4)
    assert blocks is not None
    rig.pool.step_launched()
    rig.pool.unref(blocks)
    pulled = rig.add(sequence_request(2, range(20, 36), pulled=True, max_tokens=2))
    assert rig.step().is_empty
    assert not rig.pool.counts().used
    rig.pool.step_finished()
    rig.step()
    rig.land(pulled)
    rig.engine.landed(2, rig.first_tokens(pulled))
    rig.run()
    rig.assert_answered(pulled)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": range(30), "max_tokens": 12}, Reason.NO_CAPACITY),
        ({"tokens": range(100)}, Reason.CONTEXT_LENGTH_EXCEEDED),
        ({"sample_indices": tuple(range(9))}, Reason.NO_CAPACITY),
        ({"num_prompt_tokens": 0}, Reason.INVALID_REQUEST),
        ({"tokens": range(9), "num_prompt_tokens": 1, "max_tokens": 8}, Reason.INVALID_REQUEST),
    ],
)
def test_what_can_never_run_is_refused_at_once(changes: dict[str, Any], reason: Reason) -> None:
    rig = EngineRig(num_blocks=10, max_model_len=100)
    with pytest.raises(Refused) as refused:
        rig.add(sequence_request(**changes))
    assert refused.value.failure.reason is reason
    assert rig.engine.is_idle


def test_what_just_fits_runs() -> None:
    rig = EngineRig(num_blocks=10)
    request = rig.add(sequence_request(tokens=range(30), max_tokens=11, sampling={"ignore_eos": True}))  # the last token needs no KV
    rig.run()
    rig.assert_answered(request)
    prefill = rig.add(sequence_request(2, range(40), max_tokens=500, prefill_only=True))
    rig.run()
    assert len(rig.outputs[prefill.seq_id, 0]) == 1


def test_a_full_queue_refuses() -> None:
    rig = EngineRig(max_num_seqs=1, max_waiting_seqs=2)
    for seq_id in (1, 2):
        rig.add(sequence_request(seq_id))
    with pytest.raises(Refused) as refused:
        rig.add(sequence_request(3))
    assert (refused.value.failure.reason, refused.value.failure.retriable) == (Reason.QUEUE_FULL, True)
    rig.step()
    rig.add(sequence_request(3))


@pytest.mark.parametrize("changes", [{"seq_id": 1}, {"block_hashes": ()}, {"sample_indices": ()}, {"sample_indices": (1, 1)}])
def test_a_callers_mistake_is_a_value_error(changes: dict[str, Any]) -> None:
    rig = EngineRig()
    rig.add(sequence_request(1))
    with pytest.raises(ValueError, match=r"exists|hashes|sample"):
        rig.add(sequence_request(**{"seq_id": 2, "tokens": range(5), **changes}))


# -- prefill for others -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "for_reader", "ends"),
    [(32, True, [8, 16, 24, 27, 32]), (32, False, [8, 16, 24, 32]), (24, True, [8, 16, 24]), (33, True, [8, 16, 24, 32, 33])],
)
def test_the_last_chunk_of_a_long_prompt_for_a_reader_is_at_most_a_sixth(num_tokens: int, for_reader: bool, ends: list[int]) -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.add(sequence_request(tokens=range(10, 10 + num_tokens), prefill_only=True, for_reader=for_reader))
    rig.run()
    assert [progress.num_computed_tokens for progress in rig.progress] == ends


def test_a_prefill_tells_its_progress_and_ends_with_its_first_token() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    request = rig.add(sequence_request(tokens=range(10, 30), max_tokens=50, prefill_only=True, sample_indices=(0, 1)))
    plan = rig.plan()
    assert len(rig.admissions[1].block_table) == 5  # all blocks before the first chunk
    rig.apply(plan)
    rig.run()
    assert [progress.num_computed_tokens for progress in rig.progress] == [8, 16, 20]
    assert [(o.sample_index, len(o.tokens), o.finish) for o in rig.all_outputs] == [(0, 1, None), (1, 1, None)]
    assert [rig.outputs[1, i] for i in (0, 1)] == [rig.expected(request, i)[0][:1] for i in (0, 1)]
    rig.assert_clean()


def test_a_prefill_says_so_if_the_first_token_is_the_last() -> None:
    rig = EngineRig()
    rig.add(sequence_request(tokens=range(10), max_tokens=1, prefill_only=True))
    rig.run()
    assert rig.ends == {(1, 0): FinishReason.LENGTH}


def test_a_prefill_is_not_preempted() -> None:
    rig = EngineRig(num_blocks=7, max_num_batched_tokens=4, max_num_seqs=4)
    decode = rig.add(sequence_request(1, range(10, 13), max_tokens=20, sampling={"ignore_eos": True}))
    rig.step()
    rig.add(sequence_request(2, range(20, 40), prefill_only=True))
    rig.run_until(lambda: rig.engine.counters.preemptions > 0)
    assert rig.engine.waiting_seqs == 1  # the decode gave way, though it is the older
    rig.run()
    assert len(rig.outputs[2, 0]) == 1
    rig.assert_answered(decode)


def test_no_prefill_for_others_while_they_hold_more_than_half() -> None:
    rig = EngineRig(num_blocks=10)
    rig.add(sequence_request(1, range(10, 34), prefill_only=True, for_reader=True))
    rig.plan()
    rig.pool.pin(rig.admissions[1].block_table)
    rig.engine.cancel(1)
    assert rig.pool.held_for_others == 6
    rig.add(sequence_request(2, (1, 2, 3), prefill_only=True, for_reader=True))
    mine = rig.add(sequence_request(3, (1, 2, 4), max_tokens=3))
    rig.run()
    assert list(rig.admissions) == [1, 3]
    rig.assert_answered(mine)
    rig.pool.unpin(rig.admissions[1].block_table)
    rig.run()
    assert list(rig.admissions) == [1, 3, 2]


# -- pulled sequences -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [3, 7, 8, 9])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_pulled_sequence_goes_on_from_its_owners_token(num_tokens: int, num_samples: int) -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10, 10 + num_tokens), pulled=True, sample_indices=tuple(range(num_samples))))
    assert rig.step().is_empty
    admission = rig.admissions[1]
    assert admission.landing_block_ids == admission.block_table
    rig.land(request)
    assert rig.step().is_empty
    rig.engine.landed(1, rig.first_tokens(request))
    rig.step()
    assert [output.output_index for output in rig.all_outputs[:num_samples]] == [0] * num_samples
    rig.run()
    assert rig.engine.counters.block_copies == (num_samples - 1 if num_tokens % 4 else 0)
    rig.assert_answered(request)
    rig.assert_clean()


def test_what_is_cached_is_not_pulled() -> None:
    rig = EngineRig()
    first = rig.add(sequence_request(1, range(10, 22), max_tokens=2))
    rig.run()
    second = rig.add(sequence_request(2, range(10, 26), pulled=True))
    rig.step()
    admission = rig.admissions[2]
    assert (admission.num_cached_blocks, len(admission.landing_block_ids)) == (3, 1)
    assert admission.block_table[3:] == admission.landing_block_ids
    rig.land(second)
    rig.engine.landed(2, rig.first_tokens(second))
    rig.run()
    rig.assert_answered(first, second)


def test_landing_blocks_are_all_or_nothing_and_leave_a_spare_block_a_sequence() -> None:
    rig = EngineRig(num_blocks=6)
    running = rig.add(sequence_request(1, range(10, 13), max_tokens=12, sampling={"ignore_eos": True}))
    rig.step()
    pulled = rig.add(sequence_request(2, range(20, 40), max_tokens=2, pulled=True))
    rig.step()
    assert (list(rig.admissions), rig.pool.counts().landing) == ([1], 0)
    rig.run_until(lambda: 2 in rig.admissions)
    rig.land(pulled)
    rig.engine.landed(2, rig.first_tokens(pulled))
    rig.run()
    rig.assert_answered(running, pulled)


def test_a_landing_sequence_is_not_preempted() -> None:
    rig = EngineRig(num_blocks=8)
    running = rig.add(sequence_request(1, range(10, 13), max_tokens=28, sampling={"ignore_eos": True}))
    rig.step()
    pulled = rig.add(sequence_request(2, range(20, 40), max_tokens=4, pulled=True, sampling={"ignore_eos": True}))
    rig.run()
    assert (rig.engine.counters.preemptions, rig.engine.waiting_seqs, rig.pool.counts().landing) == (1, 1, 5)
    rig.land(pulled)
    rig.engine.landed(2, rig.first_tokens(pulled))
    rig.run()
    rig.assert_answered(running, pulled)
    rig.assert_clean()


def test_a_pulled_sequence_needs_no_budget_and_passes_a_prefill_that_does() -> None:
    rig = EngineRig(num_blocks=24, max_num_batched_tokens=8)
    rig.add(sequence_request(1, range(10, 50)))
    rig.step()
    rig.add(sequence_request(2, range(60, 80)))
    rig.add(sequence_request(3, range(30, 38), pulled=True))
    rig.step()
    assert list(rig.admissions) == [1, 3]


def test_a_prefill_that_lacks_only_budget_keeps_its_claim_on_blocks() -> None:
    rig = EngineRig(num_blocks=17, max_num_batched_tokens=8)
    rig.add(sequence_request(1, range(10, 50)))
    rig.step()
    rig.add(sequence_request(2, range(60, 80)))
    rig.add(sequence_request(3, range(30, 38), pulled=True))
    rig.step()  # 7 are left, 5 are claimed, 1 is spare
    assert list(rig.admissions) == [1]


def test_a_first_token_that_ends_the_sample_starts_nothing() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10), max_tokens=1, pulled=True))
    rig.step()
    rig.land(request)
    rig.engine.landed(1, rig.first_tokens(request))
    rig.run()
    rig.assert_answered(request)
    rig.assert_clean()


def test_landed_before_all_blocks_have_landed_fails_that_sequence() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10), pulled=True))
    other = rig.add(sequence_request(2))
    rig.step()
    rig.land(request, [0, 1])
    rig.engine.landed(1, rig.first_tokens(request))
    rig.run()
    end = rig.ends[1, 0]
    assert isinstance(end, Failure)
    assert "1 blocks not landed as asked" in end.message
    rig.assert_answered(other)
    rig.pool.drop_landing([rig.admissions[1].block_table[2]])
    rig.assert_clean()


def test_landed_with_other_content_than_asked_for_fails_that_sequence() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10), pulled=True))
    rig.step()
    rig.land(request, [0, 2])
    rig.pool.land(rig.admissions[1].block_table[1], hashes_of(range(20, 24))[0])
    rig.engine.landed(1, rig.first_tokens(request))
    rig.step()
    assert isinstance(rig.ends[1, 0], Failure)


def test_landed_without_a_token_for_a_sample_fails_that_sequence() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10), pulled=True, sample_indices=(0, 1)))
    rig.step()
    rig.land(request)
    rig.engine.landed(1, rig.first_tokens(request)[:1])
    rig.step()
    assert all(isinstance(rig.ends[1, i], Failure) for i in (0, 1))
    rig.assert_clean()


def test_landed_twice_or_for_nobody_changes_nothing() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10), pulled=True))
    rig.engine.landed(1, rig.first_tokens(request))  # it waits
    rig.engine.landed(99, [])
    rig.step()
    rig.land(request)
    rig.engine.landed(1, rig.first_tokens(request))
    rig.engine.landed(1, [SampledToken(sample_index=0, token_id=1)])
    rig.run()
    rig.assert_answered(request)


def test_a_failed_pull_frees_its_sequence_and_only_then_its_blocks() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10), pulled=True))
    rig.step()
    rig.land(request, [0])
    table = rig.admissions[1].block_table
    rig.pool.quarantine([table[1]])
    rig.pool.drop_landing([table[2]])
    rig.step()
    rig.engine.fail(1, FAILURE)
    rig.step()
    assert rig.ends == {(1, 0): FAILURE}
    counts = rig.pool.counts()
    assert (counts.cached, counts.quarantined, counts.used) == (1, 1, 0)  # what was proven stays
    rig.pool.end_quarantine([table[1]])
    rig.assert_clean()


# -- ends -------------------------------------------------------------------------------------------------------------------------------


def test_cancel_in_every_state_frees_at_once() -> None:
    rig = EngineRig(num_blocks=12, max_num_seqs=3)
    rig.add(sequence_request(1, range(10, 20), max_tokens=20))
    landing = rig.add(sequence_request(2, range(20, 30), pulled=True))
    rig.step()
    rig.add(sequence_request(3, range(30, 70), max_tokens=4))
    for seq_id in (3, 2, 1, 1, 77):
        rig.engine.cancel(seq_id)
        rig.engine.check()
    assert rig.engine.is_idle
    assert (rig.pool.counts().used, rig.pool.counts().landing) == (0, 3)
    rig.land(landing)
    assert rig.step().is_empty
    assert not rig.ends
    rig.assert_clean()


def test_cancel_of_some_samples_leaves_the_others() -> None:
    rig = EngineRig()
    parted = rig.add(sequence_request(1, range(10, 16), sample_indices=(0, 1, 2), sampling={"ignore_eos": True}))
    rig.step()
    whole = rig.add(sequence_request(2, range(20, 26), sample_indices=(0, 1, 2), sampling={"ignore_eos": True}))
    rig.engine.cancel(1, (0, 2))
    rig.engine.cancel(2, (1,))
    rig.run()
    assert set(rig.ends) == {(1, 1), (2, 0), (2, 2)}
    for request, sample_index in ((parted, 1), (whole, 0), (whole, 2)):
        assert rig.outputs[request.seq_id, sample_index] == rig.expected(request, sample_index)[0]
    rig.assert_clean()


def test_cancel_while_the_step_runs() -> None:
    rig = EngineRig()
    rig.add(sequence_request(1, range(10, 16), sample_indices=(0, 1)))
    other = rig.add(sequence_request(2, range(20, 26)))
    rig.step()
    plan = rig.plan()
    assert plan.block_copies
    rig.engine.cancel(1)
    rig.engine.check()
    assert rig.pool.allocate_landing(64 - 2) is None  # the step may still write to what was just freed
    rig.apply(plan)
    assert not [o for o in rig.all_outputs if o.seq_id == 1 and o.output_index > 0]
    rig.run()
    rig.assert_answered(other)
    rig.assert_clean()


def test_a_failure_ends_that_request_alone_and_leaves_nothing_in_the_cache() -> None:
    rig = EngineRig(max_num_batched_tokens=16)
    guilty = rig.add(sequence_request(1, range(10, 30), sample_indices=(0, 1)))
    other = rig.add(sequence_request(2, range(30, 36)))
    rig.step()
    assert rig.pool.lookup(guilty.block_hashes)
    rig.executor.failing = lambda part: FAILURE if part.block_table == rig.admissions[1].block_table else None
    rig.step()
    assert rig.ends == {(1, 0): FAILURE, (1, 1): FAILURE}
    assert rig.pool.lookup(guilty.block_hashes) == []
    rig.run()
    rig.assert_answered(other)
    rig.assert_clean()


def test_an_executor_that_forgets_a_sample_fails_that_sequence() -> None:
    rig = EngineRig()
    rig.add(sequence_request(1))
    plan = rig.plan()
    result = rig.executor.run(plan)
    rig.note(rig.engine.apply(plan, type(result)(step_id=result.step_id, samples={})))
    assert isinstance(rig.ends[1, 0], Failure)
    rig.assert_clean()


def test_the_mean_length_of_answers_is_that_of_the_last_ones() -> None:
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


def test_counts_for_reports() -> None:
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


def test_a_prompt_that_another_brings_is_not_waited_for_twice() -> None:
    rig = EngineRig(max_num_batched_tokens=8, max_num_seqs=3)
    block = rig.engine.config.block_size_tokens
    first, more = range(10, 10 + 5 * block), range(10, 10 + 6 * block)
    rig.add(sequence_request(1, first))
    rig.add(sequence_request(2, more))
    rig.add(sequence_request(3, first))
    waiting = rig.engine.waiting_prefill_tokens
    assert waiting == 5 * block + block + block, "of a prompt that is wholly there the last block is computed again"
    assert rig.engine.waiting_prefill_attended_tokens == (
        attended_tokens(5 * block, 0) + attended_tokens(block, 5 * block) + attended_tokens(block, 4 * block)
    )
    rig.engine.cancel(1)
    rig.engine.cancel(2)
    rig.engine.cancel(3)
    assert len(rig.engine.coming) == 0
    rig.add(sequence_request(4, first))
    assert rig.engine.waiting_prefill_tokens == 5 * block, "nobody brings it any more"
