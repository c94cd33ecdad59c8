"""The engine loop: delivery order, draining, waking and step times."""

import asyncio

import pytest

from baton.core.errors import Reason, Refused
from baton.engine.engine import Engine
from baton.engine.loop import EngineLoop
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.step import StepPlan
from tests.builders import sequence_request
from tests.engine_rig import EngineRig
from tests.unit.engine.loop_helpers import FAILURE, make_loop, running, turns


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


async def test_drained_loop_refuses_requests() -> None:
    loop = make_loop(EngineRig())
    async with running(loop):
        pass
    with pytest.raises(Refused) as refused:
        loop.add(sequence_request())
    assert refused.value.failure.reason is Reason.DRAINING


async def test_draining_loop_finishes_present_and_late_sequences() -> None:
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
        rig.mark_received(pulled)
        loop.received(1, rig.first_tokens(pulled))
    rig.assert_answered(pulled, late)


async def test_requests_are_refused_immediately() -> None:
    rig = EngineRig(max_waiting_seqs=2, max_model_len=50)
    loop = make_loop(rig)
    with pytest.raises(Refused, match="length"):
        loop.add(sequence_request(9, range(60)))
    loop.add(sequence_request(1))
    with pytest.raises(ValueError, match="already in use"):
        loop.add(sequence_request(1))
    loop.add(sequence_request(2))
    with pytest.raises(Refused) as refused:
        loop.add(sequence_request(3))
    assert refused.value.failure.reason is Reason.QUEUE_FULL


async def test_calls_take_effect_after_the_running_step_in_order() -> None:
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


async def test_tokens_of_continuing_sequences_are_delivered_in_order_during_the_next_step() -> None:
    rig = EngineRig()
    running_at: list[tuple[int, bool]] = []

    def deliver(outcome: EngineOutcome) -> None:
        rig.note(outcome)
        running_at.extend((output.output_index, loop.step_started_s is not None) for output in outcome.outputs)

    loop = EngineLoop(rig.engine, rig.executor, deliver)
    request = sequence_request(1, range(10), max_tokens=4, sampling={"ignore_eos": True})
    async with running(loop):
        loop.add(request)
    assert running_at == [(0, False), (1, True), (2, True), (3, False)], (
        "the first and the last token are delivered immediately"
    )
    rig.assert_answered(request)


async def test_blocks_freed_by_a_transfer_wake_the_loop() -> None:
    rig = EngineRig(num_blocks=6)
    first, second = (
        sequence_request(1, range(10, 26), prefill_only=True),
        sequence_request(2, range(40, 56), max_tokens=3),
    )

    def deliver(outcome: EngineOutcome) -> None:
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


async def test_blocked_queue_does_not_spin() -> None:
    plans = 0

    class CountingEngine(Engine):
        def plan(self) -> StepPlan:
            nonlocal plans
            plans += 1
            return super().plan()

    rig = EngineRig(num_blocks=6, engine_type=CountingEngine)
    loop = make_loop(rig)
    held = rig.pool.allocate(4)
    assert held is not None
    async with running(loop):
        loop.add(sequence_request(1, range(12)))
        await turns(100)
        assert plans <= 3
        rig.pool.unref(held)


async def test_immediate_steps_do_not_starve_other_tasks() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    async with running(loop):
        loop.add(sequence_request(1, range(10), max_tokens=200, sampling={"ignore_eos": True}))
        await turns(10)
        assert 0 < loop.steps_done < 20
        loop.cancel(1)


async def test_step_age_is_zero_between_steps() -> None:
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


async def test_exception_of_deliver_ends_the_loop() -> None:
    rig = EngineRig()

    def deliver(_: EngineOutcome) -> None:
        raise RuntimeError("deliver")

    loop = EngineLoop(rig.engine, rig.executor, deliver)
    loop.add(sequence_request())
    with pytest.raises(RuntimeError, match="deliver"):
        await asyncio.wait_for(loop.run(), 10)


async def test_deliver_may_call_methods_of_the_loop() -> None:
    """A worker ends a job at its first token, or starts the next one."""
    rig = EngineRig()
    second = sequence_request(2, range(10))

    def deliver(outcome: EngineOutcome) -> None:
        rig.note(outcome)
        for output in outcome.outputs:
            if output.seq_id == 1 and output.output_index == 0:
                loop.cancel(1)
                loop.add(second)

    loop = EngineLoop(rig.engine, rig.executor, deliver)
    async with running(loop):
        loop.add(sequence_request(1, range(30, 40), sampling={"ignore_eos": True}))
    assert len(rig.outputs[1, 0]) <= 2, "one more may have been computed already"
    rig.assert_answered(second)


async def test_on_step_gets_each_step_with_its_duration() -> None:
    rig = EngineRig()
    observed: list[tuple[int, float]] = []
    loop = EngineLoop(
        rig.engine, rig.executor, rig.note, lambda plan, step_s: observed.append((plan.num_tokens, step_s))
    )
    began_s = asyncio.get_running_loop().time()
    async with running(loop):
        loop.add(sequence_request(1, range(9), max_tokens=3))
    took_s = asyncio.get_running_loop().time() - began_s
    assert [num_tokens for num_tokens, _ in observed] == [9, 1, 1]
    assert all(step_s >= 0 for _, step_s in observed)
    assert sum(step_s for _, step_s in observed) <= took_s


async def test_step_duration_includes_planning_but_no_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    observed, now_s, done = list[float](), [100.0], asyncio.Event()
    plan_s, idle_s = 0.01, 0.5
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s[0])

    class SlowEngine(Engine):
        def plan(self) -> StepPlan:
            now_s[0] += plan_s
            return super().plan()

    rig = EngineRig(engine_type=SlowEngine)

    def deliver(outcome: EngineOutcome) -> None:
        if any(output.finish is not None for output in outcome.outputs):
            done.set()

    loop = EngineLoop(rig.engine, rig.executor, deliver, lambda plan, step_s: observed.append(step_s))
    async with running(loop):
        loop.add(sequence_request(1, range(200), max_tokens=1))
        await done.wait()
        await turns()
        now_s[0] += idle_s
        loop.add(sequence_request(2, range(9), max_tokens=1))
        await turns()
    assert len(observed) >= 2
    assert observed == pytest.approx([plan_s] * len(observed)), "the device takes no time here"


async def test_on_step_gets_no_failed_steps() -> None:
    rig = EngineRig()
    observed: list[object] = []
    loop = EngineLoop(rig.engine, rig.executor, rig.note, lambda plan, step_s: observed.append(plan))
    rig.executor.raises_for = lambda sequence: sequence.token_ids[0] == 7
    async with running(loop):
        loop.add(sequence_request(1, (7, 8, 9)))
        loop.add(sequence_request(2, (1, 2, 3), max_tokens=3))
        await turns()
    assert len(observed) == 2
