"""Steps that are planned while the one before still runs."""

from collections.abc import Callable

import pytest

from baton.core.errors import Code, Failure, Reason
from baton.core.request import FinishReason
from baton.engine.state.step import StepPlan, StepSequence
from tests.builders import sequence_request
from tests.engine_rig import EngineRig

ENDLESS = {"ignore_eos": True}


def decoding(*, num_blocks: int = 64, max_tokens: int = 50, num_seqs: int = 2, **changes: object) -> EngineRig:
    """With answers that have had a token each."""
    rig = EngineRig(num_blocks=num_blocks)
    for i in range(num_seqs):
        rig.add(sequence_request(i + 1, range(10 * i, 10 * i + 6), max_tokens=max_tokens, sampling=ENDLESS, **changes))
    rig.step()
    return rig


def run_with_ahead(rig: EngineRig) -> list[StepPlan]:
    """To the end, with a step ahead wherever there can be one; what was planned ahead."""
    aheads: list[StepPlan] = []
    plan = rig.plan()
    while not plan.is_empty:
        after = rig.engine.plan_ahead(plan)
        rig.engine.check()
        rig.apply(plan)
        aheads += () if after.is_empty else (after,)
        plan = rig.plan() if after.is_empty else after
    return aheads


def test_answers_go_on_step_after_step_until_their_known_end() -> None:
    rig = EngineRig()
    short = rig.add(sequence_request(1, range(6), max_tokens=3, sampling=ENDLESS))
    longer = rig.add(sequence_request(2, range(20, 27), max_tokens=6, sampling=ENDLESS))
    aheads = run_with_ahead(rig)
    rig.assert_answered(short, longer)
    rig.assert_clean()
    assert [len(plan.sequences) for plan in aheads] == [2, 2, 1, 1, 1], "who ends by length is in no step too many"
    assert rig.engine.counters.steps == 6


def test_an_end_that_only_the_token_tells_costs_one_part_of_a_step() -> None:
    rig = EngineRig()
    ends = rig.add(sequence_request(1, range(6), max_tokens=50, sampling={"ignore_eos": True}))
    token, _ = rig.expected(ends, 0)
    rig = EngineRig(eos_token_ids=(token[2],))
    ends = rig.add(sequence_request(1, range(6), max_tokens=50))
    goes_on = rig.add(sequence_request(2, range(20, 27), max_tokens=9, sampling=ENDLESS))
    aheads = run_with_ahead(rig)
    rig.assert_answered(ends, goes_on)
    assert rig.ends[1, 0] is FinishReason.STOP
    rig.assert_clean()
    assert [len(plan.sequences) for plan in aheads] == [2, 2, 2, 1, 1, 1, 1, 1]


def test_too_early_an_end_is_banned_in_a_step_ahead_too() -> None:
    rig = EngineRig(eos_token_ids=tuple(range(25)))
    request = rig.add(sequence_request(1, range(6), max_tokens=12, sampling={"min_tokens": 8}))
    assert run_with_ahead(rig)
    rig.assert_answered(request)
    assert len(rig.outputs[1, 0]) >= 8


def test_full_blocks_are_found_by_others_as_ever() -> None:
    rig = EngineRig()
    first = rig.add(sequence_request(1, range(6), max_tokens=12, sampling=ENDLESS))
    run_with_ahead(rig)
    again = rig.add(sequence_request(2, [*range(6), *rig.outputs[1, 0]], max_tokens=3, sampling=ENDLESS))
    run_with_ahead(rig)
    assert rig.admissions[2].num_cached_blocks == 4  # of 6 + 12 - 1 tokens computed
    rig.assert_answered(first, again)


def waits(rig: EngineRig) -> None:
    rig.add(sequence_request(9, range(40, 50)))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: (rig := decoding(), rig.plan(), waits(rig))[:2], id="a prompt waits"),
        pytest.param(lambda: (rig := decoding(num_seqs=1, sample_indices=(0, 1)), rig.plan()), id="block copies"),
    ],
)
def test_whatever_else_is_due_waits_for_the_result(make: Callable[[], tuple[EngineRig, StepPlan]]) -> None:
    rig, plan = make()
    assert rig.engine.plan_ahead(plan).is_empty
    rig.apply(plan)
    rig.run()
    assert set(rig.ends.values()) == {FinishReason.LENGTH}
    rig.assert_clean()


def test_without_memory_for_all_somebody_is_preempted_from_the_result() -> None:
    rig = decoding(num_blocks=16)
    assert run_with_ahead(rig)
    assert rig.engine.counters.preemptions
    assert set(rig.ends.values()) == {FinishReason.LENGTH}
    rig.assert_clean()


def test_a_prompt_that_is_not_whole_goes_on_from_its_result() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    request = rig.add(sequence_request(1, range(20), max_tokens=4, sampling=ENDLESS))
    plan = rig.plan()
    assert rig.engine.plan_ahead(plan).is_empty
    rig.apply(plan)
    run_with_ahead(rig)
    rig.assert_answered(request)


def test_samples_part_before_they_go_on() -> None:
    rig = EngineRig()
    request = rig.add(sequence_request(1, range(6), max_tokens=6, sampling=ENDLESS, sample_indices=(0, 1)))
    plan = rig.plan()
    assert rig.engine.plan_ahead(plan).is_empty
    rig.apply(plan)
    assert run_with_ahead(rig), "apart, they do"
    rig.assert_answered(request)
    rig.assert_clean()


def test_a_prefill_ends_with_its_first_token() -> None:
    rig = EngineRig()
    rig.add(sequence_request(1, range(6), max_tokens=6, sampling=ENDLESS, prefill_only=True))
    goes_on = rig.add(sequence_request(2, range(20, 26), max_tokens=6, sampling=ENDLESS))
    aheads = run_with_ahead(rig)
    assert [len(plan.sequences) for plan in aheads] == [1, 1, 1, 1, 1]
    rig.assert_answered(goes_on)


def test_a_step_that_is_withdrawn_leaves_no_trace() -> None:
    rig = decoding()
    plan = rig.plan()
    assert not rig.engine.plan_ahead(plan).is_empty
    rig.engine.step_withdrawn()
    rig.apply(plan)
    rig.add(sequence_request(3, range(40, 50)))
    rig.run()
    assert set(rig.ends.values()) == {FinishReason.LENGTH}
    rig.assert_clean()


def test_nothing_lands_where_a_step_ahead_may_still_write() -> None:
    """An answer has ended, and the step that is in flight has a part of it too many."""
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


def test_whoever_failed_is_passed_over_in_the_step_ahead() -> None:
    failure = Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message="injected")
    rig = decoding()

    def failing(part: StepSequence) -> Failure | None:
        return failure if part.seq_id == 1 and part.kv_begin == 8 else None

    rig.executor.failing = failing
    run_with_ahead(rig)
    assert rig.ends == {(1, 0): failure, (2, 0): FinishReason.LENGTH}
    rig.assert_clean()


def test_a_step_ahead_can_be_run_again_once_its_tokens_are_known() -> None:
    """As the loop does to find out whose fault it was that it raised."""
    rig = decoding()
    plan = rig.plan()
    after = rig.engine.plan_ahead(plan)
    rig.apply(plan)
    known = rig.engine.without_placeholders(after)
    assert (known.step_id, known.follows, len(known.sequences)) == (after.step_id, None, 2)
    assert [part.token_ids[0] for part in known.sequences] == [rig.outputs[i, 0][-1] for i in (1, 2)]
    rig.note(rig.engine.apply(after, rig.executor.run(known)))
    rig.run()
    assert set(rig.ends.values()) == {FinishReason.LENGTH}
    rig.assert_clean()
