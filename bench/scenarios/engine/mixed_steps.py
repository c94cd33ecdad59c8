"""Measures how much prefill delays decoding in one engine, with the step budget and with prompts first.

python -m bench mixed_steps --out DIR [--models demo,tiny-42m] [--outputs 256] [--requests 60] [--repeats 5]

One hybrid engine with both cores runs in this process, alternately in two modes:

step budget: prompts get what answers can spare within their derived targets.
prompts first: every step takes as many prompt tokens as fit.

All prompts are new and have PROMPT_TOKENS tokens. Capacity is the rate at which the engine finishes all
requests if they arrive together. Then requests arrive at SHARE of the capacity (Poisson). Each gap between
two tokens of a sequence is divided by the time of a decode-only step of the same batch size (the median of
such steps in the same run). The table also shows gaps that ended in a decode-only step: their scatter is a
lower limit for any policy.

The run starts after the KV memory is prefaulted (`baton.transfer.backends.prefault`), because page faults
slow steps down. DIR keeps every figure. An interrupted run continues where it stopped.
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
from baton.runtime.memory.garbage_collection import frozen_heap
from baton.transfer.backends.prefault import PREFAULT_THREAD_NAME
from baton.worker.costs.measure_costs import measure_costs
from baton.worker.costs.step_cost_keeper import CostKeeper, work_of
from baton.worker.device.open_device import open_device
from baton.worker.device.worker_device import Device
from bench.scenarios.cluster.goodput import model_directory
from bench.support.engine.engine_prompts import random_prompts
from bench.support.saved_figures import SavedFigures
from bench.systems.baton_cluster import machine, table
from bench.systems.bench_worker import worker_config
from bench.systems.engines import THREADS, sequence_requests, vocabulary

PROMPT_TOKENS = 1024
SHARE = 0.8
KV_GIB = 1
"""KV memory in GiB. All requests together need less."""
MODES = {"step budget": True, "prompts first": False}
"""True for the mode in which the engine knows what steps cost."""


@dataclass(slots=True)
class RunMeasurements:
    """Measurements of one run.

    took_s: duration of the run.
    gaps: of each gap between tokens (seconds, decodes in the step that ended it, True if that step only
    decoded).
    decode_only_s: seconds of decode-only steps, by batch size.
    ttfts_s: TTFT of each request, from its arrival time.
    """

    took_s: float = 0.0
    gaps: list[tuple[float, int, bool]] = field(default_factory=list)
    decode_only_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    ttfts_s: list[float] = field(default_factory=list)

    def relative_gaps(self, *, decode_only: bool = False) -> np.ndarray:
        """Return all gaps, divided by the median decode-only step of the same batch size.

        With `decode_only`, return only those gaps that ended in a decode-only step.
        """
        batches = sorted(self.decode_only_s)
        steps_s = [statistics.median(self.decode_only_s[batch]) for batch in batches]
        return np.array(
            [
                gap_s / np.interp(batch, batches, steps_s)
                for gap_s, batch, is_decode_only in self.gaps
                if is_decode_only or not decode_only
            ]
        )


class EngineRun:
    """Runs requests through one engine, which is idle before and after.

    keeper: step costs for the step budget; None lets prompts go first.
    rate_rps: Poisson arrival rate; 0 submits all requests together.
    """

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
        self._is_decode_only = False
        self._open = {request.seq_id for request in requests}
        self.measured = RunMeasurements()

    async def run(self) -> RunMeasurements:
        """Submit all requests, wait until the engine is idle, and return the measurements."""
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
        self.measured.took_s = clock() - began_s
        return self.measured

    def _on_step(self, plan: StepPlan, step_s: float) -> None:
        if self._keeper is not None:
            self._keeper.observe(work_of(plan), step_s)
        self._batch = sum(part.num_scheduled_tokens == 1 for part in plan.sequences)
        self._is_decode_only = self._batch == len(plan.sequences)
        if self._is_decode_only:  # device time only: the time between two steps belongs to the gaps
            self.measured.decode_only_s[self._batch].append(
                self._loop.last_step_ended_s - self._loop.last_step_started_s
            )

    def _deliver(self, outcome: EngineOutcome) -> None:
        now_s = asyncio.get_running_loop().time()
        for output in outcome.outputs:
            if output.failure is not None:
                raise RuntimeError(output.failure.message)
            if output.seq_id in self._last_s:
                self.measured.gaps.append((now_s - self._last_s[output.seq_id], self._batch, self._is_decode_only))
            else:
                self.measured.ttfts_s.append(now_s - self._due_s[output.seq_id])
            self._last_s[output.seq_id] = now_s
            if output.finish is not None:
                self._open.discard(output.seq_id)


def wait_for_memory() -> None:
    """Block until the KV memory of this process is prefaulted."""
    for thread in threading.enumerate():
        if thread.name == PREFAULT_THREAD_NAME:
            thread.join()


class MixedStepsBench:
    """Runs both modes. `saved` keeps, by model, one entry per repeat with the figures of each mode."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._next_id = 1
        arguments.out.mkdir(parents=True, exist_ok=True)
        self.saved = SavedFigures(arguments.out / "mixed_steps.json")

    async def run(self) -> None:
        """Measure the missing repeats of all models."""
        self.saved.setdefault("machine", machine("torch", "transformers"))
        for model in self._arguments.models.split(","):
            found: list[Any] = self.saved.get(model, [])
            if len(found) >= self._arguments.repeats:
                continue
            directory = model_directory(model, self._arguments.out)
            config = worker_config(
                model=str(directory), kv_memory=KV_GIB * 2**30, threads_per_worker=THREADS, device="cpu"
            )
            device = await asyncio.to_thread(
                open_device, config, WorkerRef(worker_id="bench", worker_epoch=1, address="bench")
            )
            try:
                await asyncio.to_thread(wait_for_memory)
                keeper = CostKeeper(await measure_costs(device.executor, device.engine_config, device.pool))
                with frozen_heap():  # the worker does the same
                    while len(found) < self._arguments.repeats:
                        found.append(await self._repeat(device, keeper, directory, len(found)))
                        self.saved[model] = found
            finally:
                await device.aclose()

    async def _repeat(self, device: Device, keeper: CostKeeper, directory: Path, number: int) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        names = list(MODES) if number % 2 == 0 else list(reversed(MODES))
        for name in names:
            burst = await self._run(device, keeper if MODES[name] else None, directory, 0.0, number)
            figures[name] = {"capacity_rps": self._arguments.requests / burst.took_s}
        rate_rps = SHARE * max(figures[name]["capacity_rps"] for name in names)
        for name in names:
            measured = await self._run(device, keeper if MODES[name] else None, directory, rate_rps, number)
            gaps = measured.relative_gaps()
            figures[name] |= {
                "gap_p50": float(np.percentile(gaps, 50)),
                "gap_p99": float(np.percentile(gaps, 99)),
                "decode_only_p99": float(np.percentile(measured.relative_gaps(decode_only=True), 99)),
                "gap_p99_s": float(np.percentile([gap_s for gap_s, _, _ in measured.gaps], 99)),
                "batch": statistics.fmean(batch for _, batch, _ in measured.gaps),
                "ttft_p50_s": statistics.median(measured.ttfts_s),
            }
            print(number, name, figures[name], file=sys.stderr)
        return figures

    async def _run(
        self, device: Device, keeper: CostKeeper | None, directory: Path, rate_rps: float, seed: int
    ) -> RunMeasurements:
        rng = random.Random(self._next_id)
        prompts = random_prompts(self._arguments.requests, PROMPT_TOKENS, vocabulary(directory), rng)
        requests = sequence_requests(
            prompts, self._arguments.outputs, self._next_id, device.engine_config.block_size_tokens
        )
        self._next_id += len(requests)
        return await EngineRun(device, keeper, requests, rate_rps, seed).run()

    def show(self) -> None:
        """Print the tables of all models."""
        print(self.saved["machine"])
        head = [
            "",
            "capacity",
            "share of prompts first",
            "gap p50",
            "gap p99",
            "decode-only gap p99",
            "gap p99 ms",
            "batch",
            "TTFT p50 ms",
        ]
        for model in self._arguments.models.split(","):
            found = self.saved[model]
            print(f"\n{model}: {PROMPT_TOKENS} in / {self._arguments.outputs} out, {len(found)} repeats\n")
            rows = []
            for name in MODES:
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
                        f"{medians['decode_only_p99']:.2f}",
                        f"{1e3 * medians['gap_p99_s']:.1f}",
                        f"{medians['batch']:.1f}",
                        f"{1e3 * medians['ttft_p50_s']:.0f}",
                    ]
                )
            print(table(head, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that keeps all figures")
    parser.add_argument("--models", default="demo,tiny-42m", help="comma-separated (demo,tiny-42m)")
    parser.add_argument("--outputs", type=int, default=256, help="output tokens per request (256)")
    parser.add_argument("--requests", type=int, default=60, help="requests per run (60)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each mode (5)")
    bench = MixedStepsBench(parser.parse_args())
    asyncio.run(bench.run())
    bench.show()


if __name__ == "__main__":
    main()
