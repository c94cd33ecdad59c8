"""The emulated device beyond the executor contract: step durations, and detection of wrong KV."""

import asyncio
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from baton.core.errors import LayoutMismatch
from baton.core.kv.block_hash import token_ids
from baton.core.request import Sampling
from baton.core.step_cost import StepCostModel, StepWork
from baton.engine.executors.emulated import EmulatedExecutor
from baton.engine.kv_cache.checksum import KvCorrupted
from baton.engine.state.step import SampleRequest, StepPlan, StepSequence
from baton.sim import virtual_time
from baton.worker.costs.step_cost_keeper import work_of
from tests import builders
from tests.unit.worker.virtual_loop import virtual

SIZE, NUM_BLOCKS, VOCAB_SIZE = 4, 128, 5000
COSTS = StepCostModel(
    step_s=0.004, prefill_token_s=50e-6, prefill_attended_s=2e-9, decode_seq_s=0.5e-3, decode_context_s=10e-9
)
SEEDED = Sampling(max_tokens=99, seed=5)


class Rig:
    """An executor over its own memory, and plans for one sequence in blocks 0, 2, 4, …"""

    def __init__(self, step_s: float | None = None, costs: StepCostModel = COSTS) -> None:
        layout = builders.layout(block_size_tokens=SIZE)
        self.kv = np.full((NUM_BLOCKS, layout.block_bytes), 0xEE, dtype=np.uint8)
        self.executor = EmulatedExecutor(
            layout=layout,
            kv=self.kv,
            vocab_size=VOCAB_SIZE,
            step_seconds=lambda plan: costs.step_seconds(work_of(plan)) if step_s is None else step_s,
        )
        self.history: array[int] = token_ids()
        self.num_steps = 0

    def part(
        self, tokens: Sequence[int], *, sampling: Sampling | None = SEEDED, seq_id: int = 0, **changes: object
    ) -> StepSequence:
        """Append `tokens` to the history and return the step part that computes them."""
        begin = len(self.history)
        self.history.extend(tokens)
        sample = sampling and SampleRequest(
            sampling=sampling,
            sample_indices=(0,),
            position=len(self.history),
            history=self.history,
            num_prompt_tokens=1,
        )
        table = tuple(range(0, 2 * math.ceil(len(self.history) / SIZE), 2))
        part = StepSequence(
            seq_id=seq_id,
            token_ids=token_ids(tokens),
            position_begin=begin,
            kv_begin=begin,
            block_table=table,
            sample=sample,
        )
        return replace(part, **changes)  # type: ignore[arg-type]

    async def run(self, *parts: StepSequence) -> list[int]:
        """Run one step and return its tokens."""
        self.num_steps += 1
        result = await self.executor.execute(StepPlan(step_id=self.num_steps, sequences=parts))
        return [token.token_id for tokens in result.samples.values() for token in tokens]

    async def decode(self, num_steps: int, last: int) -> list[int]:
        """Decode `num_steps` tokens after token `last`, and return them."""
        made = [last]
        for _ in range(num_steps):
            made += await self.run(self.part(made[-1:]))
        return made[1:]


@virtual
async def test_step_takes_the_predicted_time() -> None:
    rig, loop = Rig(), asyncio.get_running_loop()
    prompt = list(range(1, 41))
    for tokens, work in (
        (prompt[:30], StepWork.of([(30, 0)])),
        (prompt[30:], StepWork.of([(10, 30)])),
        ([7], StepWork.of([], [40])),
    ):
        began_s = loop.time()
        await rig.run(rig.part(tokens))
        assert loop.time() - began_s == pytest.approx(COSTS.step_seconds(work), abs=1e-9)


class _Coarse(virtual_time.VirtualTimeLoop):
    """An event loop whose timers fire late, at whole milliseconds."""

    def advance(self, by_s: float) -> None:
        self._now_s = math.ceil((self._now_s + by_s) * 1000 - 1e-6) / 1000


@pytest.mark.parametrize("step_s", [0.0003, 0.0011, 0.0087])
def test_timer_errors_do_not_accumulate(step_s: float) -> None:
    async def main() -> None:
        rig, loop = Rig(step_s), asyncio.get_running_loop()
        began_s = loop.time()
        await rig.decode(200, 1)
        assert loop.time() - began_s == pytest.approx(200 * step_s, abs=0.0011)

    with asyncio.Runner(loop_factory=_Coarse) as runner:
        runner.run(main())


@virtual
async def test_long_delay_is_made_up_for_only_in_part() -> None:
    rig, loop = Rig(0.010), virtual_time.running_loop()
    step = asyncio.create_task(rig.run(rig.part([1, 2, 3])))
    await asyncio.sleep(0.005)
    loop.advance(5.0)
    await step
    began_s = loop.time()
    await rig.decode(10, 1)
    assert loop.time() - began_s == pytest.approx(10 * 0.010 - 0.020, abs=1e-6)


@virtual
async def test_emulation_time_is_part_of_the_step() -> None:
    rig, loop = Rig(0.010), virtual_time.running_loop()
    run = rig.executor._run

    def slowly(plan: StepPlan) -> object:
        loop.advance(0.004)
        return run(plan)

    rig.executor._run = slowly  # type: ignore[method-assign,assignment]
    began_s = loop.time()
    await rig.decode(5, 1)
    assert loop.time() - began_s == pytest.approx(0.050, abs=1e-6)


@virtual
async def test_response_is_independent_of_chunks_and_of_the_origin_of_kv() -> None:
    prompt = list(range(100, 131))
    whole = Rig()
    (first,) = await whole.run(whole.part(prompt))
    wanted = [first, *await whole.decode(20, first)]

    chunked = Rig()
    await chunked.run(chunked.part(prompt[:13], sampling=None))
    (first,) = await chunked.run(chunked.part(prompt[13:]))
    assert [first, *await chunked.decode(20, first)] == wanted

    pulled = Rig()
    pulled.kv[:] = chunked.kv
    pulled.history.extend([*prompt, *wanted[:5]])
    assert await pulled.decode(5, wanted[5]) == wanted[6:11]


@pytest.mark.parametrize("sampling", [SEEDED, replace(SEEDED, temperature=0.0)])
@virtual
async def test_greedy_tokens_are_independent_of_seed_and_sample(sampling: Sampling) -> None:
    answers = []
    for seed in (1, 2):
        rig = Rig()
        part = rig.part([1, 2, 3], sampling=replace(sampling, seed=seed))
        assert part.sample is not None
        answers.append(await rig.run(replace(part, sample=replace(part.sample, sample_indices=(0, 1)))))
    distinct = len({*answers[0], *answers[1]})
    assert distinct == (1 if sampling.is_greedy else 4)


@virtual
async def test_logprobs_are_returned_on_request_and_banned_tokens_never() -> None:
    rig = Rig()
    part = rig.part([1, 2, 3], sampling=replace(SEEDED, num_logprobs=2))
    assert part.sample is not None
    result = await rig.executor.execute(StepPlan(step_id=1, sequences=(part,)))
    (token,) = result.samples[0]
    assert token.logprobs is not None
    banned = replace(part.sample, banned_token_ids=(token.token_id, token.token_id + 1))
    again = await rig.executor.execute(StepPlan(step_id=2, sequences=(replace(part, sample=banned),)))
    assert again.samples[0][0].token_id == token.token_id + 2


@pytest.mark.parametrize(("block", "slot"), [(0, 0), (1, 6), (7, 30)])
@virtual
async def test_one_wrong_bit_in_pulled_or_cached_kv_is_detected(block: int, slot: int) -> None:
    rig = Rig()
    await rig.run(rig.part(range(31), sampling=None))
    token_bytes = rig.kv.shape[1] // SIZE
    rig.kv[2 * block, (slot % SIZE) * token_bytes] ^= 1
    with pytest.raises(KvCorrupted, match=rf"^sequence 3, slot {slot} of 32: "):
        await rig.run(rig.part([9], seq_id=3))


@virtual
async def test_swapped_blocks_are_detected() -> None:
    rig = Rig()
    await rig.run(rig.part(range(32), sampling=None))
    rig.kv[[4, 6]] = rig.kv[[6, 4]]
    with pytest.raises(KvCorrupted, match="slot 8 of"):
        await rig.run(rig.part([9]))


@virtual
async def test_wrong_bit_in_a_running_sequence_is_detected_within_a_few_steps() -> None:
    rig = Rig()
    await rig.run(rig.part(range(16), sampling=None))
    (first,) = await rig.run(rig.part([16]))
    await rig.decode(3, first)
    rig.kv[2, 0] ^= 1
    with pytest.raises(KvCorrupted, match="slot 4 of"):
        await rig.decode(5, first)


@virtual
async def test_last_slot_of_a_running_sequence_is_verified_in_every_step() -> None:
    rig = Rig()
    await rig.run(rig.part(range(20)))
    rig.kv[2 * 4][-rig.kv.shape[1] // SIZE] ^= 1
    with pytest.raises(KvCorrupted, match="slot 19 of"):
        await rig.run(rig.part([9]))


def test_memory_with_another_block_size_is_refused() -> None:
    layout = builders.layout(block_size_tokens=SIZE)
    with pytest.raises(LayoutMismatch, match="block_bytes"):
        EmulatedExecutor(
            layout=layout, kv=np.zeros((2, 16), dtype=np.uint8), vocab_size=9, step_seconds=lambda plan: 0.0
        )
