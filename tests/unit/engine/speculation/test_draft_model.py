"""A draft model beside the engine: when it runs, what it computes again, and what its faults cost."""

import asyncio
from typing import Any

import pytest

from baton.core.request import Sampling
from baton.core.step_cost import StepCostModel
from baton.engine.loop import EngineLoop, EngineUnhealthy
from baton.engine.speculation.draft_model import MAX_FAILED_STEPS, DraftModel
from baton.engine.speculation.speculation import Speculation
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.sequence import SequenceRequest
from baton.engine.state.step import DeviceFault, StepPlan, StepResult
from tests.builders import sequence_request
from tests.engine_rig import EngineRig
from tests.unit.engine.loop_helpers import FAILURE, make_loop, running
from tests.unit.engine.speculation.fake_draft_model import DraftingExecutor, draft_model, run_round
from tests.unit.worker.virtual_loop import virtual

COSTS = StepCostModel(
    step_s=0.01, prefill_token_s=1e-4, prefill_attended_s=0, decode_seq_s=1e-4, decode_context_s=0, draft_token_s=1e-4
)


def rig_of(kind: str = "right", **limits: Any) -> tuple[EngineRig, DraftModel, DraftingExecutor]:
    model, device = draft_model(kind, **limits)
    return EngineRig(num_blocks=200, step_costs=lambda: COSTS, speculation=Speculation([], model=model)), model, device


def long_request(seq_id: int = 1, num_tokens: int = 6, **changes: Any) -> SequenceRequest:
    fields: dict[str, Any] = {"max_tokens": 60, "sampling": {"ignore_eos": True, "seed": seq_id}}
    return sequence_request(seq_id, range(seq_id, seq_id + num_tokens), **(fields | changes))


def run_to_end(rig: EngineRig) -> int:
    """Run rounds and steps until nothing is left. Returns the number of steps."""
    for num_steps in range(500):
        if not rig.engine.is_idle:
            run_round(rig.engine)
        if rig.step().is_empty:
            return num_steps
    raise AssertionError("no end")


def test_right_drafts_save_steps() -> None:
    rig, _, device = rig_of()
    request = rig.add(long_request())
    assert run_to_end(rig) < 20
    rig.assert_answered(request)
    rig.assert_clean()
    counters = rig.engine.counters
    assert counters.accepted_draft_tokens == counters.draft_tokens > 40
    assert not device.wrong
    assert device.pool.counts().used == 0


def test_wrong_drafts_end_soon_and_cost_little() -> None:
    rig, _, device = rig_of("wrong")
    requests = [rig.add(long_request(seq_id, max_tokens=200)) for seq_id in (1, 2)]
    run_to_end(rig)
    rig.assert_answered(*requests)
    assert 0 < device.num_steps < 60


def test_model_is_asked_once_a_step_for_all_sequences_together() -> None:
    rig, _, device = rig_of()
    for seq_id in (1, 2, 3):
        rig.add(long_request(seq_id))
    rig.run_until(lambda: len(rig.outputs) == 3)
    before = device.num_steps
    found = run_round(rig.engine)
    assert len(found) == 3
    assert device.num_steps - before == max(map(len, found.values()))


def test_no_round_while_a_prompt_waits() -> None:
    rig, _, device = rig_of()
    rig.add(long_request())
    rig.step()
    rig.add(long_request(2, num_tokens=100))
    assert run_round(rig.engine) == {}
    assert device.num_steps == 0


def test_prompt_is_computed_in_pieces_before_the_first_draft() -> None:
    rig, model, device = rig_of(num_blocks=200)
    rig.add(long_request(num_tokens=300, max_tokens=200))
    rig.run_until(lambda: bool(rig.outputs[1, 0]))
    num_rounds = 0
    while not run_round(rig.engine):
        num_rounds += 1
        rig.step()
    assert num_rounds >= 2
    assert max(plan.num_tokens for plan in device.plans) <= 256
    assert not device.wrong
    (seq,) = rig.engine._sequences.running.values()
    assert model.kv.num_missing(seq) == 1


def test_kv_is_found_again_after_a_preemption_and_shared_between_requests() -> None:
    rig, model, device = rig_of()
    rig.add(long_request(num_tokens=41))
    rig.run_until(lambda: bool(rig.outputs[1, 0]))
    while not run_round(rig.engine):
        rig.step()
    rig.step()
    (seq,) = rig.engine._sequences.running.values()
    model.kv.forget(seq.key)  # as if it had been preempted for long
    assert model.kv.num_missing(seq) <= len(seq.token_ids) - 40
    rig.add(long_request(2, num_tokens=41, sampling={"ignore_eos": True, "seed": 5}))
    run_to_end(rig)
    rig.assert_clean()
    assert not device.wrong


def test_sequence_that_comes_with_pulled_kv_is_computed_by_the_draft_model() -> None:
    rig, _model, device = rig_of()
    request = rig.add(long_request(num_tokens=21, pulled=True))
    rig.step()
    rig.mark_received(request)
    rig.engine.received(1, rig.first_tokens(request))
    run_to_end(rig)
    rig.assert_answered(request)
    assert rig.engine.counters.accepted_draft_tokens > 30
    assert not device.wrong


def test_samples_draft_separately_after_they_forked() -> None:
    rig, _, device = rig_of()
    request = rig.add(long_request(sample_indices=(0, 1, 2), max_tokens=40))
    run_to_end(rig)
    rig.assert_answered(request)
    rig.assert_clean()
    assert rig.engine.counters.accepted_draft_tokens > 60
    assert not device.wrong


def test_drafts_stop_where_the_draft_model_ends() -> None:
    rig, _model, device = rig_of(max_model_len=20)
    request = rig.add(long_request())
    run_to_end(rig)
    rig.assert_answered(request)
    assert max(part.context_len for plan in device.plans for part in plan.sequences) <= 20
    assert 0 < rig.engine.counters.draft_tokens <= 14


def test_tokens_that_the_verifying_model_does_not_have_are_not_drafted() -> None:
    rig, _, _ = rig_of(vocab_size=1)
    request = rig.add(long_request())
    run_to_end(rig)
    rig.assert_answered(request)


def test_failing_sequence_has_no_more_drafts_and_others_go_on() -> None:
    rig, _, device = rig_of()
    requests = [rig.add(long_request(seq_id)) for seq_id in (1, 2)]
    device.failing = lambda part: FAILURE if part.seq_id == 1 else None
    run_to_end(rig)
    rig.assert_answered(*requests)
    assert sum(part.seq_id == 1 for plan in device.plans for part in plan.sequences) == 1
    assert rig.engine.counters.accepted_draft_tokens > 30
    rig.assert_clean()


def test_sequence_whose_steps_fail_gets_no_drafts_until_its_next_token() -> None:
    """A step with drafts that fails is repeated without them. Else a sequence that fails would never end."""
    rig, _, _ = rig_of()
    rig.add(long_request())
    rig.run_until(lambda: bool(rig.outputs[1, 0]))
    plans = rig.executor.plans
    rig.executor.failing = lambda part: FAILURE if plans[-1].sequences[0].num_drafts else None
    for _ in range(4):  # pairs of a step with drafts that fails, and one without that does not
        run_round(rig.engine)
        rig.step()
    assert [plan.sequences[0].num_drafts > 0 for plan in plans[-4:]] == [True, False] * 2
    rig.executor.failing = lambda part: FAILURE
    run_to_end(rig)
    assert rig.ends[1, 0] == FAILURE
    rig.assert_clean()


def test_model_whose_steps_fail_is_given_up() -> None:
    rig, model, device = rig_of()
    device.raising = set(range(1, 100))
    request = rig.add(long_request())
    run_to_end(rig)
    rig.assert_answered(request)
    assert device.num_steps == MAX_FAILED_STEPS
    assert model.costs is None
    assert device.pool.counts().used == 0


def test_full_draft_pool_means_no_drafts() -> None:
    rig, _, device = rig_of(num_blocks=2)
    request = rig.add(long_request(num_tokens=12))
    run_to_end(rig)
    rig.assert_answered(request)
    assert not device.wrong


def test_sequence_that_cannot_fit_into_the_draft_pool_is_not_followed() -> None:
    """Rounds that compute nothing would only keep steps from being planned ahead."""
    rig, _, _ = rig_of(num_blocks=40)
    rig.add(long_request(num_tokens=300, max_tokens=200))
    rig.run_until(lambda: bool(rig.outputs[1, 0]))
    drafts = rig.engine.drafts
    assert drafts is not None
    assert not any(drafts.plan_round() for _ in range(50))


@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 1.5}, {"min_tokens": 20, "ignore_eos": False}])
def test_model_draws_with_the_parameters_of_the_request(sampling: dict[str, Any]) -> None:
    rig, _, device = rig_of()
    rig.add(long_request(sampling={"ignore_eos": True, "seed": 7, "num_logprobs": 3} | sampling))
    run_to_end(rig)
    samples = [part.sample for plan in device.plans for part in plan.sequences if part.sample is not None]
    expected = {"ignore_eos": True, "seed": 7} | sampling
    assert {sample.sampling for sample in samples} == {Sampling(max_tokens=60, **expected)}


@virtual
async def test_loop_runs_the_model_between_steps_and_not_as_part_of_them() -> None:
    """A round of the draft model takes virtual time here, a step none. It delays the delivery of no token."""
    took: list[float] = []
    waited: list[float] = []
    model, device = draft_model()
    execute = device.execute

    async def slowly(plan: StepPlan) -> StepResult:
        await asyncio.sleep(0.05)
        return await execute(plan)

    def deliver(outcome: EngineOutcome) -> None:
        if outcome.outputs:
            waited.append(asyncio.get_running_loop().time() - loop.last_step_ended_s)
        rig.note(outcome)

    device.execute = slowly  # type: ignore[method-assign]
    rig = EngineRig(step_costs=lambda: COSTS, speculation=Speculation([], model=model))
    loop = EngineLoop(rig.engine, rig.executor, deliver, lambda plan, step_s: took.append(step_s))
    async with running(loop):
        loop.add(request := long_request())
    rig.assert_answered(request)
    rig.assert_clean()
    assert rig.engine.counters.steps < 20
    assert device.num_steps > 40
    assert sum(took) == sum(waited) == 0.0


@virtual
async def test_device_fault_of_the_draft_model_makes_the_worker_unhealthy() -> None:
    rig, _model, device = rig_of()

    async def execute(plan: StepPlan) -> None:
        raise DeviceFault("injected")

    device.execute = execute  # type: ignore[method-assign,assignment]
    loop = make_loop(rig)
    with pytest.raises(EngineUnhealthy, match="injected"):
        async with running(loop):
            loop.add(long_request())


@virtual
async def test_watchdog_sees_a_step_of_the_draft_model_that_never_ends() -> None:
    rig, _, device = rig_of()

    async def execute(plan: StepPlan) -> StepResult:
        await asyncio.sleep(1000)
        raise AssertionError

    device.execute = execute  # type: ignore[method-assign]
    loop = make_loop(rig)
    task = asyncio.create_task(loop.run())
    loop.add(long_request())
    await asyncio.sleep(5)
    assert loop.step_age_s() > 4
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert loop.step_age_s() == 0
