"""Workers that export and import prefixes over an in-process network: pools, memory and tiers, no models.

The content of a block is its hash repeated, so content under a wrong hash shows at once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from baton.core.cluster.prefix_files import ExportedPrefix, ImportedPrefix
from baton.core.interfaces import Duplex
from baton.core.kv.block_hash import BlockHash, TokenIds, chain, root_hash, tenant_root
from baton.core.kv.kv_layout import KvLayout
from baton.core.kv.kv_tables import entries_from, hashes_of_entries, hashes_of_prefix
from baton.core.messages.prefix_messages import PrefixReply, PrefixRequest
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.engine_config import EngineConfig
from baton.engine.tiers.kv_tier import BlockToStore
from baton.gateway.request.prefix_relay import PrefixRelay
from baton.runtime.network.in_process_network import InProcessNetwork
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.worker.prefix_files.prefix_copies import PrefixCopies
from baton.worker.prefix_files.staged_blocks import StagedBlocks
from baton.worker.tiers.host_tier import HostTier
from baton.worker.tiers.tier_copies import HostCopies
from tests import builders

LAYOUT = builders.layout()
SALT = b"salt of a tenant"


class LaterRunner:
    """A `CopyRunner` that copies after the call, and returns later, so that a test can cancel between."""

    async def run(self, copy: Callable[[], None], num_bytes: int) -> float:
        await asyncio.sleep(0)
        copy()
        await asyncio.sleep(0)
        return 1e-6

    def close(self) -> None:
        """Do nothing: there is no thread."""


class PrefixWorker:
    """One worker. `streams` counts those that it has served."""

    def __init__(self, name: str, num_blocks: int = 64, layout: KvLayout = LAYOUT, num_slots: int = 64) -> None:
        self.layout, self.name = layout, name
        self.ref = builders.worker_ref(name)
        self.memory = np.zeros((num_blocks, layout.block_bytes), dtype=np.uint8)
        table = MemoryGenerationTable(bytearray(num_blocks * ENTRY_BYTES), 1)
        self.pool = BlockPool(num_blocks, layout.block_size_tokens, table, layout.windows)
        slots = np.zeros((num_slots, layout.block_bytes), dtype=np.uint8)
        self.tier = HostTier(
            worker=self.ref,
            num_slots=num_slots,
            block_bytes=layout.block_bytes,
            generations=MemoryGenerationTable(bytearray(num_slots * ENTRY_BYTES), 1),
            copies=HostCopies(self.memory, slots),
            runner=LaterRunner(),
        )
        config = EngineConfig(
            max_num_batched_tokens=16,
            max_num_seqs=4,
            max_model_len=4096,
            block_size_tokens=layout.block_size_tokens,
            eos_token_ids=(),
        )
        self.num_changes = 0
        self.copies = PrefixCopies(
            engine=Engine(config, self.pool, clock=lambda: 0.0),
            tiers=(self.tier,),
            blocks=StagedBlocks(layout.block_bytes, lambda rows: HostCopies(self.memory, rows), LaterRunner()),
            layout=layout,
            on_changed=self.changed,
        )

    def changed(self) -> None:
        self.num_changes += 1

    async def copy_prefix(self, stream: Duplex[PrefixReply, PrefixRequest]) -> None:
        await self.copies.serve(stream)

    async def session(self, stream: Any) -> None:
        raise NotImplementedError

    async def peer(self, stream: Any) -> None:
        raise NotImplementedError

    def hashes(self, tokens: TokenIds, salt: bytes = SALT) -> list[BlockHash]:
        size = self.layout.block_size_tokens
        root = root_hash(model_fingerprint=self.layout.model_fingerprint, cache_salt=salt, block_size_tokens=size)
        return list(chain(root, tokens, size))

    def root(self, salt: bytes = SALT) -> BlockHash:
        return tenant_root(
            model_fingerprint=self.layout.model_fingerprint,
            cache_salt=salt,
            block_size_tokens=self.layout.block_size_tokens,
        )

    def compute(self, tokens: TokenIds, salt: bytes = SALT) -> None:
        """Cache the blocks of a prompt that are not cached, as a sequence that has ended."""
        hashes, windows = self.hashes(tokens, salt), self.pool.windows
        entries = entries_from((0,) * windows.num_tables, len(hashes))
        for entry, each in zip(entries, hashes_of_entries(hashes, entries, windows.num_tables), strict=True):
            if self.pool.find(each) is not None:
                continue
            blocks = self.pool.allocate(1, [entry])
            assert blocks is not None
            self.memory[blocks[0]] = content_of(each, self.layout)
            self.pool.set_hash(blocks[0], hashes[entry // windows.num_tables])
            self.pool.unref(blocks)
        self.pool.announce(hashes, 0, len(hashes), is_end=True, tenant_root=self.root(salt))

    async def demote(self, hashes: Sequence[BlockHash]) -> None:
        """Copy blocks to the host tier, and empty the device."""
        for each in hashes:
            block_id = self.pool.find(each)
            assert block_id is not None
            self.pool.begin_copy(block_id)
            stored = await self.tier.store(
                [BlockToStore(block_id=block_id, block_hash=each, tenant_root=self.root(), is_announced=True)]
            )
            self.pool.end_copy([block_id])
            assert stored == 1
        self.pool.forget_tenant(self.root())

    def check_holds(self, tokens: TokenIds, num_blocks: int) -> None:
        """Check that so many leading blocks are cached with the right bytes, and that nothing is in use."""
        hashes = self.hashes(tokens)
        assert self.pool.lookup_prefix(hashes).num_blocks == num_blocks
        for each in hashes_of_prefix(hashes[:num_blocks], self.pool.windows):
            block_id = self.pool.find(each)
            assert block_id is not None
            assert np.array_equal(self.memory[block_id], content_of(each, self.layout))
            assert self.pool.tenant_of(each) == self.root()
        self.check_idle()

    def check_idle(self) -> None:
        self.pool.check()
        self.tier.slots.check()
        counts = self.pool.counts()
        assert (counts.used, counts.receiving, counts.quarantined) == (0, 0, 0)
        assert not self.tier.counts().busy


class PrefixCluster:
    """Workers, and the relay of a gateway."""

    def __init__(self, *workers: PrefixWorker) -> None:
        self.network = InProcessNetwork()
        for worker in workers:
            self.network.add_worker(worker.ref.address, worker)
        reports = tuple(
            builders.worker_report(worker=worker.ref, model="demo", layout=worker.layout, blocks=worker.pool.counts())
            for worker in workers
        )
        view: Any = SimpleNamespace(reports=reports, layout=workers[0].layout)
        self.relay = PrefixRelay(self.network, view, "demo")

    async def export(self, tokens: TokenIds, salt: bytes = SALT) -> tuple[ExportedPrefix, bytes]:
        answers: list[Any] = []

        async def write(answer: ExportedPrefix | bytes) -> None:
            answers.append(answer)

        await self.relay.export_file(tokens, salt, write)
        return answers[0], b"".join(answers[1:])

    async def load(
        self, content: bytes, worker: str = "", salt: bytes = SALT, part_bytes: int = 1000
    ) -> ImportedPrefix:
        return await self.relay.import_file(worker, salt, parts_of(content, part_bytes))


async def parts_of(content: bytes, part_bytes: int) -> AsyncIterator[bytes]:
    for begin in range(0, len(content), part_bytes):
        yield content[begin : begin + part_bytes]


def content_of(block_hash: BlockHash, layout: KvLayout) -> np.ndarray:
    return np.resize(np.frombuffer(block_hash, dtype=np.uint8), layout.block_bytes)
