"""Copies to a host tier that is full, of blocks that the device evicts next."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from baton.core.kv.block_hash import BlockHash
from baton.core.request import SessionHints, SessionKey
from baton.engine.kv_cache.block_pool import BlockPool
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.worker.tiers.copy_out import CopyOut
from baton.worker.tiers.copy_pacing import CopyPacing
from baton.worker.tiers.host_tier import HostTier
from baton.worker.tiers.retention import Retention
from baton.worker.tiers.tier_copies import HostCopies
from tests import builders
from tests.unit.worker.test_tier_property import COSTS, HASH_BYTES, SIZE


class DirectRunner:
    """A `CopyRunner` that copies at once."""

    async def run(self, copy: Callable[[], None], num_bytes: int) -> float:
        copy()
        return 1e-6

    def close(self) -> None:
        pass


class Rig:
    """A device with 20 blocks, of which a step can use 4, and a host tier with 6 slots."""

    def __init__(self, policy: str = "value") -> None:
        device, host = (np.zeros((count, HASH_BYTES), dtype=np.uint8) for count in (20, 6))
        tables = [MemoryGenerationTable(bytearray(len(each) * ENTRY_BYTES), 1) for each in (device, host)]
        self.now_s, self.num_calls = 0.0, 0
        self.pool = BlockPool(len(device), SIZE, tables[0])
        self.tier = HostTier(
            worker=builders.worker_ref("w", epoch=1),
            num_slots=len(host),
            block_bytes=HASH_BYTES,
            generations=tables[1],
            copies=HostCopies(device, host),
            runner=DirectRunner(),
        )
        self.retention = Retention(
            self.pool,
            self.tier,
            policy=policy,
            retain_memory=None,
            block_bytes=HASH_BYTES,
            chunk_tokens=4 * SIZE,
            costs=lambda: COSTS,
            clock=lambda: self.now_s,
        )
        self.copy_out = CopyOut(
            self.pool,
            self.tier,
            block_bytes=2**18,
            chunk_tokens=4 * SIZE,
            costs=lambda: COSTS,
            pacing=CopyPacing(lambda: False),
            to_copy=self.to_copy,
        )

    def to_copy(self) -> list[int] | None:
        self.num_calls += 1
        return self.retention.to_copy()

    def use(self, session: int, num_blocks: int) -> list[BlockHash]:
        """Compute a prompt of a session, and let it become idle."""
        hashes = [bytes([session, index]) * (HASH_BYTES // 2) for index in range(num_blocks)]
        block_ids = self.pool.allocate(num_blocks)
        assert block_ids is not None
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            self.pool.set_hash(block_id, block_hash)
        request = self.retention.owners.arrived(SessionHints(tenant="t", session=str(session)), hashes[0])
        self.pool.unref(block_ids, request.owner)
        self.retention.owners.ended(request)
        self.now_s += 10.0
        return hashes

    async def copy(self) -> None:
        """Copy until there is nothing more to copy."""
        if self.tier.load_s(1) is None:
            await self.tier.measure(self.pool.num_blocks)
        task = asyncio.ensure_future(self.copy_out.run())
        for _ in range(200):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))

    def held(self) -> set[BlockHash]:
        return set(self.tier.slots.all_hashes())


async def test_full_tier_gets_the_beginning_of_the_chain_that_is_evicted_next() -> None:
    rig = Rig()
    first = rig.use(1, 8)
    await rig.copy()
    assert rig.held() == set(first[:6]), "while slots are free, all content is copied"
    second = rig.use(2, 8)
    await rig.copy()
    assert rig.held() == set(first[:6]), "four blocks of the device are free, and six have copies"
    rig.use(3, 8)
    await rig.copy()
    assert rig.held() == {*first[:4], *second[:2]}, "first[6:] would displace what returns as likely"


async def test_least_recently_used_order_copies_all_content_at_once() -> None:
    rig = Rig("lru")
    rig.use(1, 8)
    await rig.copy()
    second = rig.use(2, 8)
    await rig.copy()
    assert rig.held() & set(second)


@pytest.mark.parametrize("policy", ["value", "lru"])
async def test_blocks_wait_if_no_slot_is_idle(policy: str) -> None:
    rig = Rig(policy)
    rig.use(1, 8)
    await rig.copy()
    rig.tier.slots.pin(range(6))
    for session in range(2, 6):
        rig.use(session, 8)
    rig.num_calls = 0
    await rig.copy()
    assert rig.num_calls < 5


@pytest.mark.parametrize("moved", [1, 2])
async def test_second_copies_of_a_session_that_has_moved_are_displaced_first(moved: int) -> None:
    rig = Rig()
    chains = {session: rig.use(session, 3) for session in (1, 2)}
    await rig.copy()
    rig.retention.owners.moved(SessionKey("t", str(moved)), 3)
    assert rig.retention.host is not None
    displaced = [rig.tier.slots.hash_of(slot) for slot in rig.retention.host.first(6)]
    assert set(displaced[:3]) == set(chains[moved])
