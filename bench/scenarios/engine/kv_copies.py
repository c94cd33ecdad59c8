"""Measures how much copies of KV to slower tiers delay decode steps.

python -m bench kv_copies --out DIR [--models demo,tiny-42m,qwen3-0.6b] [--batch 8]
[--seconds 60] [--repeats 3]

One engine with all cores decodes a batch in this process. Meanwhile the modes take turns of TURN_S seconds:

none: no copies.
host, disk, host and disk: copies to these tiers, with the pauses of a worker. A worker copies less: only
while it has blocks that are worth it.
host without pauses: what the pauses prevent.

A step takes longer the more tokens its sequences have, and a turn has hundreds of steps. So the time of a
turn is the mean of its decode steps, divided by what steps without copies take for as many tokens: a line
through all of those of the repeat. The delay of a turn is this, divided by that of the turns without copies
before and after it. A mode's delay is the median of its turns. Steps that overlap two turns do not count.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path

from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import HASH_BYTES
from baton.engine.engine import Engine, unknown_costs
from baton.engine.loop import EngineLoop
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.step import StepPlan
from baton.engine.tiers.copy_policy import DISPLACED_S, MAX_COPY_S, max_copied_blocks
from baton.engine.tiers.kv_tier import BlockToStore
from baton.runtime.memory.garbage_collection import frozen_heap
from baton.worker.device.open_device import open_device
from baton.worker.device.worker_device import Device
from baton.worker.tiers.copy_pacing import CopyPacing
from baton.worker.tiers.disk_tier import DiskTier
from baton.worker.tiers.host_tier import HostTier
from bench.scenarios.cluster.goodput import model_directory
from bench.scenarios.engine.mixed_steps import wait_for_memory
from bench.support.engine.engine_prompts import random_prompts
from bench.support.saved_figures import SavedFigures
from bench.systems.baton_cluster import machine, table
from bench.systems.bench_worker import worker_config
from bench.systems.engines import THREADS, sequence_requests, vocabulary

NONE, HOST, DISK, BOTH, UNPAUSED = "none", "host", "disk", "host and disk", "host without pauses"
MODES = (HOST, DISK, BOTH, UNPAUSED)
TURN_S = 1.0
PROMPT_TOKENS, MAX_OUTPUTS = 64, 3000
MAX_MODEL_LEN = 4096
KV_GIB, TIER_BYTES = 2, 256 * 2**20

Tiers = HostTier | DiskTier


class StepTurns:
    """Steps by turn: (tokens of all sequences, seconds). `begin` starts a turn; steps that began before it do
    not count."""

    def __init__(self) -> None:
        self.turns: list[tuple[str, list[tuple[int, float]]]] = []
        self._began_s = 0.0

    def begin(self, mode: str) -> None:
        self.turns.append((mode, []))
        self._began_s = asyncio.get_running_loop().time()

    def observe(self, started_s: float, num_tokens: int, step_s: float) -> None:
        if self.turns and started_s >= self._began_s:
            self.turns[-1][1].append((num_tokens, step_s))

    def delays(self) -> dict[str, float]:
        """Return the delay of each mode: 0.02 means that its steps took 2 % longer."""
        undisturbed = [step for mode, turn in self.turns if mode == NONE for step in turn]
        line = statistics.linear_regression(*zip(*undisturbed, strict=True))

        def slowness(*turns: list[tuple[int, float]]) -> float:
            steps = [step for turn in turns for step in turn]
            expected_s = statistics.fmean(line.intercept + line.slope * num_tokens for num_tokens, _ in steps)
            return statistics.fmean(step_s for _, step_s in steps) / expected_s

        found = defaultdict(list)
        for (_, before), (mode, during), (_, after) in zip(
            self.turns[:-2:2], self.turns[1:-1:2], self.turns[2::2], strict=True
        ):
            if before and during and after:
                found[mode].append(slowness(during) / slowness(before, after) - 1)
        return {mode: statistics.median(delays) for mode, delays in found.items()}


async def copy_repeatedly(device: Device, tier: Tiers, numbers: Iterator[int], pacing: CopyPacing) -> None:
    """Copy blocks of the upper half of the device to `tier` until cancelled. They replace older copies.

    numbers: of the copies; each has content of its own
    """
    pool = device.pool
    first, num_before = pool.num_blocks // 2, 0
    while True:
        await asyncio.sleep(pacing.wait_s(is_urgent=False))
        block_s = tier.store_s(1) if isinstance(tier, HostTier) else None
        num_before = max_copied_blocks(pool.num_blocks, tier.block_bytes, block_s, num_before=num_before)
        blocks = [
            BlockToStore(
                block_id=first + number % (pool.num_blocks - first),
                block_hash=number.to_bytes(HASH_BYTES, "big"),
                is_announced=False,
            )
            for number in islice(numbers, num_before)
        ]
        before_s = tier.stores_busy_s
        if not await tier.store(blocks):
            raise SystemExit(f"no block was copied to the {tier.tier.value}; see the log")
        pacing.charge(tier.stores_busy_s - before_s)


async def take_turns(device: Device, steps: StepTurns, seconds: float, numbers: Iterator[int]) -> None:
    """Let the modes take turns for about `seconds`, with a turn without copies between any two.

    numbers: of the copies, as of `copy_repeatedly`
    """
    assert device.host_tier is not None
    assert device.disk is not None
    tiers: dict[str, tuple[Tiers, ...]] = {
        HOST: (device.host_tier,),
        DISK: (device.disk,),
        BOTH: (device.host_tier, device.disk),
        UNPAUSED: (device.host_tier,),
    }
    for turn in range(max(len(MODES), int(seconds / TURN_S / 2))):
        mode = MODES[turn % len(MODES)]
        steps.begin(NONE)
        await asyncio.sleep(TURN_S)
        pacing = CopyPacing(partial(bool, mode != UNPAUSED))
        pacing.charge(random.random() * (MAX_COPY_S + DISPLACED_S))  # a turn has no more copies than other times
        copies = [asyncio.create_task(copy_repeatedly(device, tier, numbers, pacing)) for tier in tiers[mode]]
        steps.begin(mode)
        await asyncio.sleep(TURN_S)
        for task in copies:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
    steps.begin(NONE)
    await asyncio.sleep(TURN_S)


async def one_repeat(
    device: Device, directory: Path, batch: int, seconds: float, seed: int, numbers: Iterator[int]
) -> dict[str, float]:
    """Decode a batch until all turns have ended. Return the delay of each mode.

    numbers: of the copies; tiers keep those of earlier repeats, and store no content twice
    A sequence that ends is replaced by a new one. Steps that compute its prompt do not count.
    """
    engine = Engine(device.engine_config, device.pool, step_costs=unknown_costs, clock=asyncio.get_running_loop().time)
    steps, are_decoding, seq_ids, rng = StepTurns(), asyncio.Event(), count(1), random.Random(seed)
    size = vocabulary(directory)

    def add_sequence() -> None:
        prompts = random_prompts(1, PROMPT_TOKENS, size, rng)
        loop.add(sequence_requests(prompts, MAX_OUTPUTS, next(seq_ids), device.engine_config.block_size_tokens)[0])

    def on_step(plan: StepPlan, step_s: float) -> None:
        if len(plan.sequences) == batch and all(part.num_scheduled_tokens == 1 for part in plan.sequences):
            are_decoding.set()
            steps.observe(loop.last_step_started_s, sum(part.context_len for part in plan.sequences), step_s)

    def deliver(outcome: EngineOutcome) -> None:
        for output in outcome.outputs:
            if output.failure is not None:
                raise SystemExit(output.failure.message)
            if output.finish is not None and not turns.done():
                add_sequence()

    loop = EngineLoop(engine, device.executor, deliver, on_step)
    running = asyncio.create_task(loop.run())
    for _ in range(batch):
        add_sequence()

    async def after_the_first_step() -> None:
        await are_decoding.wait()
        await take_turns(device, steps, seconds, numbers)

    turns = asyncio.create_task(after_the_first_step())
    await asyncio.wait((running, turns), return_when=asyncio.FIRST_COMPLETED)
    for task in (running, turns):
        if task.done():
            task.result()
    for seq_id in range(1, next(seq_ids)):
        loop.cancel(seq_id)
    loop.drain()
    await running
    return steps.delays()


async def measure(arguments: argparse.Namespace, saved: SavedFigures) -> None:
    """Measure the missing repeats of all models."""
    for model in arguments.models.split(","):
        found = saved.get(model, [])
        directory = model_directory(model, arguments.out)
        with tempfile.TemporaryDirectory(prefix="kv-copies-", dir=arguments.out) as disk:
            config = worker_config(
                model=str(directory),
                max_model_len=MAX_MODEL_LEN,
                kv_memory=KV_GIB * 2**30,
                host_kv_memory=TIER_BYTES,
                disk_kv=Path(disk),
                disk_kv_size=TIER_BYTES,
                threads_per_worker=THREADS,
                device="cpu",
            )
            worker = WorkerRef(worker_id="bench", worker_epoch=1, address="bench")
            device = await asyncio.to_thread(open_device, config, worker)
            try:
                await asyncio.to_thread(wait_for_memory)
                with frozen_heap():  # the worker does the same
                    numbers = count(1)
                    while len(found) < arguments.repeats:
                        seed = len(found)
                        found.append(
                            await one_repeat(device, directory, arguments.batch, arguments.seconds, seed, numbers)
                        )
                        saved[model] = found
                        print(model, found[-1], file=sys.stderr)
            finally:
                await device.aclose()


def delay_text(delays: Sequence[float]) -> str:
    """Return median, least and greatest delay in percent."""
    low, high = min(delays), max(delays)
    return f"{100 * statistics.median(delays):+.1f} % ({100 * low:+.1f} to {100 * high:+.1f})"


def main() -> None:
    """Run the benchmark and print the delay of each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps all figures")
    parser.add_argument("--models", default="demo,tiny-42m,qwen3-0.6b", help="comma-separated (all three)")
    parser.add_argument("--batch", type=int, default=8, help="sequences (8)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a repeat (60)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each model (3)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    saved = SavedFigures(arguments.out / "kv_copies.json")
    saved.setdefault("machine", machine("torch"))
    asyncio.run(measure(arguments, saved))
    print(saved["machine"])
    rows = [
        [model, *(delay_text([repeat[mode] for repeat in saved[model]]) for mode in MODES)]
        for model in arguments.models.split(",")
    ]
    print(table(["model", *MODES], rows))


if __name__ == "__main__":
    main()
