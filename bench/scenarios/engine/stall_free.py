"""Does a prompt stall whoever decodes, on a real engine? And what does it cost that it does not?

python -m bench stall_free --out DIR [--models demo,tiny-42m] [--outputs 256] [--requests 60] [--repeats 5]

One hybrid engine with both cores in this process, in turns with its batch policy and without: then a prompt
is computed once it is there, as much of it as a step holds. Prompts of PROMPT_TOKENS, all new. Capacity: all
requests at once. Then they come at SHARE of that (Poisson), and every gap between two tokens of an answer
counts, over the time of a step of as many sequences that all decode (the median of such steps of the same
run). How gaps scatter that no prompt was in the way of is told, too: no policy can do better. First it waits
until the worker's memory is real, which takes from its steps (`baton.transfer.backends.prefault`). DIR keeps
every figure, and a bench that was stopped goes on where it was.
"""

import argparse
import asyncio
import random
import statistics
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from baton.core.ids import WorkerRef
from baton.engine.engine import Engine, unknown_costs
from baton.engine.loop import EngineLoop
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.sequence import SequenceRequest
from baton.engine.state.step import StepPlan
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.process.process import frozen_heap
from baton.transfer.backends.prefault import PREFAULT_THREAD_NAME
from baton.worker.costs.calibrate import measure_costs
from baton.worker.costs.step_cost_keeper import CostKeeper
from baton.worker.device.open_device import open_device
from baton.worker.device.worker_device import Device
from bench.scenarios.cluster.goodput import model_directory
from bench.scenarios.engine.engine_speed import FIRST_ID
from bench.support.saved_figures import SavedFigures
from bench.systems.baton_cluster import machine, table
from bench.systems.engines import THREADS, sequence_requests, vocabulary

PROMPT_TOKENS = 1024
SHARE = 0.8
KV_GIB = 1
"""All requests at once need less."""
WAYS = {"emulated": True, "prompts first": False}


@dataclass(slots=True)
class Seen:
    """Of one run: `gaps` (seconds, how many decoded in the step that ended it, whether it did nothing else);
    `alone`: seconds of steps that only decode, by how many."""

    took_s: float = 0.0
    gaps: list[tuple[float, int, bool]] = field(default_factory=list)
    alone: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    ttfts_s: list[float] = field(default_factory=list)

    def relative_gaps(self, *, alone: bool = False) -> np.ndarray:
        """`alone`: only of steps that only decoded."""
        batches = sorted(self.alone)
        steps_s = [statistics.median(self.alone[batch]) for batch in batches]
        return np.array(
            [
                gap_s / np.interp(batch, batches, steps_s)
                for gap_s, batch, is_alone in self.gaps
                if is_alone or not alone
            ]
        )


class EngineRun:
    """Requests through one engine, which is idle before and afterwards. `rate_rps` 0: all at once."""

    def __init__(
        self, device: Device, keeper: CostKeeper | None, requests: list[SequenceRequest], rate_rps: float, seed: int
    ) -> None:
        engine = Engine(
            device.engine_config,
            device.pool,
            step_costs=unknown_costs if keeper is None else lambda: keeper.costs,
            clock=asyncio.get_running_loop().time,
        )
        self._loop = EngineLoop(engine, device.executor, self._deliver, self._on_step)
        self._keeper = keeper
        self._requests = requests
        self._rate_rps = rate_rps
        self._rng = random.Random(seed)
        self._due_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        self._batch = 0
        self._is_alone = False
        self._open = {request.seq_id for request in requests}
        self.seen = Seen()

    async def run(self) -> Seen:
        clock = asyncio.get_running_loop().time
        began_s = at_s = clock()
        running = asyncio.create_task(self._loop.run())
        for request in self._requests:
            at_s += self._rng.expovariate(self._rate_rps) if self._rate_rps else 0.0
            await asyncio.sleep(max(0.0, at_s - clock()))
            self._due_s[request.seq_id] = at_s
            self._loop.add(request)
        self._loop.drain()
        await running
        assert not self._open
        self.seen.took_s = clock() - began_s
        return self.seen

    def _on_step(self, plan: StepPlan, step_s: float) -> None:
        if self._keeper is not None:
            self._keeper.observe(plan, step_s)
        self._batch = sum(part.num_scheduled_tokens == 1 for part in plan.sequences)
        self._is_alone = self._batch == len(plan.sequences)
        if self._is_alone:  # the device's time: what lies between two steps is of the gaps
            self.seen.alone[self._batch].append(self._loop.last_step_ended_s - self._loop.last_step_started_s)

    def _deliver(self, outcome: EngineOutcome) -> None:
        now_s = asyncio.get_running_loop().time()
        for output in outcome.outputs:
            if output.failure is not None:
                raise RuntimeError(output.failure.message)
            if output.seq_id in self._last_s:
                self.seen.gaps.append((now_s - self._last_s[output.seq_id], self._batch, self._is_alone))
            else:
                self.seen.ttfts_s.append(now_s - self._due_s[output.seq_id])
            self._last_s[output.seq_id] = now_s
            if output.finish is not None:
                self._open.discard(output.seq_id)


def wait_for_memory() -> None:
    """Until all of this process's KV memory is real."""
    for thread in threading.enumerate():
        if thread.name == PREFAULT_THREAD_NAME:
            thread.join()


class StallFreeBench:
    """`known`: by model, of each repeat the figures of each way."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._next_id = 1
        arguments.out.mkdir(parents=True, exist_ok=True)
        self.known = SavedFigures(arguments.out / "stall_free.json")

    async def run(self) -> None:
        self.known.setdefault("machine", machine("torch", "transformers"))
        for model in self._arguments.models.split(","):
            found: list[Any] = self.known.get(model, [])
            if len(found) >= self._arguments.repeats:
                continue
            directory = model_directory(model, self._arguments.out)
            config = WorkerConfig(
                model=str(directory), kv_memory=KV_GIB * 2**30, threads_per_worker=THREADS, device="cpu"
            )
            device = await asyncio.to_thread(
                open_device, config, WorkerRef(worker_id="bench", worker_epoch=1, address="bench")
            )
            try:
                await asyncio.to_thread(wait_for_memory)
                keeper = CostKeeper(await measure_costs(device.executor, device.engine_config, device.pool))
                with frozen_heap():  # as in a worker
                    while len(found) < self._arguments.repeats:
                        found.append(await self._repeat(device, keeper, directory, len(found)))
                        self.known[model] = found
            finally:
                await device.aclose()

    async def _repeat(self, device: Device, keeper: CostKeeper, directory: Path, number: int) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        names = list(WAYS) if number % 2 == 0 else list(reversed(WAYS))
        for name in names:
            burst = await self._run(device, keeper if WAYS[name] else None, directory, 0.0, number)
            figures[name] = {"capacity_rps": self._arguments.requests / burst.took_s}
        rate_rps = SHARE * max(figures[name]["capacity_rps"] for name in names)
        for name in names:
            seen = await self._run(device, keeper if WAYS[name] else None, directory, rate_rps, number)
            gaps = seen.relative_gaps()
            figures[name] |= {
                "gap_p50": float(np.percentile(gaps, 50)),
                "gap_p99": float(np.percentile(gaps, 99)),
                "alone_p99": float(np.percentile(seen.relative_gaps(alone=True), 99)),
                "gap_p99_s": float(np.percentile([gap_s for gap_s, _, _ in seen.gaps], 99)),
                "batch": statistics.fmean(batch for _, batch, _ in seen.gaps),
                "ttft_p50_s": statistics.median(seen.ttfts_s),
            }
            print(number, name, figures[name], file=sys.stderr)
        return figures

    async def _run(
        self, device: Device, keeper: CostKeeper | None, directory: Path, rate_rps: float, seed: int
    ) -> Seen:
        rng = random.Random(self._next_id)
        size = vocabulary(directory)
        prompts = [
            [rng.randrange(FIRST_ID, size) for _ in range(PROMPT_TOKENS)] for _ in range(self._arguments.requests)
        ]
        requests = sequence_requests(
            prompts, self._arguments.outputs, self._next_id, device.engine_config.block_size_tokens
        )
        self._next_id += len(requests)
        return await EngineRun(device, keeper, requests, rate_rps, seed).run()

    def show(self) -> None:
        print(self.known["machine"])
        head = [
            "",
            "capacity",
            "of prompts first",
            "gap p50",
            "gap p99",
            "without prompts",
            "gap p99 ms",
            "decoding",
            "TTFT p50 ms",
        ]
        for model in self._arguments.models.split(","):
            found = self.known[model]
            print(f"\n{model}: {PROMPT_TOKENS} in / {self._arguments.outputs} out, {len(found)} repeats\n")
            rows = []
            for name in WAYS:
                medians = {key: statistics.median(repeat[name][key] for repeat in found) for key in found[0][name]}
                share = statistics.median(
                    repeat[name]["capacity_rps"] / repeat["prompts first"]["capacity_rps"] for repeat in found
                )
                rows.append(
                    [
                        name,
                        f"{medians['capacity_rps']:.2f} req/s",
                        f"{share:.0%}",
                        f"{medians['gap_p50']:.2f}",
                        f"{medians['gap_p99']:.2f}",
                        f"{medians['alone_p99']:.2f}",
                        f"{1e3 * medians['gap_p99_s']:.1f}",
                        f"{medians['batch']:.1f}",
                        f"{1e3 * medians['ttft_p50_s']:.0f}",
                    ]
                )
            print(table(head, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="demo,tiny-42m")
    parser.add_argument("--outputs", type=int, default=256)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    bench = StallFreeBench(parser.parse_args())
    asyncio.run(bench.run())
    bench.show()


if __name__ == "__main__":
    main()
