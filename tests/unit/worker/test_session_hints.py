"""Hints of requests at a worker: retention, early copies, and reloads before announced turns."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.core.kv.block_hash import NO_HASH, token_ids
from baton.core.kv.kv_events import Tier
from baton.core.request import Sampling, SessionHints, SessionKey
from baton.worker.tiers import copy_out
from baton.worker.worker_metrics import WorkerMetrics
from tests.builders import windowed_layout
from tests.unit.worker.harness import BLOCK, Cluster, cluster, expected_tokens
from tests.unit.worker.job_builders import VOCAB_SIZE, decode_job, prefill_job
from tests.unit.worker.virtual_loop import virtual

NUM_TOKENS, NUM_BLOCKS = 82, 20
DEVICE_BLOCKS = 60
BLOCK_BYTES = windowed_layout((0,), block_size_tokens=BLOCK).block_bytes
MIB = 2**20


class Client:
    """A client of one worker whose device has 60 blocks."""

    def __init__(self, simulated: Cluster, **changes: Any) -> None:
        settings = {"num_blocks": DEVICE_BLOCKS, "max_num_batched_tokens": 64, "kv_windows": (0,)} | changes
        self.node = simulated.start("p", **settings)
        self.worker = self.node.worker
        self.gateway = simulated.gateway(self.node, "g")
        self._num_sent = 0

    async def send(self, prompt: int, num_tokens: int = NUM_TOKENS, **hints: Any) -> dict[str, int]:
        """Send a prompt and check the answer. Returns the cached tokens by tier."""
        self._num_sent += 1
        rng = Random(prompt)
        tokens = token_ids(rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))
        job = decode_job(
            num_tokens,
            request=b"request-%d" % self._num_sent,
            token_ids=tokens,
            sampling=Sampling(max_tokens=3, ignore_eos=True),
            hints=SessionHints(**hints),
        )
        self.gateway.send(job)
        deltas = await self.gateway.ended(job.job)
        assert self.gateway.tokens(job.job) == expected_tokens(job)
        usage = deltas[0].usage
        assert usage is not None
        await asyncio.sleep(0.1)
        return dict(usage.num_cached_tokens)

    async def flood(self, **hints: Any) -> None:
        """Send prompts that fill the device three times."""
        for number in range(9):
            await self.send(1000 + number, **hints)


async def client(simulated: Cluster, **changes: Any) -> Client:
    connected = Client(simulated, **changes)
    await connected.gateway.connect()
    return connected


@pytest.mark.parametrize("kv_eviction", ["value", "lru"])
@virtual
async def test_retained_prompt_survives_a_flood(kv_eviction: str) -> None:
    async with cluster() as simulated:
        budget = 25 * BLOCK_BYTES
        kept = await client(simulated, kv_eviction=kv_eviction, kv_retain_memory=budget)
        await kept.send(0, retain_s=60.0)
        await kept.flood()
        assert kept.worker.kv.retention.device.num_retained == NUM_BLOCKS + 1
        registry = CollectorRegistry()
        WorkerMetrics(registry).refresh(kept.worker)
        assert registry.get_sample_value("baton_kv_retained_blocks", {"tier": "device"}) == NUM_BLOCKS + 1
        assert await kept.send(0) == {Tier.DEVICE.value: NUM_BLOCKS * BLOCK}
        await asyncio.sleep(61.0)
        await kept.flood()
        assert sum((await kept.send(0)).values()) < NUM_BLOCKS * BLOCK, "its time is over"
        await simulated.until_clean()


@virtual
async def test_without_a_budget_nothing_is_retained() -> None:
    async with cluster() as simulated:
        lost = await client(simulated, kv_eviction="lru", kv_retain_memory=0)
        await lost.send(0, retain_s=60.0)
        await lost.flood()
        assert await lost.send(0) == {}


@pytest.mark.parametrize(
    "tier",
    [{"host_kv_memory": 4 * MIB}, {"disk_kv": Path("disk"), "disk_kv_size": 4 * MIB}],
    ids=["host", "disk"],
)
@virtual
async def test_announced_turn_finds_its_prefix_on_the_device(tier: dict[str, Any]) -> None:
    """It was copied out, evicted, and is reloaded before the turn comes."""
    async with cluster() as simulated:
        one = await client(simulated, kv_retain_memory=4 * MIB, **tier)
        await one.send(0, session="s", next_in_s=30.0)
        await one.flood()
        assert one.worker.pool.find(one.worker.kv.tiers[0].slots.hash_of(0)) is None
        await asyncio.sleep(27.8)
        prefetches = one.worker.kv.prefetches
        assert (prefetches.totals.started, len(prefetches)) == (1, 0)
        before = one.worker.kv.reloads.totals.reloads
        assert before == 1
        assert NO_HASH not in {one.worker.pool.tenant_of(each) for each in one.worker.pool.hashes()}
        assert await one.send(0, session="s") == {Tier.DEVICE.value: NUM_BLOCKS * BLOCK}
        assert one.worker.kv.reloads.totals.reloads == before
        await simulated.until_clean()


@virtual
async def test_prefill_worker_expects_the_announced_turn_too() -> None:
    async with cluster() as simulated:
        one = await client(simulated, host_kv_memory=4 * MIB, kv_retain_memory=4 * MIB)
        job = prefill_job(NUM_TOKENS, request=b"announced", hints=SessionHints(session="s", next_in_s=30.0))
        one.gateway.send(job)
        await asyncio.sleep(0.1)
        await one.flood()
        assert len(one.worker.kv.prefetches) == 1
        await asyncio.sleep(27.8)
        assert one.worker.kv.prefetches.totals.started == 1
        await simulated.until_clean()


@virtual
async def test_announced_turn_of_a_session_that_moves_is_not_early() -> None:
    async with cluster() as simulated:
        one = await client(simulated, host_kv_memory=4 * MIB, kv_retain_memory=4 * MIB)
        await one.send(0, session="s", next_in_s=30.0)
        assert len(one.worker.kv.prefetches) == 1
        one.worker.kv.retention.owners.moved(SessionKey("default", "s"), NUM_BLOCKS)
        assert (len(one.worker.kv.prefetches), one.worker.kv.prefetches.totals.early) == (0, 0)


@virtual
async def test_turn_that_comes_early_reloads_its_prefix_itself() -> None:
    async with cluster() as simulated:
        one = await client(simulated, host_kv_memory=4 * MIB, kv_retain_memory=4 * MIB)
        await one.send(0, session="s", next_in_s=30.0)
        await one.flood()
        cached = await one.send(0, session="s")
        assert cached[Tier.HOST.value] > 0
        assert sum(cached.values()) == NUM_BLOCKS * BLOCK
        await asyncio.sleep(40.0)
        totals = one.worker.kv.prefetches.totals
        assert (totals.started, totals.early) == (0, 1)
        assert one.worker.kv.retention.owners.turns.num_refused == 0
        registry = CollectorRegistry()
        WorkerMetrics(registry).refresh(one.worker)
        assert registry.get_sample_value("baton_prefetches_total", {"outcome": "early"}) == 1
        await simulated.until_clean()


@virtual
async def test_announced_turns_take_at_most_the_budget() -> None:
    async with cluster() as simulated:
        budget = 30 * BLOCK_BYTES
        one = await client(simulated, host_kv_memory=4 * MIB, kv_retain_memory=budget)
        for number in range(3):
            await one.send(number, session=f"s{number}", next_in_s=30.0)
        await one.send(3, session="s3", tenant="other", next_in_s=30.0)
        assert (len(one.worker.kv.prefetches), one.worker.kv.retention.owners.turns.num_refused) == (3, 1)
        await one.flood()
        await asyncio.sleep(28.0)
        cached = [sum((await one.send(number)).values()) // BLOCK for number in range(2)]
        assert cached[0] == NUM_BLOCKS
        await simulated.until_clean()


@virtual
async def test_content_of_an_announced_turn_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other content without a second use is not copied, if computing it is fast."""
    monkeypatch.setattr(copy_out, "is_worth_copying", lambda is_reused, compute_s, reload_s: is_reused)
    async with cluster() as simulated:
        one = await client(simulated, host_kv_memory=4 * MIB)
        await one.send(0, session="s")
        assert one.worker.kv.tiers[0].counts().held == 0
        await one.send(1, session="s", next_in_s=30.0)
        assert one.worker.kv.tiers[0].counts().held == NUM_BLOCKS + 1


@virtual
async def test_session_is_kept_longer_than_single_requests() -> None:
    """It has always returned after its pause, and single requests never have. LRU evicts it."""
    found = {}
    for kv_eviction in ("value", "lru"):
        async with cluster() as simulated:
            one = await client(simulated, kv_eviction=kv_eviction)
            for _ in range(6):
                await one.send(0, session="s")
                await asyncio.sleep(5.0)
            await one.flood()
            found[kv_eviction] = sum((await one.send(0, session="s")).values())
    assert found == {"value": NUM_BLOCKS * BLOCK, "lru": 0}


@virtual
async def test_announced_turns_beyond_the_budget_count_for_nothing() -> None:
    """A session that returns every 5 s is kept beside single requests that announce the next one in 3 s."""
    async with cluster() as simulated:
        one = await client(simulated, kv_retain_memory=0)
        for _ in range(6):
            await one.send(0, session="s")
            await asyncio.sleep(5.0)
        await one.flood(next_in_s=3.0)
        assert sum((await one.send(0, session="s")).values()) == NUM_BLOCKS * BLOCK
