"""The engine loop with a queued step: when it is withdrawn, and that none is left behind."""

import asyncio
from contextlib import suppress

import pytest

from baton.core.errors import Failure
from baton.engine.loop import EngineLoop
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.step import NothingToFollow, StepPlan, StepResult
from tests.builders import sequence_request
from tests.engine_rig import EngineRig
from tests.fake_executor import FakeExecutor
from tests.unit.engine.loop_helpers import FAILURE, make_loop, running, turns


async def test_next_step_is_queued_at_the_device_while_sequences_decode() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    requests = [sequence_request(i, range(i, i + 9), max_tokens=20, sampling={"ignore_eos": True}) for i in range(3)]
    for request in requests:
        loop.add(request)
    async with running(loop):
        pass
    rig.assert_answered(*requests)
    rig.assert_clean()
    assert (rig.executor.num_ahead, loop.steps_done) == (19, 20), "all steps except that of the prompts"


async def test_new_request_withdraws_the_queued_step() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    first, second = (sequence_request(i, range(i, i + 9), max_tokens=9, sampling={"ignore_eos": True}) for i in (1, 2))
    async with running(loop):
        loop.add(first)
        rig.executor.gate = asyncio.Event()
        await turns()
        loop.add(second)
        rig.executor.gate.set()
    assert [part.num_scheduled_tokens for part in rig.executor.plans[1].sequences] == [1, 9], (
        "the prompt is in the very next step"
    )
    rig.assert_answered(first, second)
    rig.assert_clean()


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 5, 20])
async def test_cancelled_loop_leaves_no_step_behind(num_turns: int) -> None:
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
        rig.pool.fence.step_finished()  # one step may have run
    with pytest.raises(ValueError, match="no step is in flight"):
        rig.pool.fence.step_finished()


async def test_exception_in_a_step_planned_ahead_fails_only_its_sequence() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    requests = [
        sequence_request(i, range(i * 10, i * 10 + 6), max_tokens=9, sampling={"ignore_eos": True}) for i in (1, 2, 3)
    ]
    rig.executor.raises_for = lambda part: part.seq_id == 2 and part.kv_begin >= 9
    async with running(loop):
        for request in requests:
            loop.add(request)
    assert isinstance(rig.ends[2, 0], Failure)
    assert len(rig.outputs[2, 0]) == 4
    rig.assert_answered(requests[0], requests[2])
    rig.assert_clean()


async def test_failed_step_whose_sequences_have_ended_is_ignored() -> None:
    rig = EngineRig()
    token, _ = rig.expected(sequence_request(1, range(6), sampling={"ignore_eos": True}), 0)
    rig = EngineRig(eos_token_ids=(token[2],))
    loop = make_loop(rig)
    rig.executor.raises_for = lambda part: part.kv_begin == 8  # of the first request: the step after its end
    second = sequence_request(2, range(20, 31), max_tokens=3)
    async with running(loop):
        loop.add(sequence_request(1, range(6), max_tokens=50))
        await turns(60)
        loop.add(second)
    assert rig.outputs[1, 0] == token[:3]
    rig.assert_answered(second)
    rig.assert_clean()


async def test_started_step_ends_before_its_blocks_are_reallocated() -> None:
    """A GPU may have started the queued step when the preceding step fails."""
    wrong, written = asyncio.Event(), asyncio.Event()
    tried: list[int | None] = []

    class StartsQueuedSteps(FakeExecutor):
        """Fails in step 3, and has started the step that follows it by then."""

        async def execute(self, plan: StepPlan) -> StepResult:
            if plan.step_id == 3:
                tried.append(plan.follows)
                await wrong.wait()
                raise RuntimeError("injected")
            if plan.follows == 3:
                await written.wait()
                raise NothingToFollow("the preceding step has failed")
            return await super().execute(plan)

        def withdraw(self, step_id: int) -> bool:
            return False

    rig = EngineRig(executor_type=StartsQueuedSteps)
    loop = make_loop(rig)
    request = sequence_request(1, range(6), max_tokens=9, sampling={"ignore_eos": True})
    async with running(loop):
        loop.add(request)
        await turns(50)
        wrong.set()
        await turns(50)
        assert tried == [2], "no other step runs in the meantime"
        assert loop.step_age_s() > 0, "the watchdog sees the step that is awaited"
        written.set()
        await turns(50)
        assert tried == [2, None]
    assert isinstance(rig.ends[1, 0], Failure)
    rig.assert_clean()


async def test_loop_that_ends_by_an_exception_of_deliver_leaves_no_step_behind() -> None:
    rig = EngineRig()

    def deliver(outcome: EngineOutcome) -> None:
        if any(output.output_index == 2 for output in outcome.outputs):
            raise RuntimeError("deliver")

    loop = EngineLoop(rig.engine, rig.executor, deliver)
    loop.add(sequence_request(1, range(9), max_tokens=20, sampling={"ignore_eos": True}))
    with pytest.raises(RuntimeError, match="deliver"):
        await asyncio.wait_for(loop.run(), 10)
    assert not [other.get_coro() for other in asyncio.all_tasks() - {asyncio.current_task()}]
    assert loop.step_started_s is None


async def test_deferred_tokens_are_delivered_before_a_failure() -> None:
    rig = EngineRig()
    outcomes: list[int | Failure] = []

    def deliver(outcome: EngineOutcome) -> None:
        for output in outcome.outputs:
            outcomes.append(output.failure or output.output_index)
            if output.output_index == 1 and not output.failure:
                loop.fail(1, FAILURE)

    loop = EngineLoop(rig.engine, rig.executor, deliver)
    async with running(loop):
        loop.add(sequence_request(1, range(10), max_tokens=50, sampling={"ignore_eos": True}))
    assert outcomes == [0, 1, 2, 3, FAILURE]
