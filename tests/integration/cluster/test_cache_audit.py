"""The cache audit detects a single wrong value in one block of one worker, and blocks that it cannot
check."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from random import Random

import numpy as np
import pytest
import pytest_asyncio

from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash, chain, root_hash, token_ids
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.request import Sampling
from baton.transfer.backends.host_memory import attach_shared
from tests.cache_audit import CacheAuditor, NotCovered, WrongBlock, ready_reports
from tests.cache_reader import cache_reader
from tests.cluster import ProcessCluster, process_cluster
from tests.integration.cluster.clients import Request, send_all

pytestmark = [
    pytest.mark.long,  # it tests the audit that other tests use
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

BLOCK = 16
SHARED = tuple(Random(3).choices(range(4, 4096), k=2 * BLOCK))
"""Blocks 1 and 2 of `FIRST` and `SECOND`: the same tokens in different contexts."""
FIRST = (*Random(1).choices(range(4, 4096), k=BLOCK), *SHARED, 5)
SECOND = (*Random(2).choices(range(4, 4096), k=BLOCK), *SHARED, 5)


def hashes(layout: KvLayout, prompt: tuple[int, ...]) -> list[BlockHash]:
    return list(
        chain(root_hash(model_fingerprint=layout.model_fingerprint, block_size_tokens=BLOCK), token_ids(prompt), BLOCK)
    )


@contextmanager
def writable_block(memory: KvMemory, layout: KvLayout, block_id: int) -> Iterator[np.ndarray]:
    """Yield a worker's KV memory, writable from this process, and restore one block at the end.

    Shape [num_blocks, num_layers, 2, num_kv_heads, block_size_tokens, head_dim].
    """
    shared = attach_shared(memory.agent_metadata.decode(), num_blocks=memory.num_blocks, block_bytes=layout.block_bytes)
    component = layout.groups[0].components[0]
    kv = shared.kv.view(np.float32).reshape(-1, layout.num_layers, 2, component.num_kv_heads, BLOCK, component.head_dim)
    before = kv[block_id].copy()
    try:
        yield kv
    finally:
        kv[block_id] = before


async def cached_blocks(
    cluster: ProcessCluster,
) -> tuple[KvLayout, dict[WorkerRef, tuple[KvMemory, dict[BlockHash, int]]]]:
    """Return the KV layout, and the memory and the block ids by hash of each worker."""
    reports = await ready_reports(cluster)
    layout = reports[0].layout
    async with cache_reader(layout, transfer="local") as reader:
        return layout, {
            report.worker: (
                await reader.memory_of(report.worker),
                {
                    block_hash: block_id
                    for block_id, block_hash in (await reader.generation_table(report.worker)).items()
                },
            )
            for report in reports
        }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(auditor: CacheAuditor) -> AsyncIterator[ProcessCluster]:
    """One prefill and one decode worker over shared memory, which a test can write to.

    Both workers cache `FIRST` and `SECOND`, three full blocks each.
    """
    async with process_cluster(prefill=1, decode=1, transfer="local") as running:
        with pytest.raises(NotCovered, match="no worker caches a block"):
            await auditor.audit(running)
        requests = [
            Request(prompt=prompt, sampling=Sampling(max_tokens=4, temperature=0.0)) for prompt in (FIRST, SECOND)
        ]
        assert all(response.is_complete for response in await send_all(running, requests))
        await running.check_clean()
        yield running


async def test_audit_fails_if_it_cannot_check_enough_blocks(cluster: ProcessCluster, auditor: CacheAuditor) -> None:
    assert (await auditor.audit(cluster)).num_cached == {"p0": 6, "d0": 6}
    forgotten = cluster.history.pop()
    with pytest.raises(NotCovered, match=r"only 3 of 6 cached blocks of [dp]0 "):
        await auditor.audit(cluster)
    cluster.history.append(forgotten)
    await auditor.audit(cluster)


async def test_audit_names_one_wrong_block_of_one_worker(cluster: ProcessCluster, auditor: CacheAuditor) -> None:
    found = await auditor.audit(cluster)
    assert found.num_compared == found.num_cached == {"p0": 6, "d0": 6}
    layout, workers = await cached_blocks(cluster)
    for worker, (memory, blocks) in workers.items():
        block, in_other_context, other = (
            blocks[hashes(layout, prompt)[index]] for prompt, index in ((FIRST, 1), (SECOND, 1), (SECOND, 0))
        )
        at = (
            f"^{worker.worker_id} block {block}, hash {hashes(layout, FIRST)[1].hex()}, tokens 16 to 31 of a sequence: "
        )
        with writable_block(memory, layout, block) as kv:
            kv[block, 3, 1, 1, 7, 60] += 0.001
            with pytest.raises(
                WrongBlock, match=f"{at}layer 3, v, head 1, token 23, element 60 .* 1 of .* in layers .3.$"
            ):
                await auditor.audit(cluster)
        with writable_block(memory, layout, block) as kv:
            kv[block, 0, 0, 0, 0, 0] = np.nan
            with pytest.raises(WrongBlock, match=f"{at}layer 0, k, head 0, token 16, element 0 is nan"):
                await auditor.audit(cluster)
        with writable_block(memory, layout, block) as kv:
            kv[block] = kv[other]
            with pytest.raises(WrongBlock, match=f"{at}.* in layers .0, 1, 2, 3, 4, 5.$"):
                await auditor.audit(cluster)
        with writable_block(memory, layout, block) as kv:
            # The same tokens at the same position: the first layer alone would not show the difference.
            kv[block] = kv[in_other_context]
            with pytest.raises(WrongBlock, match=f"{at}.* in layers .1, 2, 3, 4, 5.$"):
                await auditor.audit(cluster)
        with writable_block(memory, layout, block) as kv:
            kv[block, :, 0] = np.roll(kv[block, :, 0], 1, axis=-2)  # keys shifted by one position
            with pytest.raises(WrongBlock, match=f"{at}layer ., k, "):
                await auditor.audit(cluster)
    again = await auditor.audit(cluster)
    assert again.num_compared == found.num_compared
    assert again.num_tokens == 0, "blocks that are bitwise unchanged are not recomputed"
