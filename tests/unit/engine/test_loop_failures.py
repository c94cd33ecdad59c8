"""Exceptions in a step: attribution to one request or to the device."""

import asyncio

import pytest

from baton.core.errors import Code, Failure, Refused
from baton.core.kv.block_hash import BlockHash, TokenIds
from baton.engine.loop import EngineUnhealthy
from baton.engine.speculation.drafter import Draft
from baton.engine.speculation.speculation import Speculation
from baton.engine.state.step import DeviceFault, StepSequence
from tests.builders import sequence_request
from tests.engine_rig import EngineRig
from tests.unit.engine.loop_helpers import FAILURE, make_loop, running, turns


@pytest.mark.fault("F-12")
async def test_exception_fails_only_the_request_that_causes_it() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    requests = [sequence_request(i, range(i * 10, i * 10 + 6), sample_indices=(0, 1), max_tokens=6) for i in (1, 2, 3)]

    def raises_for(part: StepSequence) -> bool:
        """A step of request 2, once it decodes: with copies for all three in the same plan."""
        return part.kv_begin >= 6 and part.block_table[0] == rig.admissions[2].block_table[0]

    rig.executor.raises_for = raises_for
    async with running(loop):
        for request in requests:
            loop.add(request)
    for sample_index in (0, 1):
        end = rig.ends[2, sample_index]
        assert isinstance(end, Failure)
        assert (end.code, end.retriable) == (Code.INTERNAL, False)
    rig.assert_answered(requests[0], requests[2])
    rig.assert_clean()


async def test_failure_in_an_isolated_step_fails_that_sequence_too() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    requests = [sequence_request(i, range(i * 10, i * 10 + 6)) for i in (1, 2, 3)]
    rig.executor.raises_for = lambda part: part.seq_id == 1
    rig.executor.failing = lambda part: FAILURE if part.seq_id == 2 else None
    async with running(loop):
        for request in requests:
            loop.add(request)
    assert isinstance(rig.ends[1, 0], Failure)
    assert rig.ends[2, 0] is FAILURE
    rig.assert_answered(requests[2])


async def test_exception_that_does_not_repeat_fails_no_request() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    requests = [sequence_request(i, range(i * 10, i * 10 + 6), max_tokens=6) for i in (1, 2)]
    left = [True]
    rig.executor.raises_for = lambda _: bool(left) and left.pop()
    async with running(loop):
        for request in requests:
            loop.add(request)
    rig.assert_answered(*requests)


@pytest.mark.parametrize("num_seqs", [2, 3])
async def test_device_is_at_fault_if_all_requests_of_a_step_fail_in_isolation(num_seqs: int) -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    rig.executor.raises_for = lambda _: True
    for i in range(num_seqs):
        loop.add(sequence_request(i + 1, range(10)))
    with pytest.raises(EngineUnhealthy, match="restart") as unhealthy:
        await asyncio.wait_for(loop.run(), 10)
    assert isinstance(unhealthy.value.__cause__, RuntimeError)
    assert len(rig.executor.plans) == 1 + num_seqs  # bounded
    with pytest.raises(Refused):
        loop.add(sequence_request(99))


@pytest.mark.parametrize("sample_indices", [(0,), (0, 1, 2)])
async def test_request_that_fails_in_a_step_of_its_own_is_failed(
    sample_indices: tuple[int, ...],
) -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    rig.executor.raises_for = lambda part: part.kv_begin >= 6  # once it decodes, each sample as a sequence of its own
    bad = sequence_request(1, range(6), sample_indices=sample_indices, max_tokens=6, sampling={"ignore_eos": True})
    good = sequence_request(2, range(20, 30))
    async with running(loop):
        loop.add(bad)
        await turns(100)
        ends = [rig.ends[1, index] for index in sample_indices]
        assert all(isinstance(end, Failure) and (end.code, end.retriable) == (Code.INTERNAL, False) for end in ends)
        rig.executor.raises_for = lambda _: False
        loop.add(good)
    rig.assert_answered(good)
    rig.assert_clean()


async def test_device_is_at_fault_if_different_requests_fail_in_a_row() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    rig.executor.raises_for = lambda _: True
    task = asyncio.create_task(loop.run())
    loop.add(sequence_request(1, range(10)))
    await turns(100)
    assert not task.done()
    loop.add(sequence_request(2, range(10)))
    with pytest.raises(EngineUnhealthy, match=r"2 requests in a row .* \(the last: RuntimeError: injected"):
        await asyncio.wait_for(task, 10)
    assert list(rig.ends) == [(1, 0)]  # the second one gets no failure: it is retried on another worker


@pytest.mark.parametrize("in_same_step", [False, True])
async def test_success_between_failures_resets_the_count(in_same_step: bool) -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    rig.executor.raises_for = lambda part: part.token_ids[0] == 99
    good = [sequence_request(10 + i, range(i, i + 6)) for i in range(6)]
    async with running(loop):
        for i in range(6):
            loop.add(sequence_request(i, [99, 1, 2, 3]))
            if not in_same_step:
                await turns(100)
            loop.add(good[i])
            await turns(100)
    assert all(isinstance(rig.ends[i, 0], Failure) for i in range(6))
    rig.assert_answered(*good)
    rig.assert_clean()


class OneDraft:
    """Always drafts one token."""

    name = "one"
    learns = False

    def observe(self, key: int, token_ids: TokenIds, num_new: int, tenant: BlockHash) -> None:
        """Learn nothing."""

    def draft(self, key: int, token_ids: TokenIds, tenant: BlockHash) -> Draft | None:
        return Draft((1,))

    def forget(self, key: int) -> None:
        """Keep nothing."""


@pytest.mark.parametrize("fails_without_drafts", [False, True])
async def test_device_is_at_fault_only_if_requests_fail_without_drafts_too(fails_without_drafts: bool) -> None:
    rig = EngineRig(speculation=Speculation([OneDraft()], needs_costs=False))
    loop = make_loop(rig)
    requests = [sequence_request(i, range(i * 10, i * 10 + 6), max_tokens=6) for i in (1, 2, 3)]
    num_failed = 0

    def raises_for(part: StepSequence) -> bool:
        nonlocal num_failed
        num_failed += part.num_drafts
        return part.num_drafts > 0 or (fails_without_drafts and num_failed > 0)

    rig.executor.raises_for = raises_for
    task = asyncio.create_task(loop.run())
    for request in requests:
        loop.add(request)
    loop.drain()
    if fails_without_drafts:
        with pytest.raises(EngineUnhealthy, match="in a row"):
            await asyncio.wait_for(task, 10)
        return
    await asyncio.wait_for(task, 10)
    assert num_failed > 3
    rig.assert_answered(*requests)
    rig.assert_clean()


async def test_device_fault_is_not_retried() -> None:
    rig = EngineRig()
    loop = make_loop(rig)

    def fault(_: StepSequence) -> bool:
        raise DeviceFault("cuda:0: unspecified launch failure")

    rig.executor.raises_for = fault
    loop.add(sequence_request(1, range(10)))
    with pytest.raises(EngineUnhealthy, match="unspecified launch failure; restart"):
        await asyncio.wait_for(loop.run(), 10)
    assert len(rig.executor.plans) == 1
    assert rig.ends == {}


async def test_device_fault_during_isolation_ends_the_loop() -> None:
    rig = EngineRig()
    loop = make_loop(rig)
    errors = [RuntimeError("injected"), DeviceFault("cuda:0: gone")]

    def fault(_: StepSequence) -> bool:
        raise errors.pop(0)

    rig.executor.raises_for = fault
    for i in (1, 2):
        loop.add(sequence_request(i, range(10)))
    with pytest.raises(EngineUnhealthy, match="gone"):
        await asyncio.wait_for(loop.run(), 10)
    assert len(rig.executor.plans) == 2


async def test_failure_in_a_result_needs_no_isolation() -> None:
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
