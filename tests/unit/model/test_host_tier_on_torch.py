"""The host tier of a real device: blocks that were evicted and reloaded have the same bytes and give the same
tokens."""

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.core.kv.kv_events import Tier
from baton.core.kv.kv_tables import hashes_of_prefix
from baton.engine.engine import Engine
from baton.engine.loop import EngineLoop
from baton.engine.state.outcome import EngineOutcome
from baton.runtime.config.settings import WorkerConfig
from baton.worker.background_tasks import BackgroundTasks
from baton.worker.device.open_device import open_device
from baton.worker.device.worker_device import Device
from baton.worker.disk.disk_format import file_shape
from baton.worker.tiers.copy_out import CopyOut
from baton.worker.tiers.copy_pacing import CopyPacing
from baton.worker.tiers.reloads import Reloads
from baton.worker.tiers.slower_tiers import SlowerTiers
from tests import builders
from tests.builders import sequence_request
from tests.model_families import FAMILIES, save_random

SIZE = 4
NUM_TOKENS = 41
NUM_BLOCKS = 10
"""Full blocks before the last token of a prompt."""
MIB = 2**20


class Rig:
    """An engine on a real device, with what a worker has for the host tier."""

    def __init__(self, model_dir: Path, **changes: Any) -> None:
        settings = {
            "model": str(model_dir),
            "device": "cpu",
            "kernels": "torch",
            "threads_per_worker": 1,
            "transfer": "local",
            "block_size_tokens": SIZE,
            "max_model_len": 48,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 64,
            "host_kv_memory": 4 * MIB,
            "speculate": "off",
        }
        self.device: Device = open_device(WorkerConfig(**settings | changes), builders.worker_ref("w"))
        self.engine = Engine(self.device.engine_config, self.device.pool, clock=lambda: 0.0)
        self.outputs: dict[int, list[int]] = defaultdict(list)
        self.cached: dict[int, int] = {}
        self.ended, self.stored = asyncio.Event(), asyncio.Event()
        self.loop = EngineLoop(self.engine, self.device.executor, self.deliver)
        tasks, tier = BackgroundTasks(self.failed), self.device.host_tier or self.device.disk
        assert tier is not None
        self.tier = tier
        self.copy_out = CopyOut(
            self.device.pool, tier, block_bytes=tier.block_bytes, chunk_tokens=64, costs=lambda: None,
            pacing=CopyPacing(lambda: False), on_stored=self.stored.set,
        )  # fmt: skip
        self.reloads = Reloads(engine=self.engine, tiers=SlowerTiers([tier]), tasks=tasks, costs=lambda: None)

    def failed(self, error: BaseException) -> None:
        raise error

    def deliver(self, outcome: EngineOutcome) -> None:
        for admission in outcome.admissions:
            self.device.pool.count_use(admission.cached_block_ids)
        for output in outcome.outputs:
            assert output.failure is None, output.failure
            self.outputs[output.seq_id] += [token.token_id for token in output.tokens]
            self.cached[output.seq_id] = output.num_cached_tokens
            if output.finish is not None:
                self.ended.set()

    async def answer(self, seq_id: int, prompt: int) -> list[int]:
        tokens = [(prompt * 31 + 7 * n) % 250 + 3 for n in range(NUM_TOKENS)]
        self.ended.clear()
        self.loop.add(
            sequence_request(seq_id, tokens, max_tokens=5, sampling={"ignore_eos": True}, block_size_tokens=SIZE)
        )
        async with asyncio.timeout(60):
            await self.ended.wait()
        return self.outputs[seq_id]

    def contents(self, hashes: list[bytes]) -> list[bytes]:
        """Return the bytes of blocks on the device by hash."""
        found = self.device.pool.lookup(hashes)
        assert len(found) == len(hashes)
        kv = self.device.executor._cache.memory.numpy()
        return [bytes(kv[block_id]) for block_id in found]


def prompt_hashes(rig: Rig, prompt: int) -> list[bytes]:
    tokens = [(prompt * 31 + 7 * n) % 250 + 3 for n in range(NUM_TOKENS)]
    request = sequence_request(99, tokens, block_size_tokens=SIZE)
    return list(request.block_hashes[:NUM_BLOCKS])


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("kind", ["plain", "int8", "windows"])
async def test_evicted_blocks_come_back_unchanged(kind: str, tier: str, tiny_dir: Path, tmp_path: Path) -> None:
    path, changes = tiny_dir, {"kv_memory": MIB // 4}
    if tier == "disk":
        changes |= {"host_kv_memory": 0, "disk_kv": tmp_path / "kv", "disk_kv_size": 4 * MIB}
    if kind == "int8":
        changes |= {"kv_dtype": "int8"}
    elif kind == "windows":
        path = save_random(FAMILIES["qwen2"].config(), tmp_path / "windows")
    rig = Rig(path, **changes)
    running = asyncio.ensure_future(rig.loop.run())
    copying = asyncio.ensure_future(rig.copy_out.run())
    try:
        first = list(await rig.answer(0, prompt=0))
        await rig.answer(1, prompt=0)  # the second use
        hashes = prompt_hashes(rig, 0)
        needed = hashes_of_prefix(hashes, rig.device.pool.windows)
        async with asyncio.timeout(30):
            while not all(rig.tier.holds(each) for each in needed):
                rig.stored.clear()
                await rig.stored.wait()
        before = rig.contents(needed)
        for prompt in range(1, 60):
            await rig.answer(10 + prompt, prompt)
            if not rig.device.pool.lookup(needed[:1]):
                break
        assert rig.device.pool.lookup(needed[:1]) == [], "the prompt was not evicted"
        assert await rig.reloads.reload(hashes) == {rig.tier.tier: NUM_BLOCKS}
        assert rig.contents(needed) == before
        assert await rig.answer(2, prompt=0) == first
        assert rig.cached[2] == NUM_BLOCKS * SIZE
        rig.device.pool.check()
        rig.tier.slots.check()
    finally:
        for task in (running, copying):
            task.cancel()
        await asyncio.wait((running, copying))
        await rig.device.aclose()


@pytest.mark.parametrize("io", ["threads", "nixl"])
async def test_the_next_process_answers_from_the_disk(io: str, tiny_dir: Path, tmp_path: Path) -> None:
    """With the same tokens, also if a block was corrupted in between: that one is computed again."""
    settings = {"kv_memory": MIB, "host_kv_memory": 0, "disk_kv": tmp_path / "kv", "disk_kv_size": 4 * MIB}
    answers: list[list[int]] = []
    for run in range(3):
        rig = Rig(tiny_dir, disk_kv_io=io, **settings)
        tasks = [asyncio.ensure_future(rig.loop.run()), asyncio.ensure_future(rig.copy_out.run())]
        try:
            hashes = prompt_hashes(rig, 0)
            reloaded = await rig.reloads.reload(hashes)
            answers.append(list(await rig.answer(0, prompt=0)))
            await rig.answer(1, prompt=0)  # the second use
            async with asyncio.timeout(30):
                while not all(rig.tier.holds(each) for each in hashes):
                    rig.stored.clear()
                    await rig.stored.wait()
            assert answers[run] == answers[0]
            assert reloaded == ({}, {Tier.DISK: NUM_BLOCKS}, {Tier.DISK: 3})[run]
            assert rig.tier.totals.invalid_blocks == (run == 2)
            slot = rig.tier.slots.slot_of(hashes[3])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await rig.device.aclose()
        if run == 1:
            assert slot is not None
            layout = rig.device.executor.layout
            offset = file_shape(layout, 4 * MIB).payload_offset(slot)
            with (tmp_path / "kv" / "kv-0.baton").open("r+b") as file:
                file.seek(offset + layout.block_bytes // 2)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))


async def test_the_tier_is_a_second_region_that_peers_read(tiny_dir: Path) -> None:
    rig = Rig(tiny_dir, kv_memory=MIB)
    try:
        assert rig.tier.tier is Tier.HOST
        assert [memory.num_blocks for memory in rig.device.backend.memory] == [
            rig.device.pool.num_blocks, rig.tier.slots.num_slots
        ]  # fmt: skip
        assert "4 MiB of host KV" in rig.device.summary
    finally:
        await rig.device.aclose()


def test_a_tier_that_does_not_fit_is_refused(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"--host-kv-memory is .*; must be at most"):
        Rig(tiny_dir, kv_memory=MIB, host_kv_memory=2**50)
