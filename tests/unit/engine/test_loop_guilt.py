"""Who is guilty of an exception in a step: one request, or the device."""

import asyncio

import pytest

from baton.core.errors import Code, Failure, Refused
from baton.engine.loop import EngineUnhealthy
from baton.engine.state.step import DeviceFault, StepSequence
from tests.builders import sequence_request
from tests.engine_rig import EngineRig
from tests.unit.engine.loops import FAILURE, make_loop, running, turns


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
async def test_a_request_that_fails_with_nobody_beside_it_is_charged_like_any_other(
    sample_indices: tuple[int, ...],
) -> None:
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
