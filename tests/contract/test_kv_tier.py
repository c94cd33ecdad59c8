"""Contract of `KvTier`: what every tier guarantees, whatever it is made of."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import wraps

import pytest

from baton.core.kv.block_hash import NO_HASH
from baton.core.kv.kv_events import KvEventKind
from baton.engine.tiers.kv_tier import BlockToStore
from tests.contract.kv_tiers import NUM_SLOTS, TIERS, Device, MemoryTier

A, B, C, D = (bytes([n]) * 16 for n in range(1, 5))
T, U = b"tenant-t" * 2, b"tenant-u" * 2


def on_every_tier(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @pytest.mark.parametrize("kind", TIERS)
    @wraps(test)
    def run(kind: str) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60), TIERS[kind]() as device:
                await test(device)

        asyncio.run(bounded())

    del run.__wrapped__  # type: ignore[attr-defined]  # pytest would ask for its parameters
    return run


def block(block_id: int, block_hash: bytes, *, is_announced: bool = True) -> BlockToStore:
    return BlockToStore(block_id=block_id, block_hash=block_hash, is_announced=is_announced)


async def stored(device: Device, *hashes: bytes) -> None:
    """Store device blocks 0, 1, …, filled with seeds 0, 1, …, under these hashes."""
    for index in range(len(hashes)):
        device.fill(index, index)
    assert await device.tier.store([block(index, each) for index, each in enumerate(hashes)]) == len(hashes)


@on_every_tier
async def test_what_was_stored_is_loaded_into_other_blocks(device: Device) -> None:
    await stored(device, A, B, C)
    device.clear()
    assert await device.tier.load([B, A, C], [9, 4, 8]) == 3
    assert [device.holds(9, 1), device.holds(4, 0), device.holds(8, 2)] == [True] * 3
    assert all(device.is_clear(block_id) for block_id in (0, 1, 2, 3, 5, 6, 7))


@on_every_tier
async def test_a_load_ends_before_the_first_unknown_hash(device: Device) -> None:
    await stored(device, A, B)
    assert await device.tier.load([A, D, B], [5, 6, 7]) == 1
    assert await device.tier.load([D], [5]) == 0


@on_every_tier
async def test_known_content_is_not_stored_again(device: Device) -> None:
    await stored(device, A)
    device.fill(0, 50)
    assert await device.tier.store([block(0, A), block(1, B)]) == 1
    assert await device.tier.load([A], [9]) == 1
    assert device.holds(9, 0)


@on_every_tier
async def test_content_that_is_being_stored_is_neither_loaded_nor_stored_twice(device: Device) -> None:
    device.faults.stop()
    first = asyncio.ensure_future(device.tier.store([block(0, A)]))
    await device.faults.waiting.wait()
    assert not device.tier.holds(A)
    assert device.tier.counts().busy == 1
    second = asyncio.ensure_future(device.tier.store([block(1, A)]))
    await asyncio.sleep(0)
    device.faults.gate.set()
    assert (await first, await second) == (1, 0)
    assert device.tier.holds(A)


@on_every_tier
async def test_more_content_than_slots_evicts_the_oldest(device: Device) -> None:
    for n in range(3 * NUM_SLOTS):
        await device.tier.store([block(0, bytes([n + 1]) * 16)])
        counts = device.tier.counts()
        assert counts.free + counts.held + counts.busy == counts.total == NUM_SLOTS
    assert device.tier.counts().held == NUM_SLOTS
    assert device.tier.holds(bytes([3 * NUM_SLOTS]) * 16)
    assert not device.tier.holds(A)


@on_every_tier
async def test_a_failed_copy_stores_and_loads_nothing(device: Device) -> None:
    device.faults.failing = True
    assert await device.tier.store([block(0, A)]) == 0
    assert not device.tier.holds(A)
    assert device.tier.counts().free == NUM_SLOTS
    assert device.tier.store_pause_s == 0, "only a disk pauses, after an error of its own"
    device.faults.failing = False
    await stored(device, A)
    device.faults.failing = True
    assert await device.tier.load([A], [5]) == 0
    device.faults.failing = False
    assert await device.tier.load([A], [5]) == 1
    assert device.holds(5, 0)


@on_every_tier
async def test_discarded_content_is_gone(device: Device) -> None:
    await stored(device, A, B)
    device.tier.discard(A)
    device.tier.discard(D)
    assert (device.tier.holds(A), device.tier.holds(B)) == (False, True)
    assert await device.tier.load([A, B], [5, 6]) == 0
    await stored(device, A)
    assert await device.tier.load([A], [5]) == 1


@on_every_tier
async def test_content_that_is_discarded_while_it_is_stored_is_not_kept(device: Device) -> None:
    device.faults.stop()
    storing = asyncio.ensure_future(device.tier.store([block(0, A), block(1, B)]))
    await device.faults.waiting.wait()
    device.tier.discard(A)
    device.faults.gate.set()
    assert await storing == 1
    assert (device.tier.holds(A), device.tier.holds(B)) == (False, True)


@on_every_tier
async def test_content_that_is_discarded_while_it_is_loaded_is_not_used(device: Device) -> None:
    await stored(device, A, B)
    device.faults.stop()
    loading = asyncio.ensure_future(device.tier.load([A, B], [5, 6]))
    await device.faults.waiting.wait()
    device.tier.discard(B)
    device.faults.gate.set()
    assert await loading == 1
    assert device.holds(5, 0)
    counts = device.tier.counts()
    assert (counts.held, counts.busy) == (1, 0)


@on_every_tier
async def test_a_copy_ends_before_its_cancelled_call_does(device: Device) -> None:
    await stored(device, A)
    for call in ("store", "load"):
        device.faults.stop()
        work = device.tier.store([block(1, B)]) if call == "store" else device.tier.load([A], [5])
        task = asyncio.ensure_future(work)
        await device.faults.waiting.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.001)
        assert not task.done()
        device.faults.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert device.tier.counts().busy == 0


@on_every_tier
async def test_erased_content_of_a_tenant_is_gone_and_that_of_others_stays(device: Device) -> None:
    tenants = {A: T, B: U, C: NO_HASH}
    for index, (each, tenant) in enumerate(tenants.items()):
        device.fill(index, index)
        await device.tier.store([replace(block(index, each), tenant_root=tenant)])
    assert await device.tier.erase_tenant(T) == 2
    assert [device.tier.holds(each) for each in tenants] == [False, True, False]  # C is of an unknown tenant
    assert await device.tier.load([B], [5]) == 1
    assert device.holds(5, 1)
    assert device.tier.counts().busy == 0


@on_every_tier
async def test_stores_report_the_time_that_steps_may_lose(device: Device) -> None:
    before_s = device.tier.stores_busy_s
    await stored(device, A)
    assert device.tier.stores_busy_s > before_s or isinstance(device.tier, MemoryTier)


@on_every_tier
async def test_events_are_the_changes_of_announced_content(device: Device) -> None:
    await stored(device, A, B)
    await device.tier.store([block(3, C, is_announced=False)])
    assert sorted(device.tier.take_events(), key=str) == [(KvEventKind.STORED, A), (KvEventKind.STORED, B)]
    assert sorted(device.tier.announced_hashes()) == [A, B]
    device.tier.discard(A)
    device.tier.discard(C)
    assert device.tier.take_events() == [(KvEventKind.EVICTED, A)]
    assert device.tier.take_events() == []


@on_every_tier
async def test_content_that_the_device_announces_later_is_announced_once(device: Device) -> None:
    await device.tier.store([block(0, A, is_announced=False), block(1, B), block(2, C, is_announced=False)])
    assert device.tier.take_events() == [(KvEventKind.STORED, B)]
    for each in (A, B, D, A):
        device.tier.announce(each)
    assert device.tier.take_events() == [(KvEventKind.STORED, A)]
    assert sorted(device.tier.announced_hashes()) == [A, B]
    device.tier.discard(A)
    device.tier.announce(A)
    assert device.tier.take_events() == [(KvEventKind.EVICTED, A)]
    assert device.tier.announced_hashes() == [B]


@on_every_tier
async def test_content_that_is_announced_while_it_is_stored_is_announced(device: Device) -> None:
    device.faults.stop()
    storing = asyncio.ensure_future(device.tier.store([block(0, A, is_announced=False), block(1, B)]))
    await device.faults.waiting.wait()
    device.tier.announce(A)
    assert device.tier.take_events() == []
    device.tier.discard(B)
    device.tier.announce(B)
    device.faults.gate.set()
    assert await storing == 1
    assert device.tier.take_events() == [(KvEventKind.STORED, A)]
    assert device.tier.announced_hashes() == [A]
