"""Prefill for other workers, and sequences whose KV is pulled."""

import pytest

from baton.core.errors import Failure
from baton.core.request import FinishReason
from baton.engine.state.step import SampledToken
from tests.builders import hashes_of, sequence_request
from tests.engine_rig import EngineRig


@pytest.mark.parametrize(
    ("num_tokens", "for_reader", "ends"),
    [
        (32, True, [8, 16, 24, 27, 32]),
        (32, False, [8, 16, 24, 32]),
        (24, True, [8, 16, 24]),
        (33, True, [8, 16, 24, 32, 33]),
    ],
)
def test_last_chunk_of_a_long_prompt_for_a_reader_is_at_most_a_sixth(
    num_tokens: int, for_reader: bool, ends: list[int]
) -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.add(sequence_request(tokens=range(10, 10 + num_tokens), prefill_only=True, for_reader=for_reader))
    rig.run()
    assert [progress.num_computed_tokens for progress in rig.progress] == ends


def test_prefill_only_sequence_reports_progress_and_ends_with_its_first_token() -> None:
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


def test_prefill_only_sequence_reports_finish_if_the_first_token_is_the_last() -> None:
    rig = EngineRig()
    rig.add(sequence_request(tokens=range(10), max_tokens=1, prefill_only=True))
    rig.run()
    assert rig.ends == {(1, 0): FinishReason.LENGTH}


def test_prefill_only_sequence_is_not_preempted() -> None:
    rig = EngineRig(num_blocks=7, max_num_batched_tokens=4, max_num_seqs=4)
    decode = rig.add(sequence_request(1, range(10, 13), max_tokens=20, sampling={"ignore_eos": True}))
    rig.step()
    rig.add(sequence_request(2, range(20, 40), prefill_only=True))
    rig.run_until(lambda: rig.engine.counters.preemptions > 0)
    assert rig.engine.waiting_seqs == 1  # the decode was preempted, although it arrived first
    rig.run()
    assert len(rig.outputs[2, 0]) == 1
    rig.assert_answered(decode)


def test_no_prefill_for_readers_while_they_hold_more_than_half_of_the_pool() -> None:
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


# -- pulled sequences ----------------------------------------------------------------------------------------
# ---------------------------


@pytest.mark.parametrize("num_tokens", [3, 7, 8, 9])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_pulled_sequence_continues_from_the_owners_first_token(num_tokens: int, num_samples: int) -> None:
    rig = EngineRig()
    request = rig.add(
        sequence_request(tokens=range(10, 10 + num_tokens), pulled=True, sample_indices=tuple(range(num_samples)))
    )
    assert rig.step().is_empty
    admission = rig.admissions[1]
    assert admission.receiving_block_ids == admission.block_table
    rig.mark_received(request)
    assert rig.step().is_empty
    rig.engine.received(1, rig.first_tokens(request))
    rig.step()
    assert [output.output_index for output in rig.all_outputs[:num_samples]] == [0] * num_samples
    rig.run()
    assert rig.engine.counters.block_copies == (num_samples - 1 if num_tokens % 4 else 0)
    rig.assert_answered(request)
    rig.assert_clean()


def test_cached_blocks_are_not_pulled() -> None:
    rig = EngineRig()
    first = rig.add(sequence_request(1, range(10, 22), max_tokens=2))
    rig.run()
    second = rig.add(sequence_request(2, range(10, 26), pulled=True))
    rig.step()
    admission = rig.admissions[2]
    assert (admission.num_cached_blocks, len(admission.receiving_block_ids)) == (3, 1)
    assert admission.block_table[3:] == admission.receiving_block_ids
    rig.mark_received(second)
    rig.engine.received(2, rig.first_tokens(second))
    rig.run()
    rig.assert_answered(first, second)


def test_pulled_sequence_gets_all_blocks_or_none_and_leaves_a_spare_block() -> None:
    rig = EngineRig(num_blocks=6)
    running = rig.add(sequence_request(1, range(10, 13), max_tokens=12, sampling={"ignore_eos": True}))
    rig.step()
    pulled = rig.add(sequence_request(2, range(20, 40), max_tokens=2, pulled=True))
    rig.step()
    assert (list(rig.admissions), rig.pool.counts().receiving) == ([1], 0)
    rig.run_until(lambda: 2 in rig.admissions)
    rig.mark_received(pulled)
    rig.engine.received(2, rig.first_tokens(pulled))
    rig.run()
    rig.assert_answered(running, pulled)


def test_receiving_sequence_is_not_preempted() -> None:
    rig = EngineRig(num_blocks=8)
    running = rig.add(sequence_request(1, range(10, 13), max_tokens=28, sampling={"ignore_eos": True}))
    rig.step()
    pulled = rig.add(sequence_request(2, range(20, 40), max_tokens=4, pulled=True, sampling={"ignore_eos": True}))
    rig.run()
    assert (rig.engine.counters.preemptions, rig.engine.waiting_seqs, rig.pool.counts().receiving) == (1, 1, 5)
    rig.mark_received(pulled)
    rig.engine.received(2, rig.first_tokens(pulled))
    rig.run()
    rig.assert_answered(running, pulled)
    rig.assert_clean()


def test_pulled_sequence_overtakes_a_prefill_that_lacks_token_budget() -> None:
    rig = EngineRig(num_blocks=24, max_num_batched_tokens=8)
    rig.add(sequence_request(1, range(10, 50)))
    rig.step()
    rig.add(sequence_request(2, range(60, 80)))
    rig.add(sequence_request(3, range(30, 38), pulled=True))
    rig.step()
    assert list(rig.admissions) == [1, 3]


def test_prefill_that_lacks_token_budget_keeps_its_claim_on_blocks() -> None:
    rig = EngineRig(num_blocks=17, max_num_batched_tokens=8)
    rig.add(sequence_request(1, range(10, 50)))
    rig.step()
    rig.add(sequence_request(2, range(60, 80)))
    rig.add(sequence_request(3, range(30, 38), pulled=True))
    rig.step()  # 7 are left, 5 are claimed, 1 is spare
    assert list(rig.admissions) == [1]


def test_pulled_sequence_that_ends_with_its_first_token_does_not_run() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10), max_tokens=1, pulled=True))
    rig.step()
    rig.mark_received(request)
    rig.engine.received(1, rig.first_tokens(request))
    rig.run()
    rig.assert_answered(request)
    rig.assert_clean()


def test_received_with_missing_blocks_fails_the_sequence() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10), pulled=True))
    other = rig.add(sequence_request(2))
    rig.step()
    rig.mark_received(request, [0, 1])
    rig.engine.received(1, rig.first_tokens(request))
    rig.run()
    end = rig.ends[1, 0]
    assert isinstance(end, Failure)
    assert "1 missing or wrong blocks" in end.message
    rig.assert_answered(other)
    rig.pool.drop_receiving([rig.admissions[1].block_table[2]])
    rig.assert_clean()


def test_received_with_wrong_content_fails_the_sequence() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10), pulled=True))
    rig.step()
    rig.mark_received(request, [0, 2])
    rig.pool.mark_received(rig.admissions[1].block_table[1], hashes_of(range(20, 24))[0])
    rig.engine.received(1, rig.first_tokens(request))
    rig.step()
    assert isinstance(rig.ends[1, 0], Failure)


def test_received_without_first_token_of_a_sample_fails_the_sequence() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10), pulled=True, sample_indices=(0, 1)))
    rig.step()
    rig.mark_received(request)
    rig.engine.received(1, rig.first_tokens(request)[:1])
    rig.step()
    assert all(isinstance(rig.ends[1, i], Failure) for i in (0, 1))
    rig.assert_clean()


def test_received_twice_or_for_unknown_sequence_is_ignored() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10), pulled=True))
    rig.engine.received(1, rig.first_tokens(request))  # ignored: still queued
    rig.engine.received(99, [])
    rig.step()
    rig.mark_received(request)
    rig.engine.received(1, rig.first_tokens(request))
    rig.engine.received(1, [SampledToken(sample_index=0, token_id=1)])
    rig.run()
    rig.assert_answered(request)
