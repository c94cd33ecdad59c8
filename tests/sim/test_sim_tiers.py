"""Simulated tiers: kills cut writes off, damage is found, and slots are reused under reloads."""

import asyncio
from random import Random

import pytest

from baton.core.ids import WorkerRef
from baton.engine.tiers.kv_tier import BlockToStore
from baton.sim import virtual_time
from baton.sim.sim_disk import DISK_BYTES_PER_S, READ_LATENCY_S, SimDisk
from baton.sim.sim_memory import SimMemory
from baton.sim.sim_tier import REUSED, SimCopyRunner, SimTierMemory
from baton.worker.disk.disk_format import DiskDefect
from baton.worker.disk.disk_runner import NUM_READERS
from baton.worker.tiers.disk_tier import DiskTier

pytestmark = pytest.mark.sim

SIZE, NUM_BLOCKS, BLOCK_BYTES = 4, 8, 16384
HASHES = [bytes([number + 1]) * 16 for number in range(NUM_BLOCKS)]
BLOCKS = [BlockToStore(block_id=number, block_hash=each) for number, each in enumerate(HASHES)]


def opened(disk: SimDisk, device: SimMemory, epoch: int) -> DiskTier:
    return disk.open(WorkerRef(worker_id="w", worker_epoch=epoch, address="w:1"), device, BLOCK_BYTES)


def filled() -> SimMemory:
    device = SimMemory(NUM_BLOCKS, SIZE)
    for number in range(NUM_BLOCKS):
        device.write_block(number, range(number + 10, number + 10 + SIZE))
    return device


def test_a_kill_in_mid_copy_leaves_content_that_is_right_or_found_to_be_unfinished() -> None:
    async def main(seed: int) -> int:
        disk, device = SimDisk(NUM_BLOCKS, SIZE, seed), filled()
        storing = asyncio.ensure_future(opened(disk, device, 1).store(BLOCKS))
        await asyncio.sleep(READ_LATENCY_S / 2)
        assert disk.write_begun.is_set()
        disk.kill()
        await storing
        again = opened(disk, device, 2)
        held = [each for each in HASHES if again.holds(each)]
        for number in range(NUM_BLOCKS):
            device.write_block(number, (0,) * SIZE)
        assert await again.load(held, range(len(held))) == len(held)
        expected = filled()
        assert [device.block(n) for n in range(len(held))] == [expected.block(HASHES.index(each)) for each in held]
        assert disk.store is not None
        disk.store.check()
        return len(held)

    counts = {virtual_time.run(main(seed)) for seed in range(40)}
    assert min(counts) == 0
    assert len(counts) > 1


@pytest.mark.parametrize("fault", ["flip", "truncate"])
def test_damage_is_found_and_counted_or_the_audit_fails(fault: str) -> None:
    async def main() -> None:
        disk, device = SimDisk(NUM_BLOCKS, SIZE), filled()
        tier = opened(disk, device, 1)
        assert await tier.store(BLOCKS) == NUM_BLOCKS
        if fault == "flip":
            disk.corrupt(3)
        else:
            disk.file.truncate(Random(1))
        assert await tier.load(HASHES, range(NUM_BLOCKS)) < NUM_BLOCKS
        assert tier.defects[DiskDefect.DAMAGED_PAYLOAD] + tier.defects[DiskDefect.TRUNCATED] > 0
        assert disk.store is not None
        disk.store.check()
        tier.defects.clear()
        with pytest.raises(AssertionError, match="and 0 counted"):
            disk.store.check()

    virtual_time.run(main())


def test_a_slot_that_is_reused_under_a_reload_is_refused_by_its_generation() -> None:
    async def main() -> None:
        worker, device = WorkerRef(worker_id="w", worker_epoch=1, address="w:1"), filled()
        memory, reused = SimTierMemory.of(worker, NUM_BLOCKS, SIZE), iter((False, True, False))
        tier = memory.open(worker, device, BLOCK_BYTES, is_reused=lambda: next(reused))
        assert await tier.store(BLOCKS[:3]) == 3
        assert await tier.load(HASHES[:3], (5, 6, 7)) == 1
        assert tier.totals.invalid_blocks == 2
        assert device.block(6) == (REUSED,) * SIZE
        assert memory.memory.block(1) == filled().block(1)

    virtual_time.run(main())


def test_copies_take_times_that_deviate_by_at_most_their_share() -> None:
    async def main() -> list[float]:
        runner = SimCopyRunner(1e6, deviation=0.3)
        return [await runner.run(lambda: None, 1000) for _ in range(100)]

    times_s = virtual_time.run(main())
    assert 0.7e-3 <= min(times_s) < 0.75e-3
    assert 1.25e-3 < max(times_s) <= 1.3e-3


def test_a_reload_from_a_disk_uses_all_of_its_readers() -> None:
    num_blocks = 2 * NUM_READERS

    async def main() -> float:
        disk, device = SimDisk(num_blocks, SIZE), SimMemory(2 * num_blocks, SIZE)
        hashes = [bytes([number + 1]) * 16 for number in range(num_blocks)]
        blocks = [BlockToStore(block_id=number, block_hash=each) for number, each in enumerate(hashes)]
        for number in range(num_blocks):
            device.write_block(number, range(SIZE))
        tier = opened(disk, device, epoch=1)
        assert await tier.store(blocks) == num_blocks
        began_s = asyncio.get_running_loop().time()
        assert await tier.load(hashes, range(num_blocks, 2 * num_blocks)) == num_blocks
        return asyncio.get_running_loop().time() - began_s

    bytes_s = num_blocks * BLOCK_BYTES / DISK_BYTES_PER_S
    assert virtual_time.run(main()) < READ_LATENCY_S + 1.5 * bytes_s
