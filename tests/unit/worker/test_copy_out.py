"""When `CopyOut` copies: steps lose a small share of the time, and preempted blocks do not wait."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from baton.core.kv.kv_events import Tier
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.tiers.copy_policy import COPY_BYTES, MAX_STEP_DELAY
from baton.engine.tiers.kv_tier import BlockToStore
from baton.worker.tiers.copy_out import POLL_S, CopyOut
from baton.worker.tiers.copy_pacing import MAX_POSTPONED_S, CopyPacing
from tests.fake_executor import FakeGenerationTable
from tests.unit.engine.pool_helpers import stored_chain
from tests.unit.worker.virtual_loop import virtual

COPY_S = 0.002
"""Time of a copy, which has one block."""
PAUSE_S = COPY_S * (1 / MAX_STEP_DELAY - 1)
NUM_BLOCKS = 64


class TimedTier:
    """A tier whose copies take `COPY_S`. It records when each one began, and of which block.

    is_full: copies store nothing. resumes_s: when stores resume after a failed one. num_calls: of `store`
    """

    tier = Tier.HOST

    def __init__(self) -> None:
        self.is_full = False
        self.held: set[bytes] = set()
        self.copies: list[tuple[float, int]] = []
        self.stores_busy_s = 0.0
        self.resumes_s = 0.0
        self.num_calls = 0

    @property
    def store_pause_s(self) -> float:
        return max(0.0, self.resumes_s - asyncio.get_running_loop().time())

    def holds(self, block_hash: bytes) -> bool:
        return block_hash in self.held

    def announce(self, block_hash: bytes) -> None:
        """Do nothing: no scheduler asks."""

    load_block_s = COPY_S

    def store_s(self, num_blocks: int) -> float:
        return COPY_S * num_blocks

    async def store(self, blocks: Sequence[BlockToStore]) -> int:
        self.num_calls += 1
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(COPY_S * len(blocks))
        if self.is_full or self.store_pause_s:
            return 0
        self.copies += [(began_s, block.block_id) for block in blocks]
        self.held |= {block.block_hash for block in blocks}
        self.stores_busy_s += COPY_S * len(blocks)
        return len(blocks)


class Rig:
    """A pool whose blocks become idle, and the copies of them while steps run."""

    def __init__(self, *, is_busy: bool = True, num_tiers: int = 1) -> None:
        self.is_busy = is_busy
        self.pool = BlockPool(NUM_BLOCKS, 4, FakeGenerationTable(NUM_BLOCKS))
        self.tiers: list[Any] = [TimedTier() for _ in range(num_tiers)]
        self.tier = self.tiers[0]
        copies_out = [
            CopyOut(
                self.pool,
                tier,
                block_bytes=COPY_BYTES,
                chunk_tokens=64,
                costs=lambda: None,
                pacing=CopyPacing(lambda: self.is_busy),
            )
            for tier in self.tiers
        ]
        self.copy_out = copies_out[0]
        self.block_ids = stored_chain(self.pool, tuple(bytes([n]) * 16 for n in range(1, NUM_BLOCKS + 1)))
        self._running = [asyncio.create_task(each.run()) for each in copies_out]

    def used_twice(self, block_ids: Sequence[int]) -> None:
        self.pool.count_use(block_ids)
        self.pool.unref(block_ids)

    def preempted(self, block_ids: Sequence[int]) -> None:
        self.pool.unref(block_ids)
        self.copy_out.demote(block_ids)

    async def copied_after(self, seconds: float) -> list[int]:
        """Return the blocks that were copied within this time."""
        known = len(self.tier.copies)
        await asyncio.sleep(seconds)
        return [block_id for _, block_id in self.tier.copies[known:]]

    async def end(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


@pytest.mark.parametrize(("is_busy", "between_s"), [(True, PAUSE_S + COPY_S), (False, COPY_S)])
def test_copies_pause_while_steps_run(is_busy: bool, between_s: float) -> None:
    @virtual
    async def run() -> None:
        rig = Rig(is_busy=is_busy)
        rig.used_twice(rig.block_ids[:10])
        await asyncio.sleep(20 * between_s)
        began_s = [at_s for at_s, _ in rig.tier.copies]
        assert len(began_s) == 10
        assert [after - at for at, after in pairwise(began_s)] == pytest.approx([between_s] * 9)
        await rig.end()

    run()


@virtual
async def test_preempted_blocks_do_not_wait_for_a_pause() -> None:
    rig = Rig()
    rig.used_twice(rig.block_ids[:20])
    await asyncio.sleep(2.5 * (PAUSE_S + COPY_S))
    assert await rig.copied_after(0.1 * PAUSE_S) == []
    preempted = rig.block_ids[-3:]
    rig.preempted(preempted)
    assert await rig.copied_after(4 * COPY_S) == preempted
    owed_s = 3 * PAUSE_S
    assert await rig.copied_after(owed_s) == [], "the pauses that were left out follow"
    assert await rig.copied_after(2 * PAUSE_S) != []
    await rig.end()


@virtual
async def test_preempted_blocks_delay_steps_no_more_in_the_long_run() -> None:
    rig = Rig()
    rig.preempted(rig.block_ids)
    seconds = 10.0
    num_copied = len(await rig.copied_after(seconds))
    assert num_copied * COPY_S <= MAX_STEP_DELAY * (seconds + MAX_POSTPONED_S + 2 * PAUSE_S)
    assert num_copied > 10
    await rig.end()


@virtual
async def test_a_pause_ends_with_the_steps() -> None:
    rig = Rig()
    rig.used_twice(rig.block_ids[:20])
    await asyncio.sleep(2.5 * (PAUSE_S + COPY_S))
    rig.is_busy = False
    assert len(await rig.copied_after(POLL_S + 17.5 * COPY_S)) == 17
    await rig.end()


@virtual
async def test_blocks_that_are_preempted_after_a_failed_copy_are_copied() -> None:
    rig = Rig()
    rig.tier.is_full = True
    rig.used_twice(rig.block_ids[:3])
    await asyncio.sleep(COPY_S)
    rig.tier.is_full = False
    preempted = rig.block_ids[-3:]
    rig.preempted(preempted)
    assert (await rig.copied_after(4 * COPY_S))[:3] == preempted
    await rig.end()


@virtual
async def test_blocks_that_were_not_stored_are_copied_in_their_order_after_the_pause() -> None:
    rig = Rig(is_busy=False)
    pause_s = 10.0
    first, second = rig.block_ids[:5], rig.block_ids[5:10]
    rig.used_twice(first)
    await asyncio.sleep(COPY_S / 2)  # within the first copy
    rig.tier.resumes_s = asyncio.get_running_loop().time() + pause_s
    assert await rig.copied_after(pause_s / 2) == []
    rig.used_twice(second)
    assert await rig.copied_after(pause_s / 4) == []
    assert rig.tier.num_calls == 1, "it waits until the pause is over"
    assert await rig.copied_after(pause_s) == [*reversed(first), *reversed(second)]
    assert not rig.pool._copies.copying
    await rig.end()


@virtual
async def test_a_full_tier_is_tried_with_each_block_that_becomes_idle_and_gets_all_in_order() -> None:
    rig = Rig(is_busy=False)
    rig.tier.is_full = True
    rig.used_twice(rig.block_ids[3::-1])  # released in reverse
    for block_id in rig.block_ids[4:8]:
        await asyncio.sleep(1.0)
        assert rig.tier.num_calls == block_id - rig.block_ids[3]
        rig.used_twice([block_id])
    await asyncio.sleep(1.0)
    rig.tier.is_full = False
    in_use = rig.block_ids[1:2]
    rig.pool.ref(in_use)
    rig.used_twice(rig.block_ids[8:9])
    assert await rig.copied_after(1.0) == [block_id for block_id in rig.block_ids[:9] if block_id not in in_use]
    rig.pool.unref(in_use)
    assert await rig.copied_after(1.0) == in_use
    await rig.end()


@virtual
async def test_the_copies_to_two_full_tiers_do_not_wake_each_other() -> None:
    rig = Rig(is_busy=False, num_tiers=2)
    for tier in rig.tiers:
        tier.is_full = True
    rig.used_twice(rig.block_ids[:10])
    await asyncio.sleep(10.0)
    assert all(tier.num_calls <= 2 for tier in rig.tiers)
    await rig.end()


@virtual
async def test_copies_end_when_the_tier_stores_nothing_any_more() -> None:
    rig = Rig(is_busy=False)
    rig.tier.resumes_s = inf
    rig.used_twice(rig.block_ids[:5])
    await asyncio.sleep(1.0)
    assert (rig.tier.num_calls, rig.tier.copies) == (0, [])
    await rig.end()
