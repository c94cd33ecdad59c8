"""Tests that blocks outside the window of every layer are freed, not required and not pulled."""

import random

import pytest

from baton.core.kv.block_hash import first_visible_block, table_hash
from baton.core.kv.kv_tables import NO_BLOCK, TableWindows, entries_from
from baton.engine.kv_cache.block_pool import BlockPool
from tests.builders import BLOCK_SIZE_TOKENS, hashes_of, sequence_request
from tests.engine_rig import EngineRig
from tests.fake_executor import FakeGenerationTable
from tests.unit.engine.loop_helpers import FAILURE

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
    pool.windows = TableWindows((window,), 4)
    taken = pool.allocate(len(hashes)) or []
    known = {i for i in range(len(hashes)) if rng.random() < 0.7}
    for i in known:
        pool.set_hash(taken[i], hashes[i])
    fits = [n for n in range(len(hashes) + 1) if set(range(first_visible_block(4 * n, window, 4), n)) <= known]
    found = pool.lookup_prefix(hashes)
    first = first_visible_block(4 * max(fits), window, 4)
    assert found == (max(fits), (first,), taken[first : max(fits)])


@pytest.mark.parametrize("seed", range(20))
def test_a_prefix_is_cached_if_each_table_has_what_is_seen_after_it(seed: int) -> None:
    rng = random.Random(seed)
    windows = TableWindows(tuple(rng.choice((0, 1, 5, 9, 13)) for _ in range(rng.randint(2, 4))), 4)
    num_tables, num_blocks = windows.num_tables, rng.randint(1, 9)
    pool = BlockPool(64, 4, FakeGenerationTable(64), windows)
    hashes = hashes_of([rng.randrange(9) for _ in range(4 * num_blocks)], 4)
    taken = pool.allocate(num_blocks * num_tables, range(num_blocks * num_tables)) or []
    known = {entry for entry in range(len(taken)) if rng.random() < 0.9}
    for entry in known:
        pool.set_hash(taken[entry], hashes[entry // num_tables])
    fits = [n for n in range(num_blocks + 1) if set(entries_from(windows.first_blocks(4 * n), n)) <= known]
    found = pool.lookup_prefix(hashes)
    assert (found.num_blocks, found.first_blocks) == (max(fits), windows.first_blocks(4 * max(fits)))
    assert found.block_ids == [taken[entry] for entry in entries_from(found.first_blocks, found.num_blocks)]
    pool.unref(taken)
    assert {each for _, each in pool.take_events()} == set(pool.hashes()) <= set(hashes), "events of table 0 only"


def test_a_long_prompt_that_is_in_no_cache_is_looked_up_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-up is repeated in each step while the prompt waits for blocks."""
    computed: list[int] = []
    first_by_window = TableWindows.first_by_window

    def counting(windows: TableWindows, num_blocks: int) -> dict[int, int]:
        computed.append(num_blocks)
        return first_by_window(windows, num_blocks)

    monkeypatch.setattr(TableWindows, "first_by_window", counting)
    pool = BlockPool(4, BLOCK_SIZE_TOKENS, FakeGenerationTable(4), TableWindows((10,), BLOCK_SIZE_TOKENS))
    assert pool.lookup_prefix(hashes_of(range(2000))).num_blocks == 0
    assert len(computed) <= 2


def test_a_long_answer_holds_only_its_window() -> None:
    rig = EngineRig(num_blocks=32, kv_windows=(9,))
    request = rig.add(sequence_request(1, PROMPT[:3], max_tokens=100, sampling={"ignore_eos": True}))
    most = 0
    while not rig.step().is_empty:
        most = max(most, rig.pool.counts().used)
    assert most == 3, "9 tokens are in at most 3 blocks"
    rig.assert_answered(request)
    rig.assert_clean()


def test_freed_blocks_serve_other_sequences() -> None:
    """While an answer grows, prompts reuse the memory that it no longer sees."""
    rig = EngineRig(num_blocks=12, kv_windows=(6,), max_num_seqs=2)
    answer = rig.add(sequence_request(1, PROMPT[:2], max_tokens=40, sampling={"ignore_eos": True}))
    rig.run_until(lambda: len(rig.outputs[1, 0]) > 30)
    other = rig.add(sequence_request(2, PROMPT[:28], max_tokens=2, sampling={"ignore_eos": True}))
    rig.step()
    assert 2 in rig.admissions, "7 blocks of 12 fit beside an answer of 9 blocks that holds 2 or 3"
    rig.run()
    rig.assert_answered(answer, other)
    rig.assert_clean()


def test_the_tail_of_a_prompt_is_enough_for_a_hit() -> None:
    rig = EngineRig(num_blocks=12, kv_windows=(6,))
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
    assert first_visible_block(28, 6, BLOCK_SIZE_TOKENS) == 5
    assert rig.admissions[2].block_table[:5] == (NO_BLOCK,) * 5
    assert len(rig.admissions[2].cached_block_ids) == 2
    rig.run()
    rig.assert_answered(first, again)
    rig.assert_clean()


def test_blocks_before_the_window_are_not_pulled() -> None:
    rig = EngineRig(num_blocks=16, kv_windows=(9,))
    request = rig.add(sequence_request(1, PROMPT, max_tokens=20, pulled=True, sampling={"ignore_eos": True}))
    rig.plan()
    admission = rig.admissions[1]
    assert (admission.num_cached_blocks, admission.cached_block_ids) == (0, ())
    assert rig.engine.counters.cached_tokens == 0
    assert len(admission.receiving_block_ids) == 3, "8 blocks without the 5 that no token sees"
    rig.mark_received(request)
    rig.engine.received(1, rig.first_tokens(request))
    rig.run()
    rig.assert_answered(request)
    rig.assert_clean()


def test_a_pulled_prompt_uses_cached_blocks_of_its_window() -> None:
    rig = EngineRig(num_blocks=16, kv_windows=(13,))
    rig.add(sequence_request(1, PROMPT[:24], max_tokens=1))
    rig.run()
    request = rig.add(sequence_request(2, PROMPT, max_tokens=9, pulled=True, sampling={"ignore_eos": True}))
    rig.plan()
    admission = rig.admissions[2]
    assert (admission.num_cached_blocks, len(admission.cached_block_ids)) == (6, 2)
    assert len(admission.receiving_block_ids) == 2
    rig.mark_received(request)
    rig.engine.received(2, rig.first_tokens(request))
    rig.run()
    rig.assert_answered(request)
    rig.assert_clean()


@pytest.mark.parametrize("kv_window", [2, 5, 8, 9, 100])
def test_samples_share_what_they_see(kv_window: int) -> None:
    rig = EngineRig(num_blocks=40, kv_windows=(kv_window,))
    request = rig.add(
        sequence_request(1, PROMPT, max_tokens=30, sample_indices=(0, 1, 2), sampling={"ignore_eos": True})
    )
    rig.run()
    rig.assert_answered(request)
    rig.assert_clean()


MIXED = (0, 6, 6)


def mixed_rig(num_blocks: int = 60, **config: int) -> EngineRig:
    """Return an engine of a model in which one table sees all tokens, and two see 6."""
    return EngineRig(num_blocks=num_blocks, kv_windows=MIXED, **config)


def test_only_layers_without_a_window_keep_a_long_answer() -> None:
    rig = mixed_rig()
    request = rig.add(sequence_request(1, PROMPT[:3], max_tokens=100, sampling={"ignore_eos": True}))
    most = 0
    while not rig.step().is_empty:
        most = max(most, rig.pool.counts().used)
    assert most == 26 + 2 * 2, "102 tokens are in 26 blocks, the last 6 in at most 2 of each other table"
    rig.assert_answered(request)
    rig.assert_clean()


def test_a_long_prompt_needs_few_windowed_blocks() -> None:
    """Its blocks without a window are given at once, the others as its chunks are scheduled."""
    rig = mixed_rig(num_blocks=25 + 2 * 5, max_num_batched_tokens=8)
    prompt = [n % 50 for n in range(97)]
    request = rig.add(sequence_request(1, prompt, max_tokens=3, sampling={"ignore_eos": True}))
    rig.step()
    assert rig.pool.counts().used == 25 + 2 * 2
    assert rig.run() == 12 + 2
    rig.assert_answered(request)
    rig.assert_clean()


@pytest.mark.parametrize("num_shared", [0, 500])
def test_partly_computed_prompts_do_not_wait_for_each_other(num_shared: int) -> None:
    """A prompt starts only if the windowed blocks of all that are partly computed stay available.

    The first prompt leaves part of each step's budget to the second, because its logprobs are reported. Both
    fit at first, but not the blocks of both windows.
    """
    rig = EngineRig(num_blocks=2 * 150 + 2 * 18 + 5, kv_windows=(0, 200), max_num_batched_tokens=72)
    added = [
        rig.add(
            sequence_request(
                seq_id,
                [n % 7 for n in range(num_shared)] + [n % (3 + seq_id) for n in range(600 - num_shared)],
                max_tokens=1,
                prefill_only=True,
                sampling={"num_prompt_logprobs": 0} if seq_id == 1 else {},
            )
        )
        for seq_id in (1, 2)
    ]
    rig.run()
    for request in added:
        assert rig.outputs[request.seq_id, 0] == rig.expected(request, 0)[0][:1]
    rig.assert_clean()


def test_a_reader_gets_the_blocks_of_the_last_window_when_they_are_given() -> None:
    rig = mixed_rig(max_num_batched_tokens=8)
    prompt = [n % 50 for n in range(38)]
    request = rig.add(sequence_request(1, prompt, max_tokens=3, prefill_only=True, for_reader=True))
    rig.run()
    tables = [rig.admissions[1].block_table, *(growth.block_table for growth in rig.growths)]
    assert len(tables) == 5, "one for each chunk"
    assert tables[0][24:] == (tables[0][24], -1, -1, tables[0][27], -1, -1)
    assert NO_BLOCK not in tables[-1][24:]
    assert all(table[::3] == tables[0][::3] for table in tables)
    rig.assert_clean()
    assert rig.outputs[1, 0] == rig.expected(request, 0)[0][:1]


def test_an_answer_and_its_prompt_are_cached_together() -> None:
    """The next turn of a conversation continues after the last full block of the turn before."""
    rig = mixed_rig()
    first = rig.add(sequence_request(1, PROMPT, max_tokens=12, sampling={"ignore_eos": True}))
    rig.run()
    turn = [*PROMPT, *rig.outputs[1, 0], 5, 6, 7]
    second = rig.add(sequence_request(2, turn, max_tokens=3, sampling={"ignore_eos": True}))
    rig.run()
    assert rig.admissions[2].num_cached_blocks == 10, "41 tokens of 42 have KV"
    rig.assert_answered(first, second)
    rig.assert_clean()


def test_a_prefix_without_its_window_is_computed_again() -> None:
    rig = mixed_rig(num_blocks=40)
    rig.add(sequence_request(1, PROMPT, max_tokens=1))
    rig.run()
    hashes = hashes_of(PROMPT)
    (lost,) = rig.pool.lookup([table_hash(hashes[5], 2)])
    rig.pool.ref([lost])
    rig.pool.unpublish([lost])
    rig.pool.unref([lost])
    again = rig.add(sequence_request(2, (*PROMPT, 99), max_tokens=3, sampling={"ignore_eos": True}))
    rig.run()
    assert rig.admissions[2].num_cached_blocks == 5
    rig.assert_answered(again)
    rig.assert_clean()


@pytest.mark.parametrize("kv_windows", [(6,), MIXED])
def test_no_block_of_a_failed_sequence_stays_in_the_cache(kv_windows: tuple[int, ...]) -> None:
    """Not even one that was freed before, because no layer saw it any more."""
    rig = EngineRig(num_blocks=40, kv_windows=kv_windows, max_num_batched_tokens=8)
    rig.executor.failing = lambda part: FAILURE if part.kv_begin >= 24 else None
    rig.add(sequence_request(1, PROMPT, max_tokens=3))
    rig.run_until(lambda: rig.pool.counts().cached > 0)
    rig.run()
    assert rig.ends == {(1, 0): FAILURE}
    assert rig.pool.counts().cached == 0
    rig.assert_clean()


class Copied:
    """Follows a pool, and keeps the content that became idle, until it is withdrawn."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.content: set[bytes] = set()

    def became_idle(self, block_id: int) -> None:
        self.content.add(self.pool.hash_of(block_id))

    def withdrawn(self, block_hash: bytes) -> None:
        self.content.discard(block_hash)


@pytest.mark.parametrize("num_blocks", [6, 40], ids=["evicted", "cached"])
def test_no_copy_of_a_block_of_a_failed_sequence_stays_in_a_slower_tier(num_blocks: int) -> None:
    """Not even of one that the pool has evicted since."""
    rig = EngineRig(num_blocks=num_blocks, kv_windows=(6,), max_num_batched_tokens=8)
    copied = Copied(rig.pool)
    rig.pool.add_listener(copied)
    rig.executor.failing = lambda part: FAILURE if part.kv_begin >= 24 else None
    rig.add(sequence_request(1, PROMPT, max_tokens=3))
    rig.run_until(lambda: len(copied.content) > 2)
    rig.run()
    assert rig.ends == {(1, 0): FAILURE}
    assert copied.content == set()
    rig.assert_clean()


def test_only_needed_blocks_of_each_table_are_pulled() -> None:
    rig = mixed_rig()
    request = rig.add(
        sequence_request(1, PROMPT, max_tokens=20, pulled=True, sampling={"ignore_eos": True}, sample_indices=(0, 1))
    )
    rig.plan()
    assert len(rig.admissions[1].receiving_block_ids) == 8 + 2 * 2
    rig.mark_received(request)
    rig.engine.received(1, rig.first_tokens(request))
    rig.run()
    rig.assert_answered(request)
    rig.assert_clean()


def test_a_block_that_is_not_given_yet_is_not_copied() -> None:
    """The last token of a prompt is one of a decode step, and may have no windowed block yet.

    Two samples share the block with the highest id, to which index -1 would lead.
    """
    rig = EngineRig(num_blocks=60, kv_windows=(0, 6), max_num_batched_tokens=18)
    others = rig.pool.allocate(56) or []
    samples = rig.add(
        sequence_request(1, PROMPT[:8], max_tokens=20, sample_indices=(0, 1), sampling={"ignore_eos": True})
    )
    rig.step()
    rig.pool.unref(others)
    assert rig.pool.num_refs(59) == 2
    prompt = rig.add(sequence_request(2, [n % 50 for n in range(33)], max_tokens=4, sampling={"ignore_eos": True}))
    assert [part.num_scheduled_tokens for plan in (rig.step(), rig.step()) for part in plan.sequences] == [1, 1, 16] * 2
    plan = rig.plan()
    assert plan.sequences[-1].kv_begin == 32
    assert plan.block_copies == ()
    rig.apply(plan)
    rig.run()
    rig.assert_answered(samples, prompt)
    rig.assert_clean()
