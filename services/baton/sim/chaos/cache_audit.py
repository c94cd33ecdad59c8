"""Compares the cached blocks of all tiers with the content that follows from the requests alone."""

from collections.abc import Iterable, Mapping

from baton.core.kv.block_hash import BlockHash, chain, root_hash, table_hash, token_ids
from baton.core.kv.kv_events import Tier
from baton.sim.sim_clients import SimRequest, expected_answer
from baton.sim.sim_cluster import SimCluster
from baton.sim.sim_memory import contents

ExpectedBlocks = Mapping[BlockHash, tuple[int, ...]]
"""Content of each block that requests can have produced, by hash."""


def expected_blocks(cluster: SimCluster, requests: Iterable[SimRequest]) -> ExpectedBlocks:
    """Return the content of all blocks of the requests and their answers."""
    layout = cluster.layout
    size, num_tables = layout.block_size_tokens, layout.windows.num_tables
    expected: dict[BlockHash, tuple[int, ...]] = {}
    for request in requests:
        root = root_hash(
            model_fingerprint=layout.model_fingerprint,
            cache_salt=request.cache_salt,
            block_size_tokens=size,
        )
        for index in range(request.num_samples):
            answer = expected_answer(request, index, cluster.model.vocab_size, beyond_stop=True)
            tokens = [*request.prompt, *answer]
            slots = contents(tokens)
            for number, block_hash in enumerate(chain(root, token_ids(tokens), size)):
                own = slots[number * size : (number + 1) * size]
                for table in range(num_tables):  # each has other content, see SimExecutor
                    expected[table_hash(block_hash, table)] = tuple(slot + table for slot in own)
    return expected


def audit_caches(cluster: SimCluster, expected: ExpectedBlocks) -> int:
    """Compare each cached block of each device with its expected content.

    Returns the number of blocks. Raises AssertionError naming a block with other content, or with a hash that
    no request can have produced.
    """
    num_audited = 0
    for name in sorted(cluster.workers):
        pool, memory = cluster.workers[name].pool, cluster.memories[name]
        for block_hash in dict.fromkeys((*pool.hashes(), *expected)):  # the pool lists those of table 0 only
            for block_id in pool.lookup([block_hash]):
                _compare(f"{name}: block {block_id}", block_hash, memory.block(block_id), expected)
                num_audited += 1
    return num_audited


def audit_tiers(cluster: SimCluster, expected: ExpectedBlocks) -> int:
    """Compare the content of all slots of host and disk tiers, as `audit_caches` does.

    Payloads that a fault of the disk has damaged are left out: a load finds them.
    """
    num_audited = 0
    for name in sorted(cluster.workers):
        for tier in cluster.workers[name].kv.tiers:
            for block_hash in tier.slots.all_hashes():
                slot = tier.slots.slot_of(block_hash)
                if slot is None or (tier.tier is Tier.DISK and cluster.disks[name].file.has_damaged_payload(slot)):
                    continue
                is_host = tier.tier is Tier.HOST
                content = cluster.host_memories[name].block(slot) if is_host else cluster.disks[name].payload(slot)
                _compare(f"{name}: slot {slot} of the tier {tier.tier.value}", block_hash, content, expected)
                num_audited += 1
    return num_audited


def _compare(where: str, block_hash: BlockHash, content: tuple[int, ...], expected: ExpectedBlocks) -> None:
    if content != expected.get(block_hash):
        raise AssertionError(f"{where} does not hold the tokens of its hash {block_hash.hex()}")
