"""Steps that are planned while the preceding step is running."""

from collections.abc import Callable

import pytest

from baton.core.errors import Code, Failure, Reason
from baton.core.request import FinishReason
from baton.engine.state.step import StepPlan, StepSequence
from tests.builders import sequence_request
from tests.engine_rig import EngineRig

ENDLESS = {"ignore_eos": True}


def decoding(*, num_blocks: int = 64, max_tokens: int = 50, num_seqs: int = 2, **changes: object) -> EngineRig:
    """Return a rig whose sequences have one output token each."""
    rig = EngineRig(num_blocks=num_blocks)
    for i in range(num_seqs):
        rig.add(sequence_request(i + 1, range(10 * i, 10 * i + 6), max_tokens=max_tokens, sampling=ENDLESS, **changes))
    rig.step()
    return rig


def run_with_ahead(rig: EngineRig) -> list[StepPlan]:
    """Run to the end, planning ahead whenever possible. Returns the plans that were made ahead."""
    plans_ahead: list[StepPlan] = []
    plan = rig.plan()
    while not plan.is_empty:
        after = rig.engine.plan_ahead(plan)
        rig.engine.check()
        rig.apply(plan)
        plans_ahead += () if after.is_empty else (after,)
        plan = rig.plan() if after.is_empty else after
    return plans_ahead


def test_decodes_are_planned_ahead_until_their_length_limit() -> None:
    rig = EngineRig()
    short = rig.add(sequence_request(1, range(6), max_tokens=3, sampling=ENDLESS))
    longer = rig.add(sequence_request(2, range(20, 27), max_tokens=6, sampling=ENDLESS))
    plans_ahead = run_with_ahead(rig)
    rig.assert_answered(short, longer)
    rig.assert_clean()
    assert [len(plan.sequences) for plan in plans_ahead] == [2, 2, 1, 1, 1], (
        "a sequence that ends by length is in no step too many"
    )
    assert rig.engine.counters.steps == 6


def test_sequence_that_ends_by_token_is_in_one_step_too_many() -> None:
    rig = EngineRig()
    ends = rig.add(sequence_request(1, range(6), max_tokens=50, sampling={"ignore_eos": True}))
    token, _ = rig.expected(ends, 0)
    rig = EngineRig(eos_token_ids=(token[2],))
    ends = rig.add(sequence_request(1, range(6), max_tokens=50))
    continues = rig.add(sequence_request(2, range(20, 27), max_tokens=9, sampling=ENDLESS))
    plans_ahead = run_with_ahead(rig)
    rig.assert_answered(ends, continues)
    assert rig.ends[1, 0] is FinishReason.STOP
    rig.assert_clean()
    assert [len(plan.sequences) for plan in plans_ahead] == [2, 2, 2, 1, 1, 1, 1, 1]


def test_min_tokens_bans_end_tokens_in_steps_planned_ahead() -> None:
    rig = EngineRig(eos_token_ids=tuple(range(25)))
    request = rig.add(sequence_request(1, range(6), max_tokens=12, sampling={"min_tokens": 8}))
    assert run_with_ahead(rig)
    rig.assert_answered(request)
    assert len(rig.outputs[1, 0]) >= 8


def test_full_blocks_of_steps_planned_ahead_are_cached() -> None:
    rig = EngineRig()
    first = rig.add(sequence_request(1, range(6), max_tokens=12, sampling=ENDLESS))
    run_with_ahead(rig)
    again = rig.add(sequence_request(2, [*range(6), *rig.outputs[1, 0]], max_tokens=3, sampling=ENDLESS))
    run_with_ahead(rig)
    assert rig.admissions[2].num_cached_blocks == 4  # of 6 + 12 - 1 tokens computed
    rig.assert_answered(first, again)


def add_prompt(rig: EngineRig) -> None:
    rig.add(sequence_request(9, range(40, 50)))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: (rig := decoding(), rig.plan(), add_prompt(rig))[:2], id="a prompt waits"),
        pytest.param(lambda: (rig := decoding(num_seqs=1, sample_indices=(0, 1)), rig.plan()), id="block copies"),
    ],
)
def test_no_step_is_planned_ahead_if_other_work_is_due(make: Callable[[], tuple[EngineRig, StepPlan]]) -> None:
    rig, plan = make()
    assert rig.engine.plan_ahead(plan).is_empty
    rig.apply(plan)
    rig.run()
    assert set(rig.ends.values()) == {FinishReason.LENGTH}
    rig.assert_clean()


def test_preemption_waits_for_the_result_of_the_running_step() -> None:
    rig = decoding(num_blocks=16)
    assert run_with_ahead(rig)
    assert rig.engine.counters.preemptions
    assert set(rig.ends.values()) == {FinishReason.LENGTH}
    rig.assert_clean()


def test_incomplete_prefill_is_not_planned_ahead() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    request = rig.add(sequence_request(1, range(20), max_tokens=4, sampling=ENDLESS))
    plan = rig.plan()
    assert rig.engine.plan_ahead(plan).is_empty
    rig.apply(plan)
    run_with_ahead(rig)
    rig.assert_answered(request)


def test_samples_fork_before_steps_are_planned_ahead() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(1, range(6), max_tokens=6, sampling=ENDLESS, sample_indices=(0, 1)))
    plan = rig.plan()
    assert rig.engine.plan_ahead(plan).is_empty
    rig.apply(plan)
    assert run_with_ahead(rig), "after the fork, steps are planned ahead"
    rig.assert_answered(request)
    rig.assert_clean()


def test_prefill_only_sequence_is_not_planned_ahead() -> None:
    rig = EngineRig()
    rig.add(sequence_request(1, range(6), max_tokens=6, sampling=ENDLESS, prefill_only=True))
    continues = rig.add(sequence_request(2, range(20, 26), max_tokens=6, sampling=ENDLESS))
    plans_ahead = run_with_ahead(rig)
    assert [len(plan.sequences) for plan in plans_ahead] == [1, 1, 1, 1, 1]
    rig.assert_answered(continues)


def test_withdrawn_step_changes_nothing() -> None:
    rig = decoding()
    plan = rig.plan()
    assert not rig.engine.plan_ahead(plan).is_empty
    rig.engine.step_withdrawn()
    rig.apply(plan)
    rig.add(sequence_request(3, range(40, 50)))
    rig.run()
    assert set(rig.ends.values()) == {FinishReason.LENGTH}
    rig.assert_clean()


def test_blocks_of_an_ended_sequence_are_not_reallocated_while_a_step_may_write() -> None:
    """A sequence has ended, but is still in the step in flight."""
    rig = EngineRig(num_blocks=6)
    token, _ = rig.expected(sequence_request(1, range(3), sampling=ENDLESS), 0)
    rig = EngineRig(num_blocks=4, eos_token_ids=(token[1],))
    rig.add(sequence_request(1, range(3), max_tokens=9))
    rig.step()
    plan = rig.plan()
    after = rig.engine.plan_ahead(plan)
    writes_to = after.sequences[0].block_table[after.sequences[0].kv_begin // 4]
    rig.apply(plan)
    assert rig.ends[1, 0] is FinishReason.STOP
    assert rig.pool.counts().used == 0
    receiving = rig.pool.allocate_receiving(3) or rig.pool.allocate_receiving(2)
    assert receiving
    assert writes_to not in receiving
    rig.apply(after)
    assert rig.pool.allocate_receiving(4 - len(receiving)) is not None
    rig.engine.check()


def test_failed_sequence_is_removed_from_the_step_planned_ahead() -> None:
    failure = Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message="injected")
    rig = decoding()

    def failing(part: StepSequence) -> Failure | None:
        return failure if part.seq_id == 1 and part.kv_begin == 8 else None

    rig.executor.failing = failing
    run_with_ahead(rig)
    assert rig.ends == {(1, 0): failure, (2, 0): FinishReason.LENGTH}
    rig.assert_clean()


def test_step_planned_ahead_can_be_repeated_with_its_tokens_filled_in() -> None:
    """The loop repeats a failed step for each of its sequences, to find the failing one."""
    rig = decoding()
    plan = rig.plan()
    after = rig.engine.plan_ahead(plan)
    rig.apply(plan)
    repeated = rig.engine.without_placeholders(after)
    assert (repeated.step_id, repeated.follows, len(repeated.sequences)) == (after.step_id, None, 2)
    assert [part.token_ids[0] for part in repeated.sequences] == [rig.outputs[i, 0][-1] for i in (1, 2)]
    rig.note(rig.engine.apply(after, rig.executor.run(repeated)))
    rig.run()
    assert set(rig.ends.values()) == {FinishReason.LENGTH}
    rig.assert_clean()
