"""Which blocks a worker announces: every k-th of a chain, its last full one, and their evictions."""

from collections.abc import Sequence
from random import Random

import pytest

from baton.core.kv.kv_events import KvEventKind
from baton.engine.kv_cache.block_pool import BlockPool
from tests.builders import hashes_of, sequence_request
from tests.engine_rig import EngineRig
from tests.fake_executor import FakeGenerationTable
from tests.scale import sized
from tests.unit.engine.pool_helpers import EVICTED, STORED, stored_chain

CHAIN = hashes_of(range(4 * 30))


def pool_of(num_blocks: int = 64, announce_every: int = 8) -> BlockPool:
    return BlockPool(num_blocks, 4, FakeGenerationTable(num_blocks), announce_every=announce_every)


def announced(rig: EngineRig) -> set[bytes]:
    """Return what the events since the last call store; none may evict."""
    events = rig.pool.take_events()
    assert all(kind is STORED for kind, _ in events)
    return {block_hash for _, block_hash in events}


def test_every_eighth_block_and_the_last_one_are_announced() -> None:
    pool = pool_of()
    stored_chain(pool, CHAIN[:21])
    assert pool.take_events() == []
    pool.announce(CHAIN, 0, 21, is_end=False)
    assert pool.take_events() == [(STORED, CHAIN[7]), (STORED, CHAIN[15])]
    pool.announce(CHAIN, 0, 21, is_end=True)
    assert pool.take_events() == [(STORED, CHAIN[20])]
    assert (set(pool.announced_hashes()), len(pool.hashes())) == ({CHAIN[7], CHAIN[15], CHAIN[20]}, 21)


@pytest.mark.parametrize(("begin", "end", "positions"), [(0, 7, ()), (7, 8, (7,)), (8, 15, ()), (8, 24, (15, 23))])
def test_announced_positions_do_not_depend_on_where_a_part_begins(
    begin: int, end: int, positions: tuple[int, ...]
) -> None:
    pool = pool_of()
    stored_chain(pool, CHAIN)
    pool.announce(CHAIN, begin, end, is_end=False)
    assert pool.take_events() == [(STORED, CHAIN[i]) for i in positions]


def test_only_blocks_that_are_there_are_announced() -> None:
    pool = pool_of()
    stored_chain(pool, CHAIN[:10])
    pool.announce(CHAIN, 0, 24, is_end=True)
    assert pool.announced_hashes() == [CHAIN[7]]
    pool.announce(CHAIN[:3], 0, 24, is_end=True)
    assert pool.announced_hashes() == [CHAIN[7], CHAIN[2]]


def test_eviction_of_a_block_that_was_not_announced_is_counted_but_no_event() -> None:
    pool = pool_of(num_blocks=10)
    blocks = stored_chain(pool, CHAIN[:10])
    pool.announce(CHAIN, 0, 10, is_end=True)
    pool.take_events()
    pool.unref(blocks)
    pool.unref(pool.allocate(2) or [])
    assert (pool.take_events(), pool.num_evicted) == ([(EVICTED, CHAIN[9])], 2)
    assert pool.announced_hashes() == [CHAIN[7]]
    pool.unref(pool.allocate(3) or [])
    assert (pool.take_events(), pool.num_evicted) == ([(EVICTED, CHAIN[7])], 3)


def test_with_one_all_blocks_are_announced_at_once() -> None:
    pool = pool_of(announce_every=1)
    stored_chain(pool, CHAIN[:3])
    assert pool.take_events() == [(STORED, block_hash) for block_hash in CHAIN[:3]]
    pool.announce(CHAIN, 0, 3, is_end=True)
    assert pool.take_events() == []


# sequences


def test_prompt_is_announced_chunk_by_chunk_and_its_last_full_block_with_the_first_token() -> None:
    rig = EngineRig(announce_every=4, max_num_batched_tokens=32)
    tokens = range(10, 10 + 75)
    rig.add(sequence_request(1, tokens, max_tokens=4, sampling={"ignore_eos": True}))
    chain, steps = hashes_of(tokens), []
    while 1 not in {seq_id for seq_id, _ in rig.outputs}:
        rig.step()
        steps.append(announced(rig))
    assert steps == [{chain[3], chain[7]}, {chain[11], chain[15]}, {chain[17]}]


def test_answer_is_announced_at_every_fourth_block_and_at_its_end() -> None:
    rig = EngineRig(announce_every=4)
    rig.add(sequence_request(1, range(10, 21), max_tokens=40, sampling={"ignore_eos": True}))
    rig.run()
    tokens = [*range(10, 21), *rig.outputs[1, 0]][:-1]
    chain = hashes_of(tokens)
    assert len(chain) == 12
    assert announced(rig) == {chain[1], chain[3], chain[7], chain[11]}


def test_cached_beginning_is_announced_for_the_prompt_that_ends_there() -> None:
    """The shorter prompt computes nothing but its last token, and ends between announced blocks."""
    rig = EngineRig(announce_every=8)
    long, short = range(10, 10 + 60), range(10, 10 + 13)
    rig.add(sequence_request(1, long, max_tokens=1))
    rig.run()
    assert announced(rig) == {hashes_of(long)[7], hashes_of(long)[14]}
    rig.add(sequence_request(2, short, max_tokens=1))
    rig.run()
    assert announced(rig) == {hashes_of(short)[2]}


def test_pulled_prompt_is_announced_when_it_is_complete() -> None:
    rig = EngineRig(announce_every=4)
    request = rig.add(sequence_request(1, range(10, 49), max_tokens=3, pulled=True))
    rig.run_until(lambda: 1 in rig.admissions)
    rig.mark_received(request)
    assert announced(rig) == set()
    rig.engine.received(1, rig.first_tokens(request))
    chain = hashes_of(range(10, 49))
    assert announced(rig) == {chain[3], chain[7], chain[8]}


def test_cancelled_prompt_leaves_its_last_computed_block_announced() -> None:
    rig = EngineRig(announce_every=8, max_num_batched_tokens=24)
    rig.add(sequence_request(1, range(10, 90), max_tokens=3))
    rig.step()
    rig.engine.cancel(1)
    assert announced(rig) == {hashes_of(range(10, 90))[5]}


@pytest.mark.parametrize("seed", range(sized(10, 300)))
def test_announced_blocks_are_those_of_the_events_and_of_chains(seed: int) -> None:
    """Random requests over a small pool. What events leave is what a snapshot would contain."""
    rng, rig, known = Random(seed), EngineRig(24, announce_every=3, max_model_len=80), set[bytes]()
    chains: list[Sequence[bytes]] = []
    for seq_id in range(40):
        tokens = [*range(10, 10 + rng.randrange(1, 40)), *(rng.randrange(3, 9) for _ in range(rng.randrange(1, 20)))]
        rig.add(sequence_request(seq_id, tokens, max_tokens=rng.randrange(1, 12), sampling={"ignore_eos": True}))
        for _ in range(rng.randrange(12)):
            rig.step()
            for kind, block_hash in rig.pool.take_events():
                assert (block_hash in known) is (kind is KvEventKind.EVICTED)
                known ^= {block_hash}
            assert known == set(rig.pool.announced_hashes()) <= set(rig.pool.hashes())
        chains.append(hashes_of(tokens))
    rig.run()
    ends = {chain[-1] for chain in chains if chain}
    multiples = {block_hash for chain in chains for block_hash in chain[2::3]}
    of_prompts = {block_hash for chain in chains for block_hash in chain}
    assert set(rig.pool.announced_hashes()) & of_prompts <= ends | multiples
    assert multiples & set(rig.pool.hashes()) <= set(rig.pool.announced_hashes())
