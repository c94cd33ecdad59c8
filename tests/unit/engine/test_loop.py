"""The loop over a fake device: what lands between steps, who is guilty of an exception, when it ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from baton.core.errors import Code, Failure, Reason, Refused
from baton.engine.loop import EngineLoop, EngineUnhealthy
from baton.engine.outcome import Outcome
from baton.engine.step import DeviceFault, NothingToFollow, StepPlan, StepResult, StepSequence
from tests.builders import sequence_request
from tests.engine_rig import EngineRig

FAILURE = Failure(code=Code.INTERNAL, reason=Reason.TRANSFER_FAILED, message="injected")


def make_loop(rig: EngineRig) -> EngineLoop:
    return EngineLoop(rig.engine, rig.executor, rig.note)


@asynccontextmanager
async def running(loop: EngineLoop) -> AsyncIterator[None]:
    """Runs beside the test; drained at the end, and whatever it raises comes out."""
    task = asyncio.create_task(loop.run())
    try:
        yield
        loop.drain()
        await asyncio.wait_for(task, 10)
    finally:
        task.cancel()


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_requests_are_answered_and_the_loop_drains() -> None:
    rig = EngineRig(num_blocks=16)
    loop = make_loop(rig)
    requests = [sequence_request(i, range(i, i + 9), max_tokens=6) for i in range(10)]
    async with running(loop):
        for request in requests:
            loop.add(request)
            await asyncio.sleep(0)
    rig.assert_answered(*requests)
    rig.assert_clean()
    assert loop.steps_done == rig.engine.counters.steps > 0


async def test_a_drained_loop_takes_nothing_more() -> None:
    loop = make_loop(EngineRig())
    async with running(loop):
        pass
    with pytest.raises(Refused) as refused:
        loop.add(sequence_request())
    assert refused.value.failure.reason is Reason.DRAINING


async def test_draining_finishes_what_is_there_and_what_still_comes() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    pulled = sequence_request(1, range(10), pulled=True)
    late = sequence_request(2, range(20, 30))
    async with running(loop):
        loop.add(pulled)
        await turns()
        loop.drain()
        await turns()  # nothing can be computed, but one sequence still lands
        loop.add(late)
        await turns()
        rig.land(pulled)
        loop.landed(1, rig.first_tokens(pulled))
    rig.assert_answered(pulled, late)


async def test_refusals_come_at_once() -> None:
    rig = EngineRig(max_waiting_seqs=2, max_model_len=50)
    loop = make_loop(rig)
    with pytest.raises(Refused, match="length"):
        loop.add(sequence_request(9, range(60)))
    loop.add(sequence_request(1))
    with pytest.raises(ValueError, match="exists"):
        loop.add(sequence_request(1))
    loop.add(sequence_request(2))
    with pytest.raises(Refused) as refused:
        loop.add(sequence_request(3))
    assert refused.value.failure.reason is Reason.QUEUE_FULL


async def test_changes_wait_for_the_running_step_and_keep_their_order() -> None:
    rig = EngineRig()
    rig.executor.gate = asyncio.Event()
    loop = make_loop(rig)
    first, second = sequence_request(1, range(10)), sequence_request(2, range(20, 30))
    async with running(loop):
        loop.add(first)
        await turns()
        loop.cancel(1)
        loop.add(second)
        loop.add(sequence_request(3))
        loop.cancel(3)
        loop.fail(2, FAILURE)
        loop.cancel(2)
        await turns()
        assert (rig.engine.running_seqs, rig.engine.waiting_seqs) == (1, 0)
        rig.executor.gate.set()
    assert rig.ends == {(2, 0): FAILURE}
    rig.assert_clean()


async def test_admissions_are_delivered_before_the_step_runs() -> None:
    rig = EngineRig()
    rig.executor.gate = asyncio.Event()
    loop = make_loop(rig)
    async with running(loop):
        loop.add(sequence_request(1, range(10), prefill_only=True))
        await turns()
        assert list(rig.admissions) == [1]
        assert not rig.executor.plans
        rig.executor.gate.set()


async def test_tokens_that_merely_go_on_are_delivered_while_the_next_step_runs_and_nothing_is_out_of_order() -> None:
    rig = EngineRig()
    running_at: list[tuple[int, bool]] = []

    def deliver(outcome: Outcome) -> None:
        rig.note(outcome)
        running_at.extend((output.output_index, loop.step_started_s is not None) for output in outcome.outputs)

    loop = EngineLoop(rig.engine, rig.executor, deliver)
    request = sequence_request(1, range(10), max_tokens=4, sampling={"ignore_eos": True})
    async with running(loop):
        loop.add(request)
    assert running_at == [(0, False), (1, True), (2, True), (3, False)], "the first and the last at once"
    rig.assert_answered(request)


async def test_while_answers_go_on_the_next_step_waits_at_the_device() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    requests = [sequence_request(i, range(i, i + 9), max_tokens=20, sampling={"ignore_eos": True}) for i in range(3)]
    for request in requests:
        loop.add(request)
    async with running(loop):
        pass
    rig.assert_answered(*requests)
    rig.assert_clean()
    assert (rig.executor.num_ahead, loop.steps_done) == (19, 20), "all but the prompts'"


async def test_what_comes_in_takes_back_the_step_that_waits() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    first, second = (sequence_request(i, range(i, i + 9), max_tokens=9, sampling={"ignore_eos": True}) for i in (1, 2))
    async with running(loop):
        loop.add(first)
        rig.executor.gate = asyncio.Event()
        await turns()
        loop.add(second)
        rig.executor.gate.set()
    assert [part.num_scheduled_tokens for part in rig.executor.plans[1].sequences] == [1, 9], "not one step later"
    rig.assert_answered(first, second)
    rig.assert_clean()


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 5, 20])
async def test_a_loop_that_is_interrupted_leaves_no_step_behind(num_turns: int) -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    task = asyncio.create_task(loop.run())
    loop.add(sequence_request(1, range(9), max_tokens=200, sampling={"ignore_eos": True}))
    await turns(num_turns + 3)
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert not [other.get_coro() for other in asyncio.all_tasks() - {asyncio.current_task()}]
    with suppress(ValueError):
        rig.pool.step_finished()  # one may have run
    with pytest.raises(ValueError, match="no step is in flight"):
        rig.pool.step_finished()


async def test_an_exception_in_a_step_that_was_planned_ahead_is_charged_too() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    requests = [sequence_request(i, range(i * 10, i * 10 + 6), max_tokens=9, sampling={"ignore_eos": True}) for i in (1, 2, 3)]
    rig.executor.guilty = lambda part: part.seq_id == 2 and part.kv_begin >= 9
    async with running(loop):
        for request in requests:
            loop.add(request)
    assert isinstance(rig.ends[2, 0], Failure)
    assert len(rig.outputs[2, 0]) == 4
    rig.assert_answered(requests[0], requests[2])
    rig.assert_clean()


async def test_a_step_that_fails_when_all_in_it_have_ended_is_nobodys_fault() -> None:
    rig = EngineRig()
    token, _ = rig.expected(sequence_request(1, range(6), sampling={"ignore_eos": True}), 0)
    rig = EngineRig(eos_token_ids=(token[2],))
    loop = make_loop(rig)
    rig.executor.guilty = lambda part: part.kv_begin == 8  # of the first: the step after its end
    second = sequence_request(2, range(20, 31), max_tokens=3)
    async with running(loop):
        loop.add(sequence_request(1, range(6), max_tokens=50))
        await turns(60)
        loop.add(second)
    assert rig.outputs[1, 0] == token[:3]
    rig.assert_answered(second)
    rig.assert_clean()


async def test_a_step_that_the_device_has_begun_ends_before_anybody_gets_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU has, which was given it while it computed the step before; that one fails."""
    rig = EngineRig()
    loop = make_loop(rig)
    wrong, written = asyncio.Event(), asyncio.Event()
    execute = rig.executor.execute
    tried: list[int | None] = []

    async def late(plan: StepPlan) -> StepResult:
        if plan.step_id == 3:
            tried.append(plan.follows)
            await wrong.wait()
            raise RuntimeError("injected")
        if plan.follows == 3:
            await written.wait()
            raise NothingToFollow("the step before has failed")
        return await execute(plan)

    monkeypatch.setattr(rig.executor, "execute", late)
    monkeypatch.setattr(rig.executor, "withdraw", lambda step_id: False)
    request = sequence_request(1, range(6), max_tokens=9, sampling={"ignore_eos": True})
    async with running(loop):
        loop.add(request)
        await turns(50)
        wrong.set()
        await turns(50)
        assert tried == [2], "nothing is run meanwhile"
        assert loop.step_age_s() > 0, "and the step that is waited for is watched"
        written.set()
        await turns(50)
        assert tried == [2, None]
    assert isinstance(rig.ends[1, 0], Failure)
    rig.assert_clean()


async def test_a_loop_that_ends_by_a_delivery_leaves_no_step_behind() -> None:
    rig = EngineRig()

    def deliver(outcome: Outcome) -> None:
        if any(output.output_index == 2 for output in outcome.outputs):
            raise RuntimeError("deliver")

    loop = EngineLoop(rig.engine, rig.executor, deliver)
    loop.add(sequence_request(1, range(9), max_tokens=20, sampling={"ignore_eos": True}))
    with pytest.raises(RuntimeError, match="deliver"):
        await asyncio.wait_for(loop.run(), 10)
    assert not [other.get_coro() for other in asyncio.all_tasks() - {asyncio.current_task()}]
    assert loop.step_started_s is None


async def test_what_was_held_comes_before_a_failure_from_outside() -> None:
    rig = EngineRig()
    outcomes: list[int | Failure] = []

    def deliver(outcome: Outcome) -> None:
        for output in outcome.outputs:
            outcomes.append(output.failure or output.output_index)
            if output.output_index == 1 and not output.failure:
                loop.fail(1, FAILURE)

    loop = EngineLoop(rig.engine, rig.executor, deliver)
    async with running(loop):
        loop.add(sequence_request(1, range(10), max_tokens=50, sampling={"ignore_eos": True}))
    assert outcomes == [0, 1, 2, 3, FAILURE]


async def test_memory_that_a_transfer_gives_back_wakes_the_loop() -> None:
    rig = EngineRig(num_blocks=6)
    first, second = sequence_request(1, range(10, 26), prefill_only=True), sequence_request(2, range(40, 56), max_tokens=3)

    def deliver(outcome: Outcome) -> None:
        rig.note(outcome)
        for admission in outcome.admissions:
            if admission.seq_id == 1:
                rig.pool.pin(admission.block_table)

    loop = EngineLoop(rig.engine, rig.executor, deliver)
    async with running(loop):
        loop.add(first)
        await turns()
        loop.add(second)
        await turns()
        assert list(rig.admissions) == [1]
        rig.pool.unpin(rig.admissions[1].block_table)
        await turns()
        assert list(rig.admissions) == [1, 2]
    rig.assert_answered(second)


async def test_a_blocked_queue_costs_no_turns() -> None:
    rig = EngineRig(num_blocks=6)
    loop = make_loop(rig)
    held = rig.pool.allocate(4)
    assert held is not None
    plans = 0
    plan_step = rig.engine.plan

    def counting_plan() -> object:
        nonlocal plans
        plans += 1
        return plan_step()

    rig.engine.plan = counting_plan  # type: ignore[method-assign, assignment]
    async with running(loop):
        loop.add(sequence_request(1, range(12)))
        await turns(100)
        assert plans <= 3
        rig.pool.unref(held)


async def test_others_get_their_turn_though_the_device_answers_at_once() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    async with running(loop):
        loop.add(sequence_request(1, range(10), max_tokens=200, sampling={"ignore_eos": True}))
        await turns(10)
        assert 0 < loop.steps_done < 20
        loop.cancel(1)


async def test_step_age() -> None:
    rig = EngineRig()
    rig.executor.gate = asyncio.Event()
    loop = make_loop(rig)
    assert (loop.step_started_s, loop.step_age_s()) == (None, 0.0)
    async with running(loop):
        loop.add(sequence_request())
        await turns()
        assert loop.step_started_s is not None
        assert loop.step_age_s() >= 0
        rig.executor.gate.set()
    assert loop.step_started_s is None


async def test_an_exception_is_charged_to_the_one_that_causes_it() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    requests = [sequence_request(i, range(i * 10, i * 10 + 6), sample_indices=(0, 1), max_tokens=6) for i in (1, 2, 3)]

    def guilty(part: StepSequence) -> bool:
        """A step of request 2, once it decodes: with copies for all three in the same plan."""
        return part.kv_begin >= 6 and part.block_table[0] == rig.admissions[2].block_table[0]

    rig.executor.guilty = guilty
    async with running(loop):
        for request in requests:
            loop.add(request)
    for sample_index in (0, 1):
        end = rig.ends[2, sample_index]
        assert isinstance(end, Failure)
        assert (end.code, end.retriable) == (Code.INTERNAL, False)
    rig.assert_answered(requests[0], requests[2])
    rig.assert_clean()


async def test_what_the_executor_finds_at_fault_while_the_guilty_one_is_sought_fails_too() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    requests = [sequence_request(i, range(i * 10, i * 10 + 6)) for i in (1, 2, 3)]
    rig.executor.guilty = lambda part: part.seq_id == 1
    rig.executor.failing = lambda part: FAILURE if part.seq_id == 2 else None
    async with running(loop):
        for request in requests:
            loop.add(request)
    assert isinstance(rig.ends[1, 0], Failure)
    assert rig.ends[2, 0] is FAILURE
    rig.assert_answered(requests[2])


async def test_an_exception_that_does_not_come_again_costs_nothing() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    requests = [sequence_request(i, range(i * 10, i * 10 + 6), max_tokens=6) for i in (1, 2)]
    left = [True]
    rig.executor.guilty = lambda _: bool(left) and left.pop()
    async with running(loop):
        for request in requests:
            loop.add(request)
    rig.assert_answered(*requests)


@pytest.mark.parametrize("num_seqs", [2, 3])
async def test_when_different_requests_of_a_step_fail_each_alone_the_device_is_at_fault(num_seqs: int) -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    rig.executor.guilty = lambda _: True
    for i in range(num_seqs):
        loop.add(sequence_request(i + 1, range(10)))
    with pytest.raises(EngineUnhealthy, match="restart") as unhealthy:
        await asyncio.wait_for(loop.run(), 10)
    assert isinstance(unhealthy.value.__cause__, RuntimeError)
    assert len(rig.executor.plans) == 1 + num_seqs  # bounded
    with pytest.raises(Refused):
        loop.add(sequence_request(99))


@pytest.mark.parametrize("sample_indices", [(0,), (0, 1, 2)])
async def test_a_request_that_fails_with_nobody_beside_it_is_charged_like_any_other(sample_indices: tuple[int, ...]) -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    rig.executor.guilty = lambda part: part.kv_begin >= 6  # once it decodes, each sample as a sequence of its own
    bad = sequence_request(1, range(6), sample_indices=sample_indices, max_tokens=6, sampling={"ignore_eos": True})
    good = sequence_request(2, range(20, 30))
    async with running(loop):
        loop.add(bad)
        await turns(100)
        ends = [rig.ends[1, index] for index in sample_indices]
        assert all(isinstance(end, Failure) and (end.code, end.retriable) == (Code.INTERNAL, False) for end in ends)
        rig.executor.guilty = lambda _: False
        loop.add(good)
    rig.assert_answered(good)
    rig.assert_clean()


async def test_different_requests_that_fail_one_after_the_other_mean_the_device() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    rig.executor.guilty = lambda _: True
    task = asyncio.create_task(loop.run())
    loop.add(sequence_request(1, range(10)))
    await turns(100)
    assert not task.done()
    loop.add(sequence_request(2, range(10)))
    with pytest.raises(EngineUnhealthy, match="in a row"):
        await asyncio.wait_for(task, 10)
    assert list(rig.ends) == [(1, 0)]  # the second one is not told that it was at fault: it goes on elsewhere


@pytest.mark.parametrize("beside", [False, True])
async def test_one_success_in_between_clears_the_device(beside: bool) -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    rig.executor.guilty = lambda part: part.token_ids[0] == 99
    good = [sequence_request(10 + i, range(i, i + 6)) for i in range(6)]
    async with running(loop):
        for i in range(6):
            loop.add(sequence_request(i, [99, 1, 2, 3]))
            if not beside:
                await turns(100)
            loop.add(good[i])
            await turns(100)
    assert all(isinstance(rig.ends[i, 0], Failure) for i in range(6))
    rig.assert_answered(*good)
    rig.assert_clean()


async def test_a_device_that_says_so_is_not_asked_again() -> None:
    rig = EngineRig()
    loop = make_loop(rig)

    def fault(_: StepSequence) -> bool:
        raise DeviceFault("cuda:0: unspecified launch failure")

    rig.executor.guilty = fault
    loop.add(sequence_request(1, range(10)))
    with pytest.raises(EngineUnhealthy, match="unspecified launch failure; restart"):
        await asyncio.wait_for(loop.run(), 10)
    assert len(rig.executor.plans) == 1
    assert rig.ends == {}


async def test_a_device_may_fail_for_good_while_the_guilty_one_is_sought() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    errors = [RuntimeError("injected"), DeviceFault("cuda:0: gone")]

    def fault(_: StepSequence) -> bool:
        raise errors.pop(0)

    rig.executor.guilty = fault
    for i in (1, 2):
        loop.add(sequence_request(i, range(10)))
    with pytest.raises(EngineUnhealthy, match="gone"):
        await asyncio.wait_for(loop.run(), 10)
    assert len(rig.executor.plans) == 2


async def test_a_failure_of_the_executors_own_needs_no_second_run() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    rig.executor.failing = lambda part: FAILURE if part.seq_id == 1 else None
    other = sequence_request(2, range(20, 30))
    async with running(loop):
        loop.add(sequence_request(1, range(10)))
        loop.add(other)
    assert rig.ends[1, 0] is FAILURE
    assert loop.steps_done == len(rig.executor.plans)
    rig.assert_answered(other)


async def test_an_exception_of_deliver_is_not_swallowed() -> None:
    rig = EngineRig()

    def deliver(_: Outcome) -> None:
        raise RuntimeError("deliver")

    loop = EngineLoop(rig.engine, rig.executor, deliver)
    loop.add(sequence_request())
    with pytest.raises(RuntimeError, match="deliver"):
        await asyncio.wait_for(loop.run(), 10)


async def test_deliver_may_call_back() -> None:
    """As a worker does that ends a job at its first token, or starts the next one."""
    rig = EngineRig()
    second = sequence_request(2, range(10))

    def deliver(outcome: Outcome) -> None:
        rig.note(outcome)
        for output in outcome.outputs:
            if output.seq_id == 1 and output.output_index == 0:
                loop.cancel(1)
                loop.add(second)

    loop = EngineLoop(rig.engine, rig.executor, deliver)
    async with running(loop):
        loop.add(sequence_request(1, range(30, 40), sampling={"ignore_eos": True}))
    assert len(rig.outputs[1, 0]) <= 2, "one more may have been on its way"
    rig.assert_answered(second)


async def test_steps_that_ran_as_planned_are_told_with_their_time() -> None:
    rig = EngineRig()
    told: list[tuple[int, float]] = []
    loop = EngineLoop(rig.engine, rig.executor, rig.note, lambda plan, step_s: told.append((plan.num_tokens, step_s)))
    async with running(loop):
        loop.add(sequence_request(1, range(9), max_tokens=3))
    assert [num_tokens for num_tokens, _ in told] == [9, 1, 1]
    assert all(0 <= step_s < 1 for _, step_s in told)


async def test_steps_that_failed_are_not_told() -> None:
    rig = EngineRig()
    told: list[object] = []
    loop = EngineLoop(rig.engine, rig.executor, rig.note, lambda plan, step_s: told.append(plan))
    rig.executor.guilty = lambda sequence: sequence.token_ids[0] == 7
    async with running(loop):
        loop.add(sequence_request(1, (7, 8, 9)))
        loop.add(sequence_request(2, (1, 2, 3), max_tokens=3))
        await turns()
    assert len(told) == 2
