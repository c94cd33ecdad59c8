"""Tests steps of a tiny model on `TorchExecutor`: an error must affect only the sequence that caused it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, PreTrainedConfig

from baton.core.errors import Code, LayoutMismatch, Reason
from baton.core.kv.block_hash import token_ids
from baton.core.request import Sampling
from baton.engine.scheduling.async_scheduling import PLACEHOLDER
from baton.engine.state.step import (
    DeviceFault,
    Executor,
    NothingToFollow,
    SampleRequest,
    StepPlan,
    StepResult,
    StepSequence,
)
from baton.model.backends.backend_selection import Backend, choose_backend
from baton.model.device.compute_thread import compute_thread
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.step.forward import ModelForward
from baton.model.step.step_launch import LaunchedStep, StepLauncher
from baton.model.torch_executor import TorchExecutor
from baton.runtime.failpoints import FailpointError, Failpoints
from tests.delayed_device import DelayedEvent, record_delayed_event
from tests.model_families import TINY

SIZE = 4


@pytest.fixture(scope="module")
def loaded(tiny_dir: Path) -> LoadedModel:
    return load_model(tiny_dir, device="cpu")


class ObservedLauncher(StepLauncher):
    """Calls `on_launch` with the plan and the step that it follows, before each launch."""

    def __init__(
        self, *arguments: Any, on_launch: Callable[[StepPlan, LaunchedStep | None], None], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._on_launch = on_launch

    def launch(self, plan: StepPlan, after: LaunchedStep | None = None) -> LaunchedStep:
        self._on_launch(plan, after)
        return super().launch(plan, after)


@pytest.fixture
def launching_threads() -> list[str]:
    """Return the names of the threads that launched the steps of `executor`."""
    return []


@pytest.fixture(params=["torch", "auto"])
def executor(
    loaded: LoadedModel, launching_threads: list[str], request: pytest.FixtureRequest
) -> Iterator[TorchExecutor]:
    backend = choose_backend(loaded, kernels=request.param, num_threads=1, block_size_tokens=SIZE)

    def note_thread(plan: StepPlan, after: LaunchedStep | None) -> None:
        launching_threads.append(threading.current_thread().name)

    executor = TorchExecutor(
        loaded.model,
        KvCache.zeros(loaded.layout(SIZE), 32),
        thread=compute_thread(1),
        backend=backend,
        new_launcher=partial(ObservedLauncher, on_launch=note_thread),
    )
    yield executor
    executor.close()


def part(
    seq_id: int, tokens: list[int], *, begin: int = 0, blocks: tuple[int, ...] = (), sampled: bool = True
) -> StepSequence:
    """Return a greedy sequence with logprobs. Blocks default to `4 * seq_id` and following."""
    end = begin + len(tokens)
    sample = SampleRequest(
        sampling=Sampling(max_tokens=9, temperature=0.0, num_logprobs=3),
        sample_indices=(0,),
        position=end,
        history=token_ids(tokens),
        num_prompt_tokens=len(tokens),
    )
    return StepSequence(
        seq_id=seq_id,
        token_ids=token_ids(tokens),
        position_begin=begin,
        kv_begin=begin,
        block_table=blocks or tuple(range(4 * seq_id, 4 * seq_id + 4)),
        sample=sample if sampled else None,
    )


def plan(*sequences: StepSequence, copies: tuple[tuple[int, int], ...] = ()) -> StepPlan:
    return StepPlan(step_id=1, sequences=sequences, block_copies=copies)


GOOD = (part(0, [1, 2, 3]), part(1, [9, 8, 7, 6, 5]), part(2, [4]))


def assert_same(found: StepResult, expected: StepResult, seq_ids: tuple[int, ...]) -> None:
    """Compare tokens exactly, and logprobs within the rounding of another batch."""
    assert set(found.samples) == set(seq_ids)
    for seq_id in seq_ids:
        (a,), (b,) = found.samples[seq_id], expected.samples[seq_id]
        assert a.token_id == b.token_id
        assert a.logprobs is not None
        assert b.logprobs is not None
        assert a.logprobs.logprob == pytest.approx(b.logprobs.logprob, abs=1e-5)


async def test_torch_executor_implements_executor(executor: TorchExecutor, loaded: LoadedModel) -> None:
    protocol: Executor = executor
    assert protocol.layout == loaded.layout(SIZE)
    assert protocol.num_blocks == 32
    result = await protocol.execute(plan(*GOOD))
    assert set(result.samples) == {0, 1, 2}
    assert result.step_id == 1
    await protocol.aclose()
    with pytest.raises(RuntimeError):
        await protocol.execute(plan(*GOOD))


async def test_steps_run_in_one_dedicated_thread(executor: TorchExecutor, launching_threads: list[str]) -> None:
    await executor.execute(plan(GOOD[0]))
    await executor.execute(plan(GOOD[0]))
    assert len(launching_threads) == 2
    assert len(set(launching_threads)) == 1
    assert threading.main_thread().name not in launching_threads


async def test_only_a_step_queued_behind_another_can_be_withdrawn(executor: TorchExecutor) -> None:
    """This holds even if no step has begun yet, because the thread is slow to take its work."""
    held = threading.Event()
    executor._thread.submit(held.wait)
    steps = [asyncio.create_task(executor.execute(replace(plan(GOOD[0]), step_id=step_id))) for step_id in (1, 2)]
    await asyncio.sleep(0)
    assert not executor.withdraw(3), "it is not here yet, and takes no other's place"
    assert not executor.withdraw(1)
    assert executor.withdraw(2)
    held.set()
    assert set((await steps[0]).samples) == {0}
    with pytest.raises(asyncio.CancelledError):
        await steps[1]


def test_chunked_prefill_equals_one_pass(executor: TorchExecutor) -> None:
    tokens = [5, 6, 7, 8, 9, 10, 11]
    whole = executor.run(plan(part(0, tokens)))
    first = executor.run(plan(part(1, tokens[:5], sampled=False), part(0, [1])))
    assert set(first.samples) == {0}
    rest = executor.run(plan(part(1, tokens[5:], begin=5)))
    assert rest.samples[1][0].token_id == whole.samples[0][0].token_id


def test_step_without_samples_returns_none(executor: TorchExecutor) -> None:
    found = executor.run(plan(part(0, [1, 2], sampled=False)))
    assert (found.samples, found.failures) == ({}, {})


def test_block_copies_run_before_the_step(executor: TorchExecutor) -> None:
    """One step copies a block and reads the copy; another only copies."""
    tokens = [5, 6, 7, 8, 9]
    whole = executor.run(plan(part(0, tokens)))
    executor.run(plan(part(1, tokens[:4], sampled=False)))
    copied = executor.run(plan(part(2, tokens[4:], begin=4, blocks=(20, 21)), copies=((4, 20),)))
    assert copied.samples[2][0].token_id == whole.samples[0][0].token_id
    executor.run(plan(copies=((20, 22),)))
    again = executor.run(plan(part(2, tokens[4:], begin=4, blocks=(22, 23))))
    assert again.samples == copied.samples


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (part(1, [256]), "vocabulary"),
        (part(1, [1, 2], begin=15), "needs 5"),
        (part(1, [1], blocks=(32,)), "0 to 31"),
        (replace(part(1, [1]), token_ids=token_ids()), "0 tokens"),
    ],
)
def test_invalid_inputs_fail_only_their_sequence(executor: TorchExecutor, bad: StepSequence, named: str) -> None:
    expected = executor.run(plan(GOOD[0], GOOD[2]))
    found = executor.run(plan(GOOD[0], bad, GOOD[2]))
    assert found.failures[1].code is Code.INTERNAL
    assert named in found.failures[1].message
    assert_same(found, expected, (0, 2))


def test_step_with_only_invalid_inputs(executor: TorchExecutor) -> None:
    found = executor.run(plan(part(1, [999])))
    assert set(found.failures) == {1}
    assert not found.samples


@pytest.mark.parametrize("sampled", [True, False])
def test_nan_fails_only_its_sequence(executor: TorchExecutor, loaded: LoadedModel, sampled: bool) -> None:
    """The embedding of one token is NaN. Its sequence fails even if no token is sampled from it; the others
    succeed."""
    embedding = loaded.model.get_input_embeddings().weight
    expected = executor.run(plan(GOOD[0], GOOD[2]))
    kept = embedding[77].clone()
    try:
        embedding[77] = float("nan")
        found = executor.run(plan(GOOD[0], part(1, [6, 77, 5], sampled=sampled), GOOD[2]))
    finally:
        embedding[77] = kept
    assert found.failures[1].reason is Reason.NUMERICAL_ERROR
    assert_same(found, expected, (0, 2))
    # The NaN left in memory does not affect the next owner of the blocks, not even in slots it has not
    # written.
    again = executor.run(plan(replace(GOOD[0], block_table=(4, 5, 6, 7)), GOOD[2]))
    assert_same(again, expected, (0, 2))


def test_nan_fails_only_its_sequence_in_bfloat16(tiny_dir: Path) -> None:
    """Uses the native decoder if the processor supports it."""
    half = load_model(tiny_dir, dtype="bfloat16", device="cpu")
    backend = choose_backend(half, kernels="auto", num_threads=2, block_size_tokens=SIZE)
    executor = TorchExecutor(
        half.model, KvCache.zeros(half.layout(SIZE), 32), thread=compute_thread(2), backend=backend
    )
    expected = executor.run(plan(GOOD[0], GOOD[2]))
    embedding = half.model.get_input_embeddings().weight
    kept = embedding[77].clone()
    embedding[77] = float("nan")
    for sampled in (True, False):
        found = executor.run(plan(GOOD[0], part(1, [6, 77, 5], sampled=sampled), GOOD[2]))
        assert found.failures[1].reason is Reason.NUMERICAL_ERROR
        assert_same(found, expected, (0, 2))
    embedding[77] = kept
    again = executor.run(plan(replace(GOOD[0], block_table=(4, 5, 6, 7)), GOOD[2]))
    assert_same(again, expected, (0, 2))
    executor.close()


def test_nan_kv_outside_the_window_is_found(save: Callable[[PreTrainedConfig], Path]) -> None:
    """With a short window the sampled token does not see the NaN: its logits are finite, but some KV is
    not."""
    loaded = load_model(save(MistralConfig(**TINY, sliding_window=2)), device="cpu")
    loaded.model.get_input_embeddings().weight[77] = float("nan")
    executor = TorchExecutor(loaded.model, KvCache.zeros(loaded.layout(SIZE), 100), thread=compute_thread(1))
    tokens = [77, *range(1, 77), *range(78, 256), *range(60)]  # beyond the reach of tiles and layers
    found = executor.run(plan(GOOD[0], part(1, tokens, blocks=tuple(range(12, 100))), GOOD[2]))
    executor.close()
    assert found.failures[1].reason is Reason.NUMERICAL_ERROR
    assert set(found.samples) == {0, 2}


def test_model_and_kv_memory_of_different_dtypes_are_refused(loaded: LoadedModel) -> None:
    layout = loaded.layout(SIZE)
    (group,) = layout.groups
    half_group = replace(group, components=tuple(replace(c, dtype="bfloat16") for c in group.components))
    half = KvCache.zeros(replace(layout, groups=(half_group,)), 4)
    with pytest.raises(LayoutMismatch, match="bfloat16"):
        TorchExecutor(loaded.model, half, thread=compute_thread(1))


@pytest.fixture
def armed(loaded: LoadedModel) -> Iterator[Callable[[str], TorchExecutor]]:
    """Return a function that makes an executor with the given failpoints."""
    executors = []

    def arm(rules: str) -> TorchExecutor:
        executors.append(
            TorchExecutor(
                loaded.model,
                KvCache.zeros(loaded.layout(SIZE), 32),
                thread=compute_thread(1),
                new_launcher=partial(StepLauncher, failpoints=Failpoints(rules)),
            )
        )
        return executors[-1]

    yield arm
    for executor in executors:
        executor.close()


def test_failpoint_in_one_sequence_fails_only_it(
    armed: Callable[[str], TorchExecutor], executor: TorchExecutor
) -> None:
    expected = executor.run(plan(*GOOD))
    found = armed("sequence_step[token=8]=raise:poisoned").run(plan(*GOOD))
    assert "poisoned" in found.failures[1].message
    assert_same(found, expected, (0, 2))


def test_failpoint_in_the_logits_fails_only_its_sequence(
    armed: Callable[[str], TorchExecutor], executor: TorchExecutor
) -> None:
    expected = executor.run(plan(*GOOD))
    found = armed("logits[token=5]=raise").run(plan(*GOOD))
    assert found.failures[1].reason is Reason.NUMERICAL_ERROR
    assert_same(found, expected, (0, 2))


async def test_failpoint_in_the_step_raises_for_the_whole_step(armed: Callable[[str], TorchExecutor]) -> None:
    executor = armed("executor_step=raise:device@1")
    with pytest.raises(FailpointError, match="device"):
        await executor.execute(plan(*GOOD))
    assert len((await executor.execute(plan(*GOOD))).samples) == 3


async def test_device_failure_raises_device_fault(loaded: LoadedModel) -> None:
    def kernel(*_args: object, **_kwargs: object) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    executor = TorchExecutor(
        loaded.model,
        KvCache.zeros(loaded.layout(SIZE), 32),
        thread=compute_thread(1),
        backend=Backend(name="counted", forward=ModelForward(loaded.model), kernel=kernel),
    )
    with pytest.raises(DeviceFault, match="cpu: CUDA error: unspecified launch failure"):
        await executor.execute(plan(*GOOD))
    executor.close()


class Late:
    """An executor on a device that computes late. `launched`: (step, the step that was still computing
    then)."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.events: list[DelayedEvent] = []
        self.record_event: Callable[[torch.device], DelayedEvent] = record_delayed_event
        self.executor = TorchExecutor(
            loaded.model,
            KvCache.zeros(loaded.layout(SIZE), 32),
            thread=compute_thread(1),
            new_launcher=partial(ObservedLauncher, on_launch=self._before_launch, record_event=self._record),
        )
        self.launched: list[tuple[int, int | None]] = []
        self.fails_at: int | None = None
        self._are_submitted = False

    def _record(self, device: torch.device) -> DelayedEvent:
        event = self.record_event(device)
        event.may_end = lambda: self._are_submitted
        self.events.append(event)
        return event

    def _before_launch(self, plan: StepPlan, after: LaunchedStep | None) -> None:
        self.launched.append((plan.step_id, after.step_id if after is not None else None))
        if plan.step_id == self.fails_at:
            raise RuntimeError("injected")

    async def run(self, *plans: StepPlan) -> list[StepResult | BaseException]:
        self._are_submitted = False
        running = asyncio.gather(*map(self.executor.execute, plans), return_exceptions=True)
        await asyncio.sleep(0)  # each task submits its step
        self._are_submitted = True
        return await running


@pytest.fixture
def late(loaded: LoadedModel) -> Iterator[Late]:
    late = Late(loaded)
    yield late
    late.executor.close()


def following(step: StepPlan, **sampling: Any) -> StepPlan:
    """Return the step in which each sequence continues with the token that it draws."""
    parts = []
    for one in step.sequences:
        assert one.sample is not None
        asked = replace(one.sample, position=one.sample.position + 1, sampling=replace(one.sample.sampling, **sampling))
        parts.append(
            replace(one, token_ids=PLACEHOLDER, position_begin=one.context_len, kv_begin=one.context_len, sample=asked)
        )
    return StepPlan(step_id=step.step_id + 1, sequences=tuple(parts), follows=step.step_id)


def tokens_of(result: StepResult | BaseException) -> dict[int, int]:
    assert isinstance(result, StepResult)
    return {seq_id: token.token_id for seq_id, (token,) in result.samples.items()}


async def test_next_step_is_launched_while_the_device_computes(late: Late, executor: TorchExecutor) -> None:
    """The next step has one sequence less, in another order. The tokens equal those of two separate steps."""
    first = plan(*GOOD)
    second = following(first)
    second = replace(second, sequences=(second.sequences[2], second.sequences[0]))
    expected = [tokens_of(executor.run(first)), tokens_of(executor.run(second))]
    assert [tokens_of(result) for result in await late.run(first, second)] == expected
    assert late.launched == [(1, None), (2, 1)]
    assert not late.executor.withdraw(2)


async def test_step_with_penalties_waits_for_the_tokens_before(late: Late, executor: TorchExecutor) -> None:
    first = plan(*GOOD)
    second = following(first, repetition_penalty=3.0)
    expected = [tokens_of(executor.run(first)), tokens_of(executor.run(second))]
    assert [tokens_of(result) for result in await late.run(first, second)] == expected
    assert late.launched == [(1, None), (2, None)]


async def test_failed_sequence_is_dropped_from_the_step_launched_early(late: Late, loaded: LoadedModel) -> None:
    embedding = loaded.model.get_input_embeddings().weight
    kept = embedding[77].clone()
    first = plan(GOOD[0], part(1, [6, 77, 5]), GOOD[2])
    try:
        embedding[77] = float("nan")
        before, after = await late.run(first, following(first))
    finally:
        embedding[77] = kept
    assert late.launched == [(1, None), (2, 1)]
    assert isinstance(before, StepResult)
    assert set(before.failures) == {1}
    assert isinstance(after, StepResult)
    assert (set(after.samples), set(after.failures)) == ({0, 2}, set())


async def test_early_launch_error_is_raised_by_its_own_step(late: Late) -> None:
    late.fails_at = 2
    before, after = await late.run(first := plan(*GOOD), following(first))
    assert set(tokens_of(before)) == {0, 1, 2}
    assert isinstance(after, RuntimeError)
    late.fails_at = None
    assert set(tokens_of((await late.run(plan(*GOOD)))[0])) == {0, 1, 2}


async def test_step_launched_early_has_ended_when_it_is_reported_failed(late: Late) -> None:
    """The first step raises when its result is read. Blocks of the second step must not be written
    afterwards."""

    class FailingEvent(DelayedEvent):
        def wait(self) -> None:
            raise ZeroDivisionError

    late.record_event = lambda _device: DelayedEvent() if late.events else FailingEvent()
    before, after = await late.run(first := plan(*GOOD), following(first))
    assert late.launched == [(1, None), (2, 1)]
    assert isinstance(before, ZeroDivisionError)
    assert isinstance(after, NothingToFollow)
    assert late.events[1].is_complete()


async def test_device_failure_while_computing_raises_device_fault(late: Late) -> None:
    class FailingEvent(DelayedEvent):
        def wait(self) -> None:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    late.record_event = lambda _device: FailingEvent()
    before, after = await late.run(first := plan(*GOOD), following(first))
    assert isinstance(before, DeviceFault)
    assert isinstance(after, DeviceFault)
