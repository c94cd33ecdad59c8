"""Random faults by seed: every job ends once, all tokens are correct, and no resource is left."""

import asyncio
from contextlib import suppress
from functools import cache
from itertools import accumulate
from random import Random
from typing import Any

import pytest

from baton.core.errors import Reason, StreamBroken
from baton.core.ids import JobId
from baton.core.messages.jobs import Cancel, DecodeJob, PrefillJob
from baton.core.request import Sampling
from baton.sim.sim_network import Delays
from baton.sim.sim_transfer_backend import LinkModel
from baton.sim.virtual_time import run
from tests import builders
from tests.scale import sized
from tests.unit.worker.harness import Gateway, Pair, expected_tokens, pair
from tests.unit.worker.job_builders import decode_job, prefill_job
from tests.unit.worker.prefix_trio import BLOCK_BYTES

SEEDS = sized(10, 400)
REQUESTS = 24
FAULTS_S = 1.5
STUCK_S = 5.0
WINDOWS = ((0, 0), (6, 0), (3,), (17, 0, 4))
"""Tokens that each layer sees, 0 for all. Layers with different windows have different block tables."""


class Scenario:
    """One run of a pair of workers under one seed."""

    def __init__(self, workers: Pair, rng: Random) -> None:
        self.workers = workers
        self.rng = rng
        self.sent: list[tuple[Gateway, PrefillJob | DecodeJob]] = []
        self.cancelled: dict[JobId, set[int]] = {}

    async def play(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(REQUESTS):
                group.create_task(self.request(number))
            group.create_task(self.cut_peers())
            for gateway in (self.workers.to_p, self.workers.to_d):
                group.create_task(self.break_session(gateway))
        await asyncio.sleep(STUCK_S + 12.0)

    async def request(self, number: int) -> None:
        rng = self.rng
        await asyncio.sleep(rng.uniform(0, FAULTS_S))
        num_tokens = rng.choice((1, 3, 4, 5, 17, 40, 64, 80))
        fields: dict[str, Any] = {
            "request": b"request-%d"
            % (number if rng.random() < 0.85 else rng.randrange(number + 1)),  # else a further attempt
            "attempt": number,
            "token_ids": prefill_job(num_tokens, request=b"prompt-%d" % rng.randrange(8)).token_ids,
            "sampling": Sampling(max_tokens=rng.choice((1, 2, 8, 40)), seed=rng.randrange(3), ignore_eos=True),
            "sample_indices": tuple(range(rng.choice((1, 1, 1, 3)))),
            "deadline_s": rng.choice((60.0, 60.0, 60.0, 0.05)),
            "priority": rng.randrange(2),
        }
        kind = rng.choice(("handoff", "handoff", "handoff", "local", "no reader"))
        if kind == "handoff":
            prefill, decode = self.workers.jobs(num_tokens=num_tokens, **fields)
            await asyncio.gather(self.job(self.workers.to_p, prefill), self.job(self.workers.to_d, decode))
        elif kind == "local":
            await self.job(self.workers.to_d, decode_job(num_tokens, **fields))
        else:
            await self.job(self.workers.to_p, prefill_job(num_tokens, **fields))

    async def job(self, gateway: Gateway, job: PrefillJob | DecodeJob) -> None:
        """Send a job, perhaps late or twice, and perhaps cancel it or some of its samples."""
        rng = self.rng
        if rng.random() < 0.2:
            await asyncio.sleep(rng.uniform(0, 0.7))
        await self.send(gateway, job)
        self.sent.append((gateway, job))
        if rng.random() < 0.2:
            with suppress(StreamBroken):
                gateway.send(job)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.expovariate(20))
            samples = rng.choice(((), (0,)))
            self.cancelled.setdefault(job.job, set()).update(samples or job.sample_indices)
            await self.send(gateway, Cancel(job=job.job, reason=Reason.CANCELLED, sample_indices=samples))

    async def send(self, gateway: Gateway, message: PrefillJob | DecodeJob | Cancel) -> None:
        """Send a message as a gateway does: repeat it over the next stream if this one has broken."""
        while True:
            try:
                gateway.send(message)
            except StreamBroken:
                await asyncio.sleep(0.01)
            else:
                return

    async def break_session(self, gateway: Gateway) -> None:
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(self.rng.uniform(0, FAULTS_S / 3))
            await gateway.break_off()
            await asyncio.sleep(self.rng.uniform(0, 0.3))
            assert (await gateway.connect()).resumed
            for to, job in self.sent:
                if to is gateway and self.is_open(to, job):
                    gateway.send(job)
                    if job.job in self.cancelled and self.cancelled[job.job] >= set(job.sample_indices):
                        gateway.send(Cancel(job=job.job, reason=Reason.CANCELLED))

    @staticmethod
    def is_open(gateway: Gateway, job: PrefillJob | DecodeJob) -> bool:
        """Return True if the job has not ended from the gateway's view."""
        ended = {d.sample_index for d in gateway.deltas[job.job] if isinstance(job, PrefillJob) or d.finish is not None}
        return not gateway.failures[job.job] and not ended >= set(job.sample_indices)

    async def cut_peers(self) -> None:
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(self.rng.uniform(0, FAULTS_S / 3))
            self.workers.cluster.cut("d:1", "p:1")

    def check(self) -> None:
        for gateway, job in self.sent:
            deltas, failures = gateway.deltas[job.job], gateway.failures[job.job]
            assert len(failures) <= 1, (job.job, failures)
            wanted = set(job.sample_indices) - self.cancelled.get(job.job, set())
            for sample in job.sample_indices:
                own = [d for d in deltas if d.sample_index == sample]
                tokens = gateway.tokens(job.job, sample)
                assert tokens == expected_tokens(job, sample)[: len(tokens)], job.job
                assert [d.output_index for d in own] == [0, *accumulate(len(d.token_ids) for d in own[:-1])][: len(own)]
                assert all(d.finish is None for d in own[:-1])
                is_over = bool(own) if isinstance(job, PrefillJob) else bool(own) and own[-1].finish is not None
                assert is_over or failures or sample not in wanted, (job.job, sample, len(own))
        self.workers.check_clean()
        for node in (self.workers.p, self.workers.d):
            assert node.pool.counts().quarantined == 0
            assert not node.running.done()

    def trace(self) -> list[Any]:
        return [(str(j.job), g.tokens(j.job), [f.reason for f in g.failures[j.job]]) for g, j in self.sent]


@cache
def play(seed: int, host_kv_memory: int = 0, two_sided: bool = False) -> list[Any]:
    rng = Random(seed)
    link = LinkModel(bytes_per_s=rng.choice((1e6, 1e5)), stuck=rng.choice((0.0, 0.0, 0.02)), stuck_s=STUCK_S)
    delays = Delays(mean_s=rng.choice((0.0002, 0.005)))
    windows = WINDOWS[seed % len(WINDOWS)]
    num_tables = builders.windowed_layout(windows).windows.num_tables
    sizes = {
        "num_blocks": num_tables * rng.choice((40, 64, 200)),
        "p_blocks": num_tables * rng.choice((24, 40, 128)),
    }

    async def scenario() -> list[Any]:
        async with pair(
            seed,
            link=link,
            delays=delays,
            max_num_batched_tokens=rng.choice((16, 64)),
            host_kv_memory=host_kv_memory,
            two_sided=two_sided,
            kv_windows=windows,
            **sizes,
        ) as workers:
            played = Scenario(workers, rng)
            await played.play()
            played.check()
            return played.trace()

    return run(scenario())


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_job_ends_once_and_nothing_is_left(seed: int) -> None:
    trace = play(seed)
    assert any(tokens for _, tokens, _ in trace)


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_every_job_ends_once_with_a_host_tier(seed: int) -> None:
    """The tier is smaller than the KV of all prompts."""
    trace = play(seed, host_kv_memory=40 * BLOCK_BYTES)
    assert any(tokens for _, tokens, _ in trace)


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_every_job_ends_once_with_two_sided_reads(seed: int) -> None:
    trace = play(seed, host_kv_memory=40 * BLOCK_BYTES if seed % 2 else 0, two_sided=True)
    assert any(tokens for _, tokens, _ in trace)


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("host_kv_memory", [0, 40 * BLOCK_BYTES])
def test_run_is_reproducible_from_its_seed(host_kv_memory: int, two_sided: bool) -> None:
    assert play(3, host_kv_memory, two_sided) == play.__wrapped__(3, host_kv_memory, two_sided)


def test_faults_are_injected() -> None:
    reasons = {reason for seed in range(SEEDS) for _, _, reasons in play(seed) for reason in reasons}
    assert reasons >= {Reason.CANCELLED, Reason.SUPERSEDED, Reason.DEADLINE, Reason.LEASE_LOST, Reason.TRANSFER_TIMEOUT}
