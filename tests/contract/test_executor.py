"""Contract of `Executor` for each implementation: results, KV in memory, and which sequence failed."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from baton.core.errors import Failure
from baton.core.kv.block_hash import token_ids
from baton.core.request import Sampling
from baton.engine.executors.emulated import EmulatedExecutor
from baton.engine.scheduling.async_scheduling import PLACEHOLDER
from baton.engine.state.step import (
    DeviceFault,
    Executor,
    NothingToFollow,
    SampledToken,
    SampleRequest,
    StepPlan,
    StepResult,
    StepSequence,
)
from baton.runtime.observability.metrics import EngineMetrics
from baton.sim.sim_executor import SimExecutor, SimStepCost
from baton.sim.sim_memory import SimMemory
from baton.worker.worker_metrics import MeteredExecutor
from tests import builders
from tests.delayed_device import record_delayed_event
from tests.fake_executor import FakeExecutor, FakeGenerationTable

if TYPE_CHECKING:
    from baton.model.backends.backend_selection import Backend
    from baton.model.loading.model_loader import LoadedModel

pytestmark = pytest.mark.contract

BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE = 4, 32, 50
GREEDY = Sampling(max_tokens=9, temperature=0.0)
SEEDED = Sampling(max_tokens=9, temperature=1.0, seed=5)
PROMPTS = [(1, 2, 3), (9, 8, 7, 6, 5, 4), (11, 12, 13, 14)]


@dataclass(frozen=True)
class Device:
    """An executor under test.

    make_failing: changes a sequence so that the executor cannot run it. The executor then returns a
    failure for the sequence, or the step raises.
    """

    executor: Executor
    make_failing: Callable[[StepSequence], StepSequence]


def open_backend(device: str, kernels: str, dtype: str) -> "tuple[LoadedModel, Backend]":
    """Load the demo model and choose a backend for it."""
    from baton.model.backends.backend_selection import choose_backend
    from baton.model.loading.model_loader import load_model
    from baton.model.loading.model_source import DEMO_DIR

    loaded = load_model(DEMO_DIR, dtype=dtype, device=device)
    return loaded, choose_backend(loaded, kernels=kernels, num_threads=1, block_size_tokens=BLOCK_SIZE)


shared_backend = cache(open_backend)
"""For the CPU, where a closed executor's backend can be used again, except for `ModelForward`."""


def torch_device(name: str, kernels: str = "torch", dtype: str = "float32", *, is_late: bool = False) -> Device:
    from baton.model.device.async_copy import record_event
    from baton.model.device.compute_thread import compute_thread
    from baton.model.device.kv_tensors import KvCache
    from baton.model.step.forward import ModelForward
    from baton.model.step.step_launch import StepLauncher
    from baton.model.torch_executor import TorchExecutor

    thread = compute_thread(1)
    open_in_thread = shared_backend if name == "cpu" else open_backend
    loaded, backend = thread.submit(open_in_thread, name, kernels, dtype).result()
    if kernels == "torch":
        backend = replace(backend, forward=ModelForward(loaded.model))
    kv = KvCache.zeros(loaded.layout(BLOCK_SIZE), NUM_BLOCKS, loaded.device, loaded.dtype)
    kv.fill_with_nan()  # so that a read of unwritten KV changes a token
    unknown = token_ids([loaded.vocab_size])
    event = record_delayed_event if is_late else record_event
    new_launcher = partial(StepLauncher, record_event=event)
    executor = TorchExecutor(loaded.model, kv, thread=thread, backend=backend, new_launcher=new_launcher)
    return Device(executor, lambda seq: replace(seq, token_ids=unknown + seq.token_ids[1:]))


def sim_device() -> Device:
    layout = builders.layout(block_size_tokens=BLOCK_SIZE)
    memory = SimMemory(NUM_BLOCKS, BLOCK_SIZE)
    executor = SimExecutor(
        layout=layout, memory=memory, vocab_size=VOCAB_SIZE, cost=SimStepCost(base_s=0.001, per_token_s=0.0)
    )
    # Tokens that differ from the history fail the sequence when it samples.
    return Device(executor, lambda seq: replace(seq, token_ids=seq.token_ids[::-1]))


def emulated_device() -> Device:
    layout = builders.layout(block_size_tokens=BLOCK_SIZE)
    kv = np.full((NUM_BLOCKS, layout.block_bytes), 0xEE, dtype=np.uint8)  # unwritten memory
    executor = EmulatedExecutor(layout=layout, kv=kv, vocab_size=VOCAB_SIZE, step_seconds=lambda plan: 0.001)
    return Device(executor, lambda seq: replace(seq, token_ids=seq.token_ids[::-1]))


def metered_device() -> Device:
    device = sim_device()
    return replace(device, executor=MeteredExecutor(device.executor, EngineMetrics(CollectorRegistry())))


def fake_device(*, raises: bool) -> Device:
    executor = FakeExecutor(NUM_BLOCKS, BLOCK_SIZE, FakeGenerationTable(NUM_BLOCKS))
    executor.num_turns = 8
    bad = set[int]()

    def make_failing(sequence: StepSequence) -> StepSequence:
        bad.add(sequence.seq_id)
        return sequence

    def failing(sequence: StepSequence) -> Failure | None:
        return builders.failure() if sequence.seq_id in bad else None

    if raises:
        executor.raises_for = lambda sequence: sequence.seq_id in bad
    else:
        executor.failing = failing
    return Device(executor, make_failing)


DEVICES: dict[str, Callable[[], Device]] = {
    "torch": lambda: torch_device("cpu"),
    "torch-late": lambda: torch_device("cpu", is_late=True),
    "kernels": lambda: torch_device("cpu", "auto"),
    "decoder": lambda: torch_device("cpu", "auto", "bfloat16"),
    "torch-cuda": lambda: torch_device("cuda"),
    "kernels-cuda": lambda: torch_device("cuda", "auto"),
    "simulated": sim_device,
    "emulated": emulated_device,
    "metered": metered_device,
    "fake": lambda: fake_device(raises=False),
    "fake-that-raises": lambda: fake_device(raises=True),
}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.gpu if "cuda" in name else ()) for name in DEVICES])
async def device(request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    device = DEVICES[request.param]()
    yield device
    await device.executor.aclose()


def sequence(
    seq_id: int,
    tokens: Sequence[int],
    *,
    begin: int = 0,
    blocks: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    samples: tuple[int, ...] = (0,),
    drafts: tuple[int, ...] = (),
) -> StepSequence:
    """Return a sequence that computes `tokens` from index `begin` on, then `drafts`, and draws `samples`, if
    there are any.

    Without `blocks` the sequence uses the three blocks from `3 * seq_id` on.
    """
    sample = SampleRequest(
        sampling=sampling,
        sample_indices=samples,
        position=len(tokens),
        history=token_ids(tokens),
        num_prompt_tokens=len(tokens),
        drafts=drafts,
    )
    return StepSequence(
        seq_id=seq_id,
        token_ids=token_ids([*tokens[begin:], *drafts]),
        position_begin=begin,
        kv_begin=begin,
        block_table=tuple(blocks) or tuple(range(3 * seq_id, 3 * seq_id + 3)),
        sample=sample if samples else None,
    )


async def run_step(
    device: Device, *sequences: StepSequence, copies: tuple[tuple[int, int], ...] = ()
) -> dict[int, tuple[int, ...]]:
    """Run a step in which nothing fails, and return the tokens of each sequence."""
    result = await device.executor.execute(StepPlan(step_id=1, sequences=sequences, block_copies=copies))
    assert not result.failures
    return tokens_of(result)


def tokens_of(result: StepResult) -> dict[int, tuple[int, ...]]:
    return {seq_id: tuple(token.token_id for token in tokens) for seq_id, tokens in result.samples.items()}


async def run_with_isolation(device: Device, plan: StepPlan) -> tuple[dict[int, tuple[int, ...]], set[int]]:
    """Run a step and return (tokens, failed sequences).

    If the step raises, each sequence is run in a step of its own, as in the engine loop.
    """
    try:
        result = await device.executor.execute(plan)
    except DeviceFault:
        raise
    except Exception:
        if len(plan.sequences) == 1:
            return {}, {plan.sequences[0].seq_id}
        isolated = [await run_with_isolation(device, replace(plan, sequences=(seq,))) for seq in plan.sequences]
        return {k: v for tokens, _ in isolated for k, v in tokens.items()}, set().union(
            *(failed for _, failed in isolated)
        )
    assert not set(result.samples) & set(result.failures)
    return tokens_of(result), set(result.failures)


async def test_executor_reports_its_memory(device: Device) -> None:
    assert device.executor.num_blocks == NUM_BLOCKS
    assert device.executor.layout.block_size_tokens == BLOCK_SIZE


@pytest.mark.parametrize("step_id", [0, 7])
async def test_only_sampling_sequences_have_results(device: Device, step_id: int) -> None:
    without_sample = sequence(2, PROMPTS[2], samples=())
    sequences = (
        sequence(0, PROMPTS[0], samples=(0, 1, 2), sampling=SEEDED),
        without_sample,
        sequence(1, PROMPTS[1], samples=(4,)),
    )
    result = await device.executor.execute(StepPlan(step_id=step_id, sequences=sequences))
    assert result.step_id == step_id
    assert {seq_id: [token.sample_index for token in tokens] for seq_id, tokens in result.samples.items()} == {
        0: [0, 1, 2],
        1: [4],
    }
    assert all(isinstance(token, SampledToken) for tokens in result.samples.values() for token in tokens)
    assert not result.failures


async def test_sample_is_independent_of_other_samples(device: Device) -> None:
    in_one_step = await run_step(device, sequence(0, PROMPTS[0], samples=(0, 1, 2), sampling=SEEDED))
    in_own_steps = [await run_step(device, sequence(0, PROMPTS[0], samples=(i,), sampling=SEEDED)) for i in range(3)]
    assert in_one_step[0] == tuple(one[0][0] for one in in_own_steps)


async def test_tokens_are_independent_of_batching(device: Device) -> None:
    sequences = [sequence(i, prompt) for i, prompt in enumerate(PROMPTS)]
    in_own_steps = [await run_step(device, one) for one in sequences]
    assert await run_step(device, *sequences) == {i: one[i] for i, one in enumerate(in_own_steps)}


async def test_step_without_samples_writes_its_kv(device: Device) -> None:
    """A prompt gives the same token in chunks as in one step, even if the first chunk is in a batch."""
    complete = await run_step(device, sequence(0, PROMPTS[1]))
    chunk = sequence(1, PROMPTS[1][:5], samples=())
    assert await run_step(device, chunk, sequence(2, PROMPTS[2], samples=())) == {}
    assert await run_step(device, sequence(1, PROMPTS[1], begin=5)) == {1: complete[0]}


async def test_step_can_be_repeated(device: Device) -> None:
    """The engine loop repeats a failed step to find the failing sequence."""
    await run_step(device, sequence(0, PROMPTS[1][:5], samples=()))
    first = await run_step(device, sequence(0, PROMPTS[1], begin=5))
    assert await run_step(device, sequence(0, PROMPTS[1], begin=5)) == first


async def test_block_copies_are_made_before_kv_is_written(device: Device) -> None:
    """Two samples of one prompt fork in its last block: one continues in the block, the other in a copy."""
    prompt, source, copy = PROMPTS[1], 1, 20
    expected = [await run_step(device, sequence(3 + i, (*prompt, token))) for i, token in enumerate((17, 23))]
    await run_step(device, sequence(0, prompt, samples=()))
    continued = sequence(0, (*prompt, 17), begin=6), sequence(1, (*prompt, 23), begin=6, blocks=(0, copy))
    assert await run_step(device, *continued, copies=((source, copy),)) == {0: expected[0][3], 1: expected[1][4]}


async def test_step_with_only_block_copies_makes_them_in_order(device: Device) -> None:
    prompt = PROMPTS[1]
    expected = await run_step(device, sequence(0, (*prompt, 17)))
    assert await run_step(device, copies=((1, 20), (20, 21), (0, 22))) == {}
    assert await run_step(device, sequence(1, (*prompt, 17), begin=6, blocks=(22, 21))) == {1: expected[0]}


async def test_failing_sequence_is_identified_and_others_keep_their_results(device: Device) -> None:
    good = [sequence(i, prompt) for i, prompt in enumerate(PROMPTS)]
    expected = await run_step(device, *good)
    bad = device.make_failing(sequence(3, (21, 22, 23, 24, 25)))
    tokens, failed = await run_with_isolation(device, StepPlan(step_id=1, sequences=(good[0], bad, *good[1:])))
    assert failed == {3}
    assert tokens == expected
    assert (await run_with_isolation(device, StepPlan(step_id=2, sequences=(bad,))))[1] == {3}
    assert await run_step(device, *good) == expected
    # KV that it left in its blocks does not affect their next user.
    assert await run_step(device, sequence(4, PROMPTS[1], blocks=bad.block_table)) == {4: expected[1]}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
async def test_drafts_change_only_the_number_of_tokens(device: Device, sampling: Sampling) -> None:
    """Right drafts give all tokens in one step. The KV of a wrong one is overwritten."""
    tokens = list(PROMPTS[0])
    for _ in range(5):
        tokens += (await run_step(device, sequence(0, tokens, sampling=sampling)))[0]
    other = sequence(2, PROMPTS[1])
    begin, answer = len(PROMPTS[0]), tuple(tokens[len(PROMPTS[0]) :])
    found = await run_step(device, sequence(1, PROMPTS[0], sampling=sampling, drafts=answer[:4]), other)
    assert found[1] == answer
    for num_right in range(3):
        wrong = (answer[num_right] + 1) % VOCAB_SIZE
        drafts = (*answer[:num_right], wrong, *answer[num_right + 1 : 4])
        found = await run_step(device, sequence(1, PROMPTS[0], sampling=sampling, drafts=drafts), other)
        assert found[1] == answer[: num_right + 1]
        known = tokens[: begin + num_right + 1]
        following = await run_step(device, sequence(1, known, begin=len(known) - 1, sampling=sampling))
        assert following[1] == (answer[num_right + 1],)


def after(step_id: int, *sequences: StepSequence) -> StepPlan:
    """Return the step after `step_id` in which each of these sequences decodes its next token."""
    continued = []
    for one in sequences:
        assert one.sample is not None
        sample = replace(one.sample, position=one.sample.position + 1)
        continued.append(
            replace(one, token_ids=PLACEHOLDER, position_begin=one.context_len, kv_begin=one.context_len, sample=sample)
        )
    return StepPlan(step_id=step_id + 1, sequences=tuple(continued), follows=step_id)


async def test_following_step_continues_from_the_sampled_tokens(device: Device) -> None:
    first = [sequence(i, prompt, sampling=SEEDED) for i, prompt in enumerate(PROMPTS)]
    sampled = await run_step(device, *first)
    expected = await run_step(
        device, *(sequence(3 + i, (*prompt, *sampled[i]), sampling=SEEDED) for i, prompt in enumerate(PROMPTS))
    )
    plans = StepPlan(step_id=1, sequences=tuple(first)), after(1, *first)
    before, following = await asyncio.gather(*map(device.executor.execute, plans))
    assert (tokens_of(before), following.step_id) == (sampled, 2)
    assert tokens_of(following) == {i: expected[3 + i] for i in range(3)}


async def test_history_that_grew_before_the_step_gives_the_same_token(device: Device) -> None:
    """The engine appends the sampled token to the same array, perhaps before the following step reads it."""
    first = sequence(0, PROMPTS[1])
    assert first.sample is not None
    before = await device.executor.execute(StepPlan(step_id=1, sequences=(first,)))
    first.sample.history.append(before.samples[0][0].token_id)
    following = await device.executor.execute(after(1, first))
    assert tokens_of(following)[0] == (await run_step(device, sequence(1, tuple(first.sample.history))))[1]


async def test_failed_sequence_is_removed_from_the_following_step(device: Device) -> None:
    good, bad = sequence(0, PROMPTS[0]), device.make_failing(sequence(1, (21, 22, 23, 24, 25)))
    (before,) = await asyncio.gather(
        device.executor.execute(StepPlan(step_id=1, sequences=(good, bad))), return_exceptions=True
    )
    (following,) = await asyncio.gather(device.executor.execute(after(1, good, bad)), return_exceptions=True)
    if isinstance(before, StepResult):
        assert isinstance(following, StepResult)
        assert set(following.samples) == {0}
    else:
        assert isinstance(following, NothingToFollow)


async def test_step_can_follow_only_the_last_step(device: Device) -> None:
    first = sequence(0, PROMPTS[0])
    await device.executor.execute(StepPlan(step_id=1, sequences=(first,)))
    with pytest.raises(NothingToFollow):
        await device.executor.execute(after(7, first))
    with pytest.raises(NothingToFollow):
        await device.executor.execute(after(1, first))
    await run_step(device, first)


async def withdraw_queued(device: Device, step_id: int, step: asyncio.Task[StepResult]) -> bool:
    """Withdraw a step once it is queued. Returns False if the device was faster."""
    while not device.executor.withdraw(step_id):
        if step.done():
            return False
        await asyncio.sleep(0)
        assert not device.executor.withdraw(99), "another step must not be withdrawn"
        assert not device.executor.withdraw(1), "the running step cannot be withdrawn"
    return True


async def test_queued_step_can_be_withdrawn(device: Device) -> None:
    """After a withdrawal another step can be queued."""
    first = sequence(0, PROMPTS[1])
    assert not device.executor.withdraw(1), "no step is queued"
    num_withdrawn = 0
    for _ in range(200):  # until a step was slow enough to be withdrawn
        running = asyncio.create_task(device.executor.execute(StepPlan(step_id=1, sequences=(first,))))
        steps = []
        for step_id in (2, 3):
            steps.append(asyncio.create_task(device.executor.execute(replace(after(1, first), step_id=step_id))))
            if not await withdraw_queued(device, step_id, steps[-1]):
                break
            assert not device.executor.withdraw(step_id), "withdrawn already"
            num_withdrawn += 1
        result = await running
        assert tokens_of(result)[0] == (await run_step(device, first))[0]
        await asyncio.gather(*steps, return_exceptions=True)
        assert sum(step.cancelled() for step in steps) == num_withdrawn
        if num_withdrawn == 2:
            break
        num_withdrawn = 0
    assert num_withdrawn == 2
    continued = asyncio.create_task(device.executor.execute(StepPlan(step_id=1, sequences=(first,))))
    assert tokens_of(await device.executor.execute(after(1, first)))[0], "withdrawn steps leave no state"
    await continued
    assert not device.executor.withdraw(2), "a finished step is not queued"


@pytest.fixture
def other_threads() -> set[threading.Thread]:
    """Return the threads that earlier tests have left."""
    return set(threading.enumerate())


async def test_close_waits_for_the_running_step_and_leaves_no_thread(
    other_threads: set[threading.Thread], device: Device
) -> None:
    step = asyncio.create_task(device.executor.execute(StepPlan(step_id=1, sequences=(sequence(0, PROMPTS[0]),))))
    await asyncio.sleep(0)
    await device.executor.aclose()
    assert set((await step).samples) == {0}
    left = set(threading.enumerate()) - other_threads
    assert not [thread.name for thread in left if thread.name.startswith("baton-step")]
