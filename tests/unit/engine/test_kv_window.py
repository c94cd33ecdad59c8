"""Tests that blocks outside the window of every layer are freed, not required and not pulled."""

import random

import pytest

from baton.core.kv.block_hash import first_visible_block
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.step import NO_BLOCK
from tests.builders import BLOCK_SIZE_TOKENS, hashes_of, sequence_request
from tests.engine_rig import EngineRig
from tests.fake_executor import FakeGenerationTable

PROMPT = tuple(range(1, 31))


@pytest.mark.parametrize(
    ("index", "window", "block"), [(0, 5, 0), (4, 5, 0), (7, 5, 0), (8, 5, 1), (30, 5, 6), (30, 1, 7), (30, 0, 0)]
)
def test_first_visible_block(index: int, window: int, block: int) -> None:
    assert first_visible_block(index, window, 4) == block


@pytest.mark.parametrize("seed", range(20))
def test_windowed_lookup_equals_its_definition(seed: int) -> None:
    """The definition: the longest prefix of which every block is cached that a later token sees."""
    rng = random.Random(seed)
    pool = BlockPool(16, 4, FakeGenerationTable(16))
    hashes = hashes_of([rng.randrange(9) for _ in range(4 * rng.randint(1, 12))], 4)
    window = rng.choice((1, 2, 5, 6, 9, 13))
    taken = pool.allocate(len(hashes)) or []
    known = {i for i in range(len(hashes)) if rng.random() < 0.7}
    for i in known:
        pool.set_hash(taken[i], hashes[i])
    fits = [n for n in range(len(hashes) + 1) if set(range(first_visible_block(4 * n, window, 4), n)) <= known]
    found = pool.lookup_prefix(hashes, window)
    assert (found.num_blocks, found.num_unseen_blocks) == (max(fits), first_visible_block(4 * max(fits), window, 4))
    assert found.block_ids == taken[found.num_unseen_blocks : found.num_blocks]
    assert pool.lookup_prefix(hashes) == (0, pool.lookup(hashes))


def test_a_long_answer_holds_only_its_window() -> None:
    rig = EngineRig(num_blocks=32, kv_window=9)
    request = rig.add(sequence_request(1, PROMPT[:3], max_tokens=100, sampling={"ignore_eos": True}))
    most = 0
    while not rig.step().is_empty:
        most = max(most, rig.pool.counts().used)
    assert most == 3, "9 tokens are in at most 3 blocks"
    rig.assert_answered(request)
    rig.assert_clean()


def test_freed_blocks_serve_other_sequences() -> None:
    """While an answer grows, prompts reuse the memory that it no longer sees."""
    rig = EngineRig(num_blocks=12, kv_window=6, max_num_seqs=2)
    answer = rig.add(sequence_request(1, PROMPT[:2], max_tokens=40, sampling={"ignore_eos": True}))
    rig.run_until(lambda: len(rig.outputs[1, 0]) > 30)
    other = rig.add(sequence_request(2, PROMPT[:28], max_tokens=2, sampling={"ignore_eos": True}))
    rig.step()
    assert 2 in rig.admissions, "7 blocks of 12 fit beside an answer of 9 blocks that holds 2 or 3"
    rig.run()
    rig.assert_answered(answer, other)
    rig.assert_clean()


def test_the_tail_of_a_prompt_is_enough_for_a_hit() -> None:
    rig = EngineRig(num_blocks=12, kv_window=6)
    first = rig.add(sequence_request(1, PROMPT, max_tokens=1))
    rig.run()
    hashes = hashes_of(PROMPT)
    rig.pool.unpublish([])  # nothing is withdrawn
    held = rig.pool.match(hashes[4:5] + hashes[5:], 9)
    evicted = rig.pool.allocate(rig.pool.num_allocatable) or []  # everything but the last blocks
    rig.pool.unref(evicted)
    rig.pool.unref(held)
    assert rig.pool.count_cached(hashes) == 0
    again = rig.add(sequence_request(2, (*PROMPT, 99), max_tokens=3, sampling={"ignore_eos": True}))
    plan = rig.step()
    assert plan.sequences[0].kv_begin == 28
    assert rig.admissions[2].num_cached_blocks == 7
    assert rig.admissions[2].num_freed_blocks == first_visible_block(28, 6, BLOCK_SIZE_TOKENS) == 5
    assert rig.admissions[2].block_table[:5] == (NO_BLOCK,) * 5
    rig.run()
    rig.assert_answered(first, again)
    rig.assert_clean()


def test_blocks_before_the_window_are_not_pulled() -> None:
    rig = EngineRig(num_blocks=16, kv_window=9)
    request = rig.add(sequence_request(1, PROMPT, max_tokens=20, pulled=True, sampling={"ignore_eos": True}))
    rig.plan()
    admission = rig.admissions[1]
    assert (admission.num_freed_blocks, admission.num_cached_blocks) == (5, 5)
    assert len(admission.receiving_block_ids) == 3, "8 blocks without the 5 that no token sees"
    rig.mark_received(request)
    rig.engine.received(1, rig.first_tokens(request))
    rig.run()
    rig.assert_answered(request)
    rig.assert_clean()


def test_a_pulled_prompt_uses_cached_blocks_of_its_window() -> None:
    rig = EngineRig(num_blocks=16, kv_window=13)
    rig.add(sequence_request(1, PROMPT[:24], max_tokens=1))
    rig.run()
    request = rig.add(sequence_request(2, PROMPT, max_tokens=9, pulled=True, sampling={"ignore_eos": True}))
    rig.plan()
    admission = rig.admissions[2]
    assert (admission.num_freed_blocks, admission.num_cached_blocks) == (4, 6)
    assert len(admission.receiving_block_ids) == 2
    rig.mark_received(request)
    rig.engine.received(2, rig.first_tokens(request))
    rig.run()
    rig.assert_answered(request)
    rig.assert_clean()


@pytest.mark.parametrize("kv_window", [2, 5, 8, 9, 100])
def test_samples_share_what_they_see(kv_window: int) -> None:
    rig = EngineRig(num_blocks=40, kv_window=kv_window)
    request = rig.add(
        sequence_request(1, PROMPT, max_tokens=30, sample_indices=(0, 1, 2), sampling={"ignore_eos": True})
    )
    rig.run()
    rig.assert_answered(request)
    rig.assert_clean()
