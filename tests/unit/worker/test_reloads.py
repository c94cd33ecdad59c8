"""A reload whose content is withdrawn from a fast tier while a slow tier still loads the rest."""

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_events import Tier
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.engine_config import EngineConfig
from baton.engine.tiers.kv_tier import KvTier
from baton.worker.background_tasks import BackgroundTasks
from baton.worker.tiers.reloads import Reloads
from baton.worker.tiers.slower_tiers import SlowerTiers
from tests.fake_executor import FakeGenerationTable
from tests.unit.worker.test_tier_property import COSTS, SIZE

CHAIN = [bytes([n + 1]) * 16 for n in range(4)]


class GatedTier:
    """The calls of a `KvTier` that reloads make. Its loads end when they are let through."""

    answers = True

    def __init__(self, tier: Tier, content: Sequence[BlockHash]) -> None:
        self.tier, self.content = tier, set(content)
        self.gate = asyncio.Event()

    def holds(self, block_hash: BlockHash) -> bool:
        return block_hash in self.content

    def load_s(self, num_blocks: int) -> float:
        return 1e-6 * num_blocks

    async def load(self, hashes: Sequence[BlockHash], block_ids: Sequence[int], *, within_s: float | None) -> int:
        await self.gate.wait()
        return len(block_ids)


@pytest.mark.parametrize(("withdrawn", "expected"), [(None, 4), (0, 0), (1, 1)])
async def test_content_that_is_withdrawn_meanwhile_is_not_published(withdrawn: int | None, expected: int) -> None:
    pool = BlockPool(16, SIZE, FakeGenerationTable(16))
    config = EngineConfig(
        max_num_batched_tokens=16, max_num_seqs=4, max_model_len=64, block_size_tokens=SIZE, eos_token_ids=()
    )
    fast, slow = GatedTier(Tier.HOST, CHAIN[:2]), GatedTier(Tier.DISK, CHAIN[2:])
    tiers = SlowerTiers([cast(KvTier, fast), cast(KvTier, slow)])
    errors: list[BaseException] = []
    tasks = BackgroundTasks(errors.append)
    reloads = Reloads(engine=Engine(config, pool, clock=lambda: 0.0), tiers=tiers, tasks=tasks, costs=lambda: COSTS)
    reload = asyncio.ensure_future(reloads.reload(CHAIN))
    fast.gate.set()
    await asyncio.sleep(0.001)
    if withdrawn is not None:
        fast.content.discard(CHAIN[withdrawn])
    slow.gate.set()
    await reload
    assert len(pool.lookup(CHAIN)) == expected
    assert pool.counts().used == pool.counts().receiving == 0
    assert not errors


async def test_a_job_that_pulls_a_prefix_leaves_the_disk_alone() -> None:
    pool = BlockPool(16, SIZE, FakeGenerationTable(16))
    config = EngineConfig(
        max_num_batched_tokens=16, max_num_seqs=4, max_model_len=64, block_size_tokens=SIZE, eos_token_ids=()
    )
    tiers = SlowerTiers([cast(KvTier, GatedTier(Tier.HOST, CHAIN[:2])), cast(KvTier, GatedTier(Tier.DISK, CHAIN))])
    tasks = BackgroundTasks([].append)
    reloads = Reloads(engine=Engine(config, pool, clock=lambda: 0.0), tiers=tiers, tasks=tasks, costs=lambda: COSTS)
    plans = [reloads.plan(CHAIN, uses_disk=uses_disk) for uses_disk in (True, False)]
    assert [plan and plan.chain for plan in plans] == [tuple(CHAIN), tuple(CHAIN[:2])]
