"""Cancelled and failed sequences end without effect on others, and their blocks are freed."""

from baton.core.errors import Code, Failure, Reason
from tests.builders import sequence_request
from tests.engine_rig import EngineRig

FAILURE = Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message="injected")


def test_failed_pull_frees_blocks_after_drop_and_quarantine_end() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(tokens=range(10), pulled=True))
    rig.step()
    rig.mark_received(request, [0])
    table = rig.admissions[1].block_table
    rig.pool.quarantine([table[1]])
    rig.pool.drop_receiving([table[2]])
    rig.step()
    rig.engine.fail(1, FAILURE)
    rig.step()
    assert rig.ends == {(1, 0): FAILURE}
    counts = rig.pool.counts()
    assert (counts.cached, counts.quarantined, counts.used) == (1, 1, 0)  # the validated block stays cached
    rig.pool.end_quarantine([table[1]])
    rig.assert_clean()


def test_cancel_frees_blocks_in_every_state() -> None:
    rig = EngineRig(num_blocks=12, max_num_seqs=3)
    rig.add(sequence_request(1, range(10, 20), max_tokens=20))
    receiving = rig.add(sequence_request(2, range(20, 30), pulled=True))
    rig.step()
    rig.add(sequence_request(3, range(30, 70), max_tokens=4))
    for seq_id in (3, 2, 1, 1, 77):
        rig.engine.cancel(seq_id)
        rig.engine.check()
    assert rig.engine.is_idle
    assert (rig.pool.counts().used, rig.pool.counts().receiving) == (0, 3)
    rig.mark_received(receiving)
    assert rig.step().is_empty
    assert not rig.ends
    rig.assert_clean()


def test_cancel_of_some_samples_keeps_the_others() -> None:
    rig = EngineRig()
    forked = rig.add(sequence_request(1, range(10, 16), sample_indices=(0, 1, 2), sampling={"ignore_eos": True}))
    rig.step()
    unforked = rig.add(sequence_request(2, range(20, 26), sample_indices=(0, 1, 2), sampling={"ignore_eos": True}))
    rig.engine.cancel(1, (0, 2))
    rig.engine.cancel(2, (1,))
    rig.run()
    assert set(rig.ends) == {(1, 1), (2, 0), (2, 2)}
    for request, sample_index in ((forked, 1), (unforked, 0), (unforked, 2)):
        assert rig.outputs[request.seq_id, sample_index] == rig.expected(request, sample_index)[0]
    rig.assert_clean()


def test_cancel_during_a_step_keeps_its_blocks_fenced() -> None:
    rig = EngineRig()
    rig.add(sequence_request(1, range(10, 16), sample_indices=(0, 1)))
    other = rig.add(sequence_request(2, range(20, 26)))
    rig.step()
    plan = rig.plan()
    assert plan.block_copies
    rig.engine.cancel(1)
    rig.engine.check()
    assert rig.pool.allocate_receiving(64 - 2) is None  # the step may still write to what was just freed
    rig.apply(plan)
    assert not [o for o in rig.all_outputs if o.seq_id == 1 and o.output_index > 0]
    rig.run()
    rig.assert_answered(other)
    rig.assert_clean()


def test_failed_request_leaves_nothing_in_the_cache() -> None:
    rig = EngineRig(max_num_batched_tokens=16)
    failing = rig.add(sequence_request(1, range(10, 30), sample_indices=(0, 1)))
    other = rig.add(sequence_request(2, range(30, 36)))
    rig.step()
    assert rig.pool.lookup(failing.block_hashes)
    rig.executor.failing = lambda part: FAILURE if part.block_table == rig.admissions[1].block_table else None
    rig.step()
    assert rig.ends == {(1, 0): FAILURE, (1, 1): FAILURE}
    assert rig.pool.lookup(failing.block_hashes) == []
    rig.run()
    rig.assert_answered(other)
    rig.assert_clean()


def test_missing_sample_in_a_result_fails_the_sequence() -> None:
    rig = EngineRig()
    rig.add(sequence_request(1))
    plan = rig.plan()
    result = rig.executor.run(plan)
    rig.note(rig.engine.apply(plan, type(result)(step_id=result.step_id, samples={})))
    assert isinstance(rig.ends[1, 0], Failure)
    rig.assert_clean()
