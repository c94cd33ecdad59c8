"""Tests the engine loop over `TorchExecutor` with random delays: no order of events may lose a step or a
token."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from baton.engine.engine import Engine, EngineConfig
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.loop import EngineLoop
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.step import StepPlan
from baton.model.device.async_copy import record_event
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import load_model
from baton.model.step.step_launch import StepLauncher
from baton.model.torch_executor import TorchExecutor
from tests.builders import sequence_request
from tests.delayed_device import record_delayed_event
from tests.fake_executor import FakeGenerationTable
from tests.scale import sized

SIZE, NUM_BLOCKS = 4, 128
NUM_REQUESTS = sized(16, 40)


class LateThread(ThreadPoolExecutor):
    """A thread pool that starts each task late."""

    def submit(self, *call: Any, **arguments: Any) -> Future[Any]:
        super().submit(time.sleep, 0.001)
        return super().submit(*call, **arguments)


class DisturbedEngine(Engine):
    """An engine that calls `on_plan_ahead` before it plans the next step."""

    on_plan_ahead: Callable[[], None] = staticmethod(lambda: None)

    def plan_ahead(self, plan: StepPlan) -> StepPlan:
        self.on_plan_ahead()
        return super().plan_ahead(plan)


class Rig:
    def __init__(self, model_dir: Path, *, is_late: bool) -> None:
        loaded = load_model(model_dir, device="cpu")
        pool = BlockPool(NUM_BLOCKS, SIZE, FakeGenerationTable(NUM_BLOCKS))
        limits = EngineConfig(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=60, block_size_tokens=SIZE)
        self.engine = DisturbedEngine(limits, pool, clock=lambda: 0.0)
        self.executor = TorchExecutor(
            loaded.model,
            KvCache.zeros(loaded.layout(SIZE), NUM_BLOCKS),
            thread=LateThread(1),
            new_launcher=partial(StepLauncher, record_event=record_delayed_event if is_late else record_event),
        )
        self.outputs: dict[int, list[int]] = defaultdict(list)
        self.ended: set[int] = set()
        self.came = asyncio.Event()
        self.loop = EngineLoop(self.engine, self.executor, self.deliver)

    def deliver(self, outcome: EngineOutcome) -> None:
        self.came.set()
        for output in outcome.outputs:
            assert output.failure is None, output.failure
            assert output.output_index == len(self.outputs[output.seq_id])
            self.outputs[output.seq_id] += [token.token_id for token in output.tokens]
            if output.finish is not None:
                self.ended.add(output.seq_id)

    async def until_ended(self, seq_ids: set[int]) -> None:
        async with asyncio.timeout(60):
            while not seq_ids <= self.ended:
                self.came.clear()
                await self.came.wait()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("seed", range(sized(1, 15)))
async def test_answers_do_not_depend_on_when_requests_arrive(tiny_dir: Path, seed: int, is_late: bool) -> None:
    """Also runs with a device that computes late."""
    rng, rig = Random(seed), Rig(tiny_dir, is_late=is_late)
    requests = {
        i: sequence_request(
            i,
            [rng.randrange(30) for _ in range(rng.randint(1, 9))],
            max_tokens=rng.randint(1, 25),
            block_size_tokens=SIZE,
        )
        for i in range(1, NUM_REQUESTS + 1)
    }
    running = asyncio.create_task(rig.loop.run())
    separate: dict[int, list[int]] = {}
    for i, request in requests.items():
        rig.loop.add(request)
        await rig.until_ended({i})
        separate[i] = rig.outputs.pop(i)
    rig.ended.clear()

    def disturb() -> None:
        """While the next step is planned something comes in that takes it back, before or after it is at the
        device."""
        if rng.random() < 0.3:
            asyncio.get_running_loop().call_soon(rig.loop.cancel, 999)

    rig.engine.on_plan_ahead = disturb
    for request in requests.values():
        rig.loop.add(request)
        for _ in range(rng.choice((0, 1, 50, 500))):
            await asyncio.sleep(0)
    await rig.until_ended(set(requests))
    assert not running.done()
    rig.loop.drain()
    await asyncio.wait_for(running, 60)
    assert rig.outputs == separate
    rig.engine.check()
    await rig.executor.aclose()
