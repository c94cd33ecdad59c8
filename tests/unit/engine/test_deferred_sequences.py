"""Sequences whose mask is not ready are deferred: their tokens are drawn later, and are the same."""

from random import Random

import pytest

from baton.engine.state.step import StepSequence
from tests.builders import sequence_request
from tests.engine_rig import EngineRig
from tests.unit.engine.loop_helpers import make_loop, running, turns


@pytest.mark.fault("F-55")
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("num_blocks", [64, 12])
async def test_answers_do_not_depend_on_deferred_steps(rate: float, num_blocks: int) -> None:
    num_deferred = 0

    def deferring(_: StepSequence) -> bool:
        nonlocal num_deferred
        is_deferred = rng.random() < rate
        num_deferred += is_deferred
        return is_deferred

    for seed in range(8):
        rng = Random(seed)
        rig = EngineRig(num_blocks)
        rig.executor.deferring = deferring
        loop = make_loop(rig)
        requests = [
            sequence_request(
                number,
                range(number, number + rng.choice((1, 4, 8, 9, 17))),
                max_tokens=rng.randint(1, 9),
                sampling={"ignore_eos": True, "seed": number},
                sample_indices=tuple(range(rng.choice((1, 1, 1, 2)))),
                priority=rng.randint(0, 1),
            )
            for number in range(1, 6)
        ]
        async with running(loop):
            for request in requests:
                loop.add(request)
                await turns(rng.randint(0, 12))
        rig.assert_answered(*requests)
        rig.assert_clean()
    assert num_deferred > 10


@pytest.mark.fault("F-55")
async def test_sequence_that_is_always_deferred_does_not_hold_up_others() -> None:
    rig = EngineRig()
    rig.executor.deferring = lambda part: part.seq_id == 1
    loop = make_loop(rig)
    first, second = (sequence_request(i, range(i, i + 9), max_tokens=9, sampling={"ignore_eos": True}) for i in (1, 2))
    async with running(loop):
        loop.add(first)
        loop.add(second)
        await turns(150)
        assert (2, 0) in rig.ends
        assert not rig.outputs[1, 0]
        rig.executor.deferring = lambda part: False
    rig.assert_answered(first, second)
    rig.assert_clean()


async def test_step_that_raises_is_isolated_with_its_deferred_sequences() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    requests = [
        sequence_request(i, range(i * 10, i * 10 + 6), max_tokens=9, sampling={"ignore_eos": True}) for i in (1, 2, 3)
    ]
    rng = Random(1)
    rig.executor.raises_for = lambda part: part.seq_id == 2 and part.kv_begin >= 9
    rig.executor.deferring = lambda part: part.seq_id == 3 and rng.random() < 0.5
    async with running(loop):
        for request in requests:
            loop.add(request)
    assert len(rig.outputs[2, 0]) == 4
    rig.assert_answered(requests[0], requests[2])
    rig.assert_clean()
