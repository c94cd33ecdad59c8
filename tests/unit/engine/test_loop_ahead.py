"""The loop while the next step waits at the device: what takes it back, and that none is left behind."""

import asyncio
from contextlib import suppress

import pytest

from baton.core.errors import Failure
from baton.engine.loop import EngineLoop
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.step import NothingToFollow, StepPlan, StepResult
from tests.builders import sequence_request
from tests.engine_rig import EngineRig
from tests.unit.engine.loops import FAILURE, make_loop, running, turns


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
    requests = [
        sequence_request(i, range(i * 10, i * 10 + 6), max_tokens=9, sampling={"ignore_eos": True}) for i in (1, 2, 3)
    ]
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


async def test_a_step_that_the_device_has_begun_ends_before_anybody_gets_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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

    def deliver(outcome: EngineOutcome) -> None:
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

    def deliver(outcome: EngineOutcome) -> None:
        for output in outcome.outputs:
            outcomes.append(output.failure or output.output_index)
            if output.output_index == 1 and not output.failure:
                loop.fail(1, FAILURE)

    loop = EngineLoop(rig.engine, rig.executor, deliver)
    async with running(loop):
        loop.add(sequence_request(1, range(10), max_tokens=50, sampling={"ignore_eos": True}))
    assert outcomes == [0, 1, 2, 3, FAILURE]
