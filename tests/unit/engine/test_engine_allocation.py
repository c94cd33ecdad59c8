"""Engines with too few blocks: queueing, preemption and refusal."""

from typing import Any

import pytest

from baton.core.errors import Reason, Refused
from tests.builders import sequence_request
from tests.engine_rig import EngineRig


def test_latest_sequence_of_the_lowest_priority_is_preempted_and_replayed() -> None:
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


def test_preempted_sequence_is_readmitted_from_cache_before_new_ones() -> None:
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
    )  # all its KV is cached, except the two blocks that the first sequence took
    rig.run()
    rig.assert_answered(old, young, new)


def test_sequence_without_blocks_is_not_overtaken() -> None:
    rig = EngineRig(num_blocks=6)
    first = rig.add(sequence_request(1, range(10, 22), max_tokens=4, sampling={"ignore_eos": True}))
    rig.step()
    large, small = (
        rig.add(sequence_request(2, range(30, 46), max_tokens=2)),
        rig.add(sequence_request(3, (1, 2), max_tokens=2)),
    )
    rig.step()
    assert list(rig.admissions) == [1]
    rig.run()
    assert list(rig.admissions) == [1, 2, 3]
    rig.assert_answered(first, large, small)


def test_admission_keeps_a_spare_block_for_each_running_sequence() -> None:
    rig = EngineRig(num_blocks=5)
    running = rig.add(sequence_request(1, range(10, 17), max_tokens=5, sampling={"ignore_eos": True}))
    rig.step()
    waiting = rig.add(sequence_request(2, range(20, 31), max_tokens=2))
    rig.step()  # 3 blocks are free and 3 are needed, but one is spare for the first sequence
    assert list(rig.admissions) == [1]
    rig.run()
    assert rig.engine.counters.preemptions == 0
    rig.assert_answered(running, waiting)


def test_cached_blocks_of_a_prompt_do_not_count_as_free_for_its_rest() -> None:
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


def test_receiving_waits_for_a_step_that_may_still_write() -> None:
    rig = EngineRig(num_blocks=6)
    rig.add(sequence_request(1, range(20, 29), max_tokens=2))
    rig.run()
    blocks = rig.pool.allocate(4)
    assert blocks is not None
    rig.pool.fence.step_launched()
    rig.pool.unref(blocks)
    pulled = rig.add(sequence_request(2, range(20, 36), pulled=True, max_tokens=2))
    assert rig.step().is_empty
    assert not rig.pool.counts().used
    rig.pool.fence.step_finished()
    rig.step()
    rig.mark_received(pulled)
    rig.engine.received(2, rig.first_tokens(pulled))
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
def test_request_that_can_never_run_is_refused(changes: dict[str, Any], reason: Reason) -> None:
    rig = EngineRig(num_blocks=10, max_model_len=100)
    with pytest.raises(Refused) as refused:
        rig.add(sequence_request(**changes))
    assert refused.value.failure.reason is reason
    assert rig.engine.is_idle


def test_largest_possible_request_runs() -> None:
    rig = EngineRig(num_blocks=10)
    request = rig.add(
        sequence_request(tokens=range(30), max_tokens=11, sampling={"ignore_eos": True})
    )  # the last token needs no KV
    rig.run()
    rig.assert_answered(request)
    prefill = rig.add(sequence_request(2, range(40), max_tokens=500, prefill_only=True))
    rig.run()
    assert len(rig.outputs[prefill.seq_id, 0]) == 1


def test_full_queue_refuses_requests() -> None:
    rig = EngineRig(max_num_seqs=1, max_waiting_seqs=2)
    for seq_id in (1, 2):
        rig.add(sequence_request(seq_id))
    with pytest.raises(Refused) as refused:
        rig.add(sequence_request(3))
    assert (refused.value.failure.reason, refused.value.failure.retriable) == (Reason.QUEUE_FULL, True)
    rig.step()
    rig.add(sequence_request(3))


@pytest.mark.parametrize(
    "changes", [{"seq_id": 1}, {"block_hashes": ()}, {"sample_indices": ()}, {"sample_indices": (1, 1)}]
)
def test_malformed_request_raises_value_error(changes: dict[str, Any]) -> None:
    rig = EngineRig()
    rig.add(sequence_request(1))
    with pytest.raises(ValueError, match=r"already in use|hashes|sample"):
        rig.add(sequence_request(**{"seq_id": 2, "tokens": range(5), **changes}))
