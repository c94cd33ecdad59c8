"""A seeded storm over a simulated cluster: clients leave, streams are cut, reads get stuck, processes die and
come back.

Then it must be calm again.

The transcript of a run is a list of lines; two runs of one seed give the same bytes.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from baton.core.cluster.worker_report import WorkerRole
from baton.core.kv.block_hash import BlockHash, chain, root_hash, token_ids
from baton.runtime.config.settings import ClusterConfig
from baton.sim.sim_clients import SimAnswer, SimRequest, expected_answer, run_client
from baton.sim.sim_cluster import SimCluster, SimModel, sim_layout
from baton.sim.sim_memory import contents

CALM_S = 20.0
"""After the last request and the last fault: longer than every lease, grace, deadline and stuck read."""
MOMENT_S, MOMENTS_TO_BE_BUSY = 0.0002, 100
GRACE_S = 1.0
"""By how much a request may end after its deadline (I4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """How much happens, and how often."""

    num_requests: int = 500
    duration_s: float = 25.0
    cancelled: float = 0.2
    cuts_per_s: float = 1.0
    deaths_per_s: float = 0.3
    down_s: float = 1.5
    num_prefixes: int = 6
    max_prompt_tokens: int = 120
    max_tokens: int = 24


@dataclass(slots=True, kw_only=True)
class StormReport:
    """What happened, for the checks of a test and for people."""

    seed: int
    transcript: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    num_lost: int = 0
    """Messages that were under way in a stream that was cut."""
    num_audited: int = 0
    """Cached blocks that were compared with what their hash stands for."""

    def fault(self, kind: str, what: str) -> None:
        self.faults[kind] = self.faults.get(kind, 0) + 1
        self.transcript.append(f"{asyncio.get_running_loop().time():.9f} {kind} {what}")


async def run_storm(config: ClusterConfig, model: SimModel, storm: Storm, seed: int) -> StormReport:
    """Run one storm to its calm and check the invariants I1 (answers), I2 (nothing left), I3 (each cached
    block) and I4 (in time).

    Raises AssertionError naming what does not hold, or whatever a process that nobody killed died of.
    """
    rng = Random(seed)
    report = StormReport(seed=seed)
    cluster = SimCluster(config, model, rng.getrandbits(64))
    await cluster.start()
    await asyncio.sleep(1.0)
    requests = plan_requests(storm, Random(rng.getrandbits(64)), start_s=asyncio.get_running_loop().time())
    nemesis = asyncio.create_task(_nemesis(cluster, storm, Random(rng.getrandbits(64)), report))
    answers = await asyncio.gather(*(run_client(request, cluster.gateway) for request in requests))
    await nemesis
    await asyncio.sleep(CALM_S)
    cluster.raise_failures()
    for answer in answers:
        _check_answer(answer, model)
        report.outcomes[answer.outcome] = report.outcomes.get(answer.outcome, 0) + 1
        report.transcript.append(
            f"{answer.ended_s:.9f} request {answer.request.number} {answer.outcome} {answer.tokens}"
        )
    for name in sorted(cluster.workers):
        cluster.workers[name].check_clean()
        counts = cluster.workers[name].pool.counts()
        if counts.quarantined:
            raise AssertionError(
                f"{name}: {counts.quarantined} blocks are still quarantined {CALM_S:g} s after the last fault"
            )
        report.transcript.append(f"{name} {counts}")
    report.num_audited = audit_caches(cluster, requests)
    report.num_lost = cluster.network.messages_lost
    await cluster.aclose()
    left = [
        f"{task.get_name()}: {task.get_coro()}" for task in asyncio.all_tasks() if task is not asyncio.current_task()
    ]
    if left:
        raise AssertionError(f"tasks left behind: {sorted(left)}")
    return report


def plan_requests(storm: Storm, rng: Random, start_s: float) -> list[SimRequest]:
    """Prompts that share prefixes, so that caches are hit; some clients leave early."""
    prefixes = [
        tuple(rng.randrange(1, 200) for _ in range(rng.randrange(8, storm.max_prompt_tokens)))
        for _ in range(storm.num_prefixes)
    ]
    requests = []
    for number in range(storm.num_requests):
        prefix = rng.choice(prefixes)[: rng.randrange(1, storm.max_prompt_tokens)]
        tail = tuple(rng.randrange(1, 200) for _ in range(rng.randrange(1, 12)))
        requests.append(
            SimRequest(
                number=number,
                start_s=start_s + rng.uniform(0.0, storm.duration_s),
                prompt=(prefix + tail)[: storm.max_prompt_tokens],
                max_tokens=rng.randrange(1, storm.max_tokens + 1),
                num_samples=rng.choice((1, 1, 1, 2, 3)),
                seed=rng.getrandbits(32),
                cancel_after_s=rng.uniform(0.0, 0.4) if rng.random() < storm.cancelled else None,
            )
        )
    return requests


def audit_caches(cluster: SimCluster, requests: Iterable[SimRequest]) -> int:
    """Compare each cached block of each worker with what it must hold, computed from the requests alone (I3);
    how many there were. Raises AssertionError naming a block of other content, or of a hash that nobody's
    tokens have."""
    size = next(iter(cluster.memories.values())).block_size_tokens
    root = root_hash(model_fingerprint=sim_layout(size).model_fingerprint, block_size_tokens=size)
    right: dict[BlockHash, tuple[int, ...]] = {}
    for request in requests:
        for index in range(request.num_samples):
            tokens = [*request.prompt, *expected_answer(request, index, cluster.model.vocab_size)]
            slots = contents(tokens)
            for number, block_hash in enumerate(chain(root, token_ids(tokens), size)):
                right[block_hash] = tuple(slots[number * size : (number + 1) * size])
    num_audited = 0
    for name in sorted(cluster.workers):
        pool, memory = cluster.workers[name].pool, cluster.memories[name]
        for block_hash in pool.hashes():
            (block_id,) = pool.lookup([block_hash])
            if memory.block(block_id) != right.get(block_hash):
                raise AssertionError(
                    f"{name}: block {block_id} does not hold what its hash {block_hash.hex()} stands for"
                )
            num_audited += 1
    return num_audited


async def _nemesis(cluster: SimCluster, storm: Storm, rng: Random, report: StormReport) -> None:
    """Faults until the storm's end; at least one worker of each role lives at any time."""
    end_s = asyncio.get_running_loop().time() + storm.duration_s
    async with asyncio.TaskGroup() as group:
        group.create_task(_cut_streams(cluster, storm, rng, report, end_s))
        group.create_task(_kill_processes(cluster, storm, rng, report, end_s))


async def _cut_streams(cluster: SimCluster, storm: Storm, rng: Random, report: StormReport, end_s: float) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(rng.expovariate(storm.cuts_per_s))
        if loop.time() >= end_s:
            return
        streams = list(cluster.network.streams.values())
        if streams:
            stream = rng.choice(streams)
            for _ in range(MOMENTS_TO_BE_BUSY):  # most are silent most of the time: what is lost is what was under way
                if stream.num_under_way:
                    break
                await asyncio.sleep(MOMENT_S)
            report.fault("cut", "-".join(stream.hosts))
            stream.cut()


async def _kill_processes(cluster: SimCluster, storm: Storm, rng: Random, report: StormReport, end_s: float) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(rng.expovariate(storm.deaths_per_s))
        if loop.time() >= end_s:
            return
        name = rng.choice(["scheduler", *sorted(cluster.workers)])
        if name == "scheduler":
            report.fault("kill", name)
            await cluster.kill(name)
            await asyncio.sleep(rng.uniform(0.1, storm.down_s))
            cluster.start_scheduler()
            continue
        role: WorkerRole = cluster.workers[name].role
        report.fault("kill", name)
        await cluster.kill(name)
        await asyncio.sleep(rng.uniform(0.1, storm.down_s))
        cluster.start_worker(name, role)
        await asyncio.sleep(1.0)  # until it is there for others again: the next victim may be its only colleague


def _check_answer(answer: SimAnswer, model: SimModel) -> None:
    answer.check(model.vocab_size)
    request = answer.request
    if answer.ended_s > request.start_s + request.timeout_s + GRACE_S:
        raise AssertionError(f"request {request.number} ended {answer.ended_s - request.start_s:.3f} s after it began")
