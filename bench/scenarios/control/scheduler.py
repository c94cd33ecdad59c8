"""Measures the time of a placement decision with 100 workers and a million indexed (worker, block) pairs.

python -m bench scheduler [--policy kv_centric] [--workers 100] [--pairs 1000000] [--seconds 10] [--json]

One complete scheduler runs on one core.

decision: `Scheduler.place` for prompts of 8,192 tokens that begin with 0 to 95 % of a stored chain. It looks
  up the index, predicts every candidate, reserves the placement and marks its blocks as expected.
decisions_per_s: placements per second of CPU time, with log-uniform lengths of 128 to 131,072 tokens. It
  includes all deferred work, the decision record, and the report that the request has finished.
grpc: `place` called from another process, one call in flight.
grpc_empty: a call without content between the same processes, in alternation with the others.
loop: a fixed Python loop, in alternation with the decisions. It shows how fast the core was during the run;
  on a shared machine that varies by half within a minute.

`prefix_index` measures the index alone.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from statistics import median, quantiles

import uvloop
from prometheus_client import CollectorRegistry

from baton.core.cluster.placement import Placement, PlacementQuery
from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import BlockCounts, LinkReport, WorkerReport, WorkerRole, WorkerState
from baton.core.ids import WorkerRef
from baton.core.interfaces import Duplex, SchedulerApi
from baton.core.kv.block_hash import HASH_SCHEME, BlockHash
from baton.core.kv.kv_layout import KvComponent, KvLayout, LayerGroup
from baton.core.request import RequestActuals
from baton.core.step_cost import StepCostModel
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from baton.runtime.memory.garbage_collection import infrequent_gc
from baton.runtime.network.in_process_network import duplex_pair
from baton.runtime.observability.metrics import SchedulerMetrics
from baton.scheduler.admission.slo_admission import AdmissionMode
from baton.scheduler.scheduler_budget import scheduler_budget
from baton.scheduler.scheduler_service import Scheduler, SchedulerRules
from baton.scheduler.state.worker_streams import SchedulerTimes
from baton.store.memory.memory_stores import MemoryDecisionStore, MemoryKvEventFeed
from bench.scenarios.control.prefix_index import BLOCK_SIZE_TOKENS, Population, churn, populate, prompt
from bench.systems.baton_cluster import machine, table

Between = Callable[[], Awaitable[None]]

NEVER_S = 1e9
NUM_TIMED, NUM_WARM = 3_000, 300
EVERY_THIRD = 3
LOOPS = 10
LAYOUT = KvLayout(
    model_fingerprint="m",
    tokenizer_fingerprint="t",
    block_size_tokens=BLOCK_SIZE_TOKENS,
    groups=(
        LayerGroup(
            layer_begin=0,
            num_layers=32,
            components=tuple(
                KvComponent(name=name, num_kv_heads=8, head_dim=128, dtype="bfloat16") for name in ("k", "v")
            ),
        ),
    ),
)


def worker_report(worker: WorkerRef, number: int, peers: tuple[WorkerRef, ...], rng: Random) -> WorkerReport:
    """Return a report with some load.

    Every third worker decodes and has links to all peers; the others prefill.
    """
    decodes = number % EVERY_THIRD == 0
    return WorkerReport(
        worker=worker,
        report_seq=1,
        role=WorkerRole.DECODE if decodes else WorkerRole.PREFILL,
        state=WorkerState.READY,
        model="model",
        layout=LAYOUT,
        blocks=BlockCounts(total=60_000, free=30_000, cached=20_000, used=10_000, receiving=0, quarantined=0),
        max_model_len=262_144,
        max_num_seqs=256,
        waiting_prefill_tokens=0 if decodes else rng.randrange(20_000),
        running_seqs=rng.randrange(64) if decodes else rng.randrange(4),
        running_context_tokens=rng.randrange(200_000) if decodes else 0,
        links=tuple(LinkReport(peer=peer, bytes_per_s=rng.uniform(5e9, 4e10)) for peer in peers) if decodes else (),
        costs=StepCostModel(
            step_s=4e-3, prefill_token_s=6e-5, prefill_attended_s=2e-9, decode_seq_s=5e-5, decode_context_s=2e-8
        ),
        max_num_batched_tokens=8_192,
        mean_output_tokens=rng.uniform(100, 400),
    )


@asynccontextmanager
async def scheduler_running(
    policy: str, num_workers: int, num_pairs: int
) -> AsyncIterator[tuple[Scheduler, Population]]:
    """Run a scheduler with a filled index and reports of all workers."""
    rng = Random(0)
    scheduler = Scheduler(
        scheduler_id="s0",
        rules=SchedulerRules(
            policy=policy,
            admission=AdmissionMode.PREDICTIVE,
            max_waiting_seqs=256,
            max_worker_queue_s=1.0,
            max_queued_requests=0,
        ),
        times=SchedulerTimes(silence_s=NEVER_S, settle_s=0.0, reservation_s=60.0, watch_interval_s=1.0),
        store=MemoryDecisionStore(),
        feed=MemoryKvEventFeed(),
        metrics=SchedulerMetrics(CollectorRegistry()),
        rng=rng,
        budget=scheduler_budget(2**30),
    )
    population = populate(num_workers, num_pairs, rng, scheduler.index)
    sources = tuple(worker for number, worker in enumerate(population.workers) if number % EVERY_THIRD)
    reporting = []
    for number, worker in enumerate(population.workers):
        ends: tuple[Duplex[WorkerReport, WorkerCommand], Duplex[WorkerCommand, WorkerReport]] = duplex_pair()
        worker_end, scheduler_end = ends
        reporting.append((asyncio.create_task(scheduler.report(scheduler_end)), worker_end))
        worker_end.send(worker_report(worker, number, sources, rng))
    await asyncio.sleep(1.0)
    try:
        with infrequent_gc():  # the service does the same
            yield scheduler, population
    finally:
        await scheduler.aclose()
        await asyncio.gather(*(task for task, _ in reporting), return_exceptions=True)


def placement_query(number: int, hashes: tuple[BlockHash, ...]) -> PlacementQuery:
    """Return a query for a prompt with these blocks and a partial last block."""
    return PlacementQuery(
        request_id=number.to_bytes(16, "big"),
        attempt=0,
        model="model",
        num_prompt_tokens=len(hashes) * BLOCK_SIZE_TOKENS + 7,
        max_tokens=256,
        block_hashes=hashes,
        hash_scheme=HASH_SCHEME,
    )


async def placement_seconds(
    api: SchedulerApi, population: Population, rng: Random, num_blocks: int | None, between: Between | None = None
) -> list[float]:
    """Return the seconds of each `place` call. `between` is called after each of them."""
    taken = []
    for number in range(NUM_WARM + NUM_TIMED):
        query = placement_query(number, prompt(population, rng, num_blocks))
        began_s = time.perf_counter()
        answer = await api.place(query)
        if number >= NUM_WARM:
            taken.append(time.perf_counter() - began_s)
        await report_finished(api, answer)
        if between is not None:
            await between()
        await asyncio.sleep(0)
    return taken


def loop_s() -> float:
    """Return the seconds of a fixed Python loop, which shows the current speed of the core."""
    known = dict.fromkeys(range(100), 0)
    began_s = time.perf_counter()
    for _ in range(LOOPS):
        for key in known:
            known[key]
    return time.perf_counter() - began_s


async def report_finished(api: SchedulerApi, answer: object) -> None:
    """Report to the scheduler that the placed request has finished."""
    if isinstance(answer, Placement):
        await api.finished(RequestActuals(decision_id=answer.decision_id, outcome="finished", ttft_s=0.5, tpot_s=0.02))


async def per_second(scheduler: Scheduler, population: Population, rng: Random, seconds: float) -> float:
    """Return decisions per second of CPU time, without the time to generate the prompts."""
    prompts = [prompt(population, rng) for _ in range(2_000)]
    number, began_s = 0, time.process_time()
    while time.process_time() - began_s < seconds:
        await report_finished(scheduler, await scheduler.place(placement_query(number, prompts[number % len(prompts)])))
        number += 1
        if number % 16 == 0:
            await asyncio.sleep(0)
    return number / (time.process_time() - began_s)


async def serve(options: argparse.Namespace) -> None:
    """Serve the scheduler over gRPC until stdin ends; print `ready PORT` first. Used by the `grpc` figure."""
    async with scheduler_running(options.policy, options.workers, options.pairs) as (scheduler, _):
        server = GrpcServer(heartbeat_s=2.0)
        server.add_scheduler(scheduler)
        print("ready", await server.start("127.0.0.1", 0), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(0.1)


async def over_grpc(options: argparse.Namespace, rng: Random) -> tuple[list[float], list[float]]:
    """Return the seconds of each `place` call over gRPC, and of each empty call."""
    empty: list[float] = []

    async def call_empty() -> None:
        began_s = time.perf_counter()
        await api.finished()
        empty.append(time.perf_counter() - began_s)

    command = [sys.executable, "-m", "bench.scenarios.control.scheduler", "--serve", "--policy", options.policy]
    command += ["--workers", str(options.workers), "--pairs", str(options.pairs)]
    # A blocking Popen is fine here, because nothing else runs in this event loop.
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:  # noqa: ASYNC220
        assert server.stdout is not None
        assert server.stdin is not None
        port = server.stdout.readline().split()[1]
        network = GrpcNetwork(heartbeat_s=2.0)
        twin = populate(
            options.workers, options.pairs, Random(0)
        )  # the server draws the same chains from the same seed
        api = network.scheduler(f"127.0.0.1:{port}")
        taken = await placement_seconds(api, twin, rng, 8_192 // BLOCK_SIZE_TOKENS, call_empty)
        await network.aclose()
        server.stdin.close()
    return taken, empty


async def measure(options: argparse.Namespace) -> dict[str, float]:
    """Return all figures by name."""
    rng = Random(1)
    async with scheduler_running(options.policy, options.workers, options.pairs) as (scheduler, population):
        loops: list[float] = []

        async def loop() -> None:
            loops.append(loop_s())

        cuts = quantiles(await placement_seconds(scheduler, population, rng, 8_192 // BLOCK_SIZE_TOKENS, loop), n=100)
        figures = {
            "decision_p50_ms": cuts[49] * 1e3,
            "decision_p99_ms": cuts[98] * 1e3,
            "loop_p50_ms": median(loops) * 1e3,
        }
        figures["decisions_per_s"] = await per_second(scheduler, population, rng, options.seconds)
        figures["events_per_s"] = churn(population, rng)
        figures["index_mb"] = population.index_mb
    taken, empty = await over_grpc(options, rng)
    cuts = quantiles(taken, n=100)
    return figures | {
        "grpc_p50_ms": cuts[49] * 1e3,
        "grpc_p99_ms": cuts[98] * 1e3,
        "grpc_empty_p50_ms": median(empty) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="kv_centric", help="scheduling policy (kv_centric)")
    parser.add_argument("--workers", type=int, default=100, help="workers that report (100)")
    parser.add_argument("--pairs", type=int, default=1_000_000, help="(worker, block) pairs in the index (1000000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="CPU seconds for decisions_per_s (10)")
    parser.add_argument("--json", action="store_true", help="also print one line of JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[0] if options.serve else cores[-1]})
    if options.serve:
        uvloop.run(serve(options))
        return
    figures = uvloop.run(measure(options))
    print(f"{machine('numpy', 'grpcio')}\n")
    print(
        table(
            ["figure", "value"],
            [[name, f"{value:,.3f}" if value < 100 else f"{value:,.0f}"] for name, value in figures.items()],
        )
    )
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
