"""Chaos runs: seeded faults under load on a simulated cluster, followed by checks of all invariants.

Clients cancel, streams are cut, reads get stuck, and processes die and restart. The transcript of a run is a
list of lines. Two runs with the same seed produce the same transcript.
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

SETTLE_S = 20.0
"""Time after the last request and fault until the checks. Longer than every lease, timeout and stuck read."""
BUSY_POLL_S, BUSY_POLLS = 0.0002, 100
"""Interval and number of checks for messages under way before a stream is cut. Most streams are idle
mostly."""
DEADLINE_GRACE_S = 1.0
"""Longest time that a request may take beyond its deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosProfile:
    """Load and faults of a chaos run.

    num_requests: requests within `duration_s` seconds.
    cancelled: share of requests whose client cancels.
    cuts_per_s, deaths_per_s: mean rates of cut streams and killed processes.
    down_s: longest time until a killed process is restarted.
    num_prefixes: number of distinct prompt prefixes, which requests share.
    max_prompt_tokens, max_tokens: limits of prompt and output length.
    """

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
class ChaosReport:
    """Result of a chaos run.

    transcript: all faults and ends of requests, in order.
    outcomes: number of requests by outcome.
    faults: number of faults by kind.
    num_lost: messages that were under way in streams that were cut.
    num_audited: cached blocks whose content was compared with their hash.
    """

    seed: int
    transcript: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    num_lost: int = 0
    num_audited: int = 0

    def record_fault(self, kind: str, target: str) -> None:
        """Count a fault and append it to the transcript."""
        self.faults[kind] = self.faults.get(kind, 0) + 1
        self.transcript.append(f"{asyncio.get_running_loop().time():.9f} {kind} {target}")


async def run_chaos(config: ClusterConfig, model: SimModel, profile: ChaosProfile, seed: int) -> ChaosReport:
    """Run load and faults on a new cluster, wait until it has settled, and check the invariants.

    The invariants: every answer is a prefix of the expected one, no block or task is leaked, every cached
        block holds the tokens of its hash, and every request ends by its deadline. Raises AssertionError
        naming what does not hold, or the error of a process that ended without being killed.
    """
    rng = Random(seed)
    report = ChaosReport(seed=seed)
    cluster = SimCluster(config, model, rng.getrandbits(64))
    await cluster.start()
    await asyncio.sleep(1.0)
    requests = plan_requests(profile, Random(rng.getrandbits(64)), start_s=asyncio.get_running_loop().time())
    faults = asyncio.create_task(_inject_faults(cluster, profile, Random(rng.getrandbits(64)), report))
    answers = await asyncio.gather(*(run_client(request, cluster.gateway) for request in requests))
    await faults
    await asyncio.sleep(SETTLE_S)
    cluster.raise_failures()
    for answer in answers:
        _check_answer(answer, model)
        report.outcomes[answer.outcome] = report.outcomes.get(answer.outcome, 0) + 1
        report.transcript.append(
            f"{answer.ended_s:.9f} request {answer.request.number} {answer.outcome} {answer.tokens}"
        )
    _check_workers(cluster, report)
    report.num_audited = audit_caches(cluster, requests)
    report.num_lost = cluster.network.messages_lost
    await cluster.aclose()
    _check_no_tasks()
    return report


def plan_requests(profile: ChaosProfile, rng: Random, start_s: float) -> list[SimRequest]:
    """Return random requests whose prompts share prefixes, so that caches are hit. Some clients cancel."""
    prefixes = [
        tuple(rng.randrange(1, 200) for _ in range(rng.randrange(8, profile.max_prompt_tokens)))
        for _ in range(profile.num_prefixes)
    ]
    requests = []
    for number in range(profile.num_requests):
        prefix = rng.choice(prefixes)[: rng.randrange(1, profile.max_prompt_tokens)]
        tail = tuple(rng.randrange(1, 200) for _ in range(rng.randrange(1, 12)))
        requests.append(
            SimRequest(
                number=number,
                start_s=start_s + rng.uniform(0.0, profile.duration_s),
                prompt=(prefix + tail)[: profile.max_prompt_tokens],
                max_tokens=rng.randrange(1, profile.max_tokens + 1),
                num_samples=rng.choice((1, 1, 1, 2, 3)),
                seed=rng.getrandbits(32),
                cancel_after_s=rng.uniform(0.0, 0.4) if rng.random() < profile.cancelled else None,
            )
        )
    return requests


def audit_caches(cluster: SimCluster, requests: Iterable[SimRequest]) -> int:
    """Compare each cached block of each worker with the content that follows from the requests alone.

    Returns the number of blocks. Raises AssertionError naming a block with other content, or with a hash that
    no request can have produced.
    """
    size = next(iter(cluster.memories.values())).block_size_tokens
    root = root_hash(model_fingerprint=sim_layout(size).model_fingerprint, block_size_tokens=size)
    expected: dict[BlockHash, tuple[int, ...]] = {}
    for request in requests:
        for index in range(request.num_samples):
            tokens = [*request.prompt, *expected_answer(request, index, cluster.model.vocab_size)]
            slots = contents(tokens)
            for number, block_hash in enumerate(chain(root, token_ids(tokens), size)):
                expected[block_hash] = tuple(slots[number * size : (number + 1) * size])
    num_audited = 0
    for name in sorted(cluster.workers):
        pool, memory = cluster.workers[name].pool, cluster.memories[name]
        for block_hash in pool.hashes():
            (block_id,) = pool.lookup([block_hash])
            if memory.block(block_id) != expected.get(block_hash):
                raise AssertionError(
                    f"{name}: block {block_id} does not hold the tokens of its hash {block_hash.hex()}"
                )
            num_audited += 1
    return num_audited


async def _inject_faults(cluster: SimCluster, profile: ChaosProfile, rng: Random, report: ChaosReport) -> None:
    """Cut streams and kill processes for `duration_s`. At least one worker of each role lives at any time."""
    end_s = asyncio.get_running_loop().time() + profile.duration_s
    async with asyncio.TaskGroup() as group:
        group.create_task(_cut_streams(cluster, profile, rng, report, end_s))
        group.create_task(_kill_processes(cluster, profile, rng, report, end_s))


async def _cut_streams(
    cluster: SimCluster, profile: ChaosProfile, rng: Random, report: ChaosReport, end_s: float
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(rng.expovariate(profile.cuts_per_s))
        if loop.time() >= end_s:
            return
        streams = list(cluster.network.streams.values())
        if streams:
            stream = rng.choice(streams)
            for _ in range(BUSY_POLLS):  # wait for a message that the cut can lose
                if stream.num_under_way:
                    break
                await asyncio.sleep(BUSY_POLL_S)
            report.record_fault("cut", "-".join(stream.hosts))
            stream.cut()


async def _kill_processes(
    cluster: SimCluster, profile: ChaosProfile, rng: Random, report: ChaosReport, end_s: float
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(rng.expovariate(profile.deaths_per_s))
        if loop.time() >= end_s:
            return
        name = rng.choice(["scheduler", *sorted(cluster.workers)])
        if name == "scheduler":
            report.record_fault("kill", name)
            await cluster.kill(name)
            await asyncio.sleep(rng.uniform(0.1, profile.down_s))
            cluster.start_scheduler()
            continue
        role: WorkerRole = cluster.workers[name].role
        report.record_fault("kill", name)
        await cluster.kill(name)
        await asyncio.sleep(rng.uniform(0.1, profile.down_s))
        cluster.start_worker(name, role)
        await asyncio.sleep(1.0)  # until it serves again, because the next one may be the only other of its role


def _check_workers(cluster: SimCluster, report: ChaosReport) -> None:
    """Raise AssertionError if a worker holds leaked or quarantined blocks.

    Add all counts to the transcript.
    """
    for name in sorted(cluster.workers):
        cluster.workers[name].check_clean()
        counts = cluster.workers[name].pool.counts()
        if counts.quarantined:
            raise AssertionError(
                f"{name}: {counts.quarantined} blocks are still quarantined {SETTLE_S:g} s after the last fault"
            )
        report.transcript.append(f"{name} {counts}")


def _check_no_tasks() -> None:
    left = [
        f"{task.get_name()}: {task.get_coro()}" for task in asyncio.all_tasks() if task is not asyncio.current_task()
    ]
    if left:
        raise AssertionError(f"tasks left behind: {sorted(left)}")


def _check_answer(answer: SimAnswer, model: SimModel) -> None:
    answer.check(model.vocab_size)
    request = answer.request
    if answer.ended_s > request.start_s + request.timeout_s + DEADLINE_GRACE_S:
        raise AssertionError(f"request {request.number} ended {answer.ended_s - request.start_s:.3f} s after it began")
