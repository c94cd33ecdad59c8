"""How a preempted sequence gets its KV back: the decision, and the engine that waits for reloads."""

from collections import Counter
from random import Random

import pytest

from baton.core.kv.kv_tables import entries_from, hashes_of_prefix
from baton.core.reload_limits import RELOAD_GAIN
from baton.engine.kv_cache.content_index import longest_prefix
from baton.engine.state.outcome import ReturningSequence
from baton.engine.state.sequence import SequenceRequest
from baton.engine.tiers.copy_policy import reload_pays
from baton.engine.tiers.way_back import WayBack, choose_way_back
from tests.builders import BLOCK_SIZE_TOKENS, sequence_request
from tests.engine_rig import EngineRig
from tests.scale import sized
from tests.unit.engine.test_engine_property import WINDOWS, World


@pytest.mark.parametrize(
    ("compute_s", "store_s", "load_s", "way"),
    [
        (1.0, 0.4, 0.4, WayBack.RELOAD),
        (1.0, 0.5, 0.4, WayBack.RECOMPUTE),
        (1.0, 0.0, 0.7, WayBack.RELOAD),
        (None, 0.1, 0.1, WayBack.RECOMPUTE),
        (1.0, None, 0.1, WayBack.RECOMPUTE),
        (1.0, 0.1, None, WayBack.RECOMPUTE),
    ],
)
def test_the_faster_way_is_chosen(
    compute_s: float | None, store_s: float | None, load_s: float | None, way: WayBack
) -> None:
    assert choose_way_back(compute_s=compute_s, store_s=store_s, load_s=load_s).way is way


@pytest.mark.parametrize("seed", range(sized(30, 800)))
def test_a_chosen_reload_is_never_the_slower_way_and_pays_later(seed: int) -> None:
    rng = Random(seed)
    compute_s, store_s, load_s = (10 ** rng.uniform(-5, 1) for _ in range(3))
    decision = choose_way_back(compute_s=compute_s, store_s=store_s, load_s=load_s)
    assert (decision.compute_s, decision.reload_s) == (compute_s, store_s + load_s)
    seconds = {WayBack.RECOMPUTE: compute_s, WayBack.RELOAD: RELOAD_GAIN * (store_s + load_s)}
    assert seconds[decision.way] == min(seconds.values())
    assert decision.way is WayBack.RECOMPUTE or reload_pays(compute_s=compute_s, reload_s=load_s)
    slower = choose_way_back(compute_s=2 * compute_s, store_s=store_s, load_s=load_s)
    assert decision.way is WayBack.RECOMPUTE or slower.way is WayBack.RELOAD


def preempting_rig(**changes: object) -> tuple[EngineRig, SequenceRequest, SequenceRequest]:
    """Return an engine in which the second of two sequences was preempted."""
    rig = EngineRig(num_blocks=12, max_num_seqs=2, **changes)
    first, second = (rig.add(sequence_request(i, range(i, i + 17), max_tokens=24)) for i in (1, 2))
    rig.run_until(lambda: bool(rig.engine.counters.preemptions))
    return rig, first, second


def test_without_reloads_a_preempted_sequence_is_admitted_at_once_and_computed() -> None:
    rig, first, second = preempting_rig()
    rig.run()
    assert not rig.preemptions
    assert not rig.returns
    rig.assert_answered(first, second)
    counters = rig.engine.counters
    assert 0 < counters.recomputed_tokens <= counters.lost_tokens


def test_a_preempted_sequence_waits_until_it_has_returned() -> None:
    rig, first, second = preempting_rig(reloads_preempted=True)
    (preempted,) = rig.preemptions
    assert preempted.seq_id == second.seq_id
    assert len(preempted.hashes) == rig.engine.counters.lost_tokens // BLOCK_SIZE_TOKENS
    rig.run()
    rig.assert_answered(first)
    (returning,) = rig.returns
    assert rig.engine.waiting_seqs == 1
    assert returning.hashes[: len(preempted.hashes)] == preempted.hashes
    rig.engine.returned(returning.key)
    rig.engine.returned(returning.key)
    rig.run()
    rig.assert_answered(second)
    rig.assert_clean()


def test_a_sequence_that_waits_for_its_reload_can_be_cancelled() -> None:
    rig, _, second = preempting_rig(reloads_preempted=True)
    rig.run()
    rig.engine.cancel(second.seq_id)
    rig.engine.returned(rig.returns[0].key)
    rig.run()
    rig.assert_clean()


def test_later_sequences_leave_its_blocks_to_a_sequence_that_waits_for_its_reload() -> None:
    rig, _, second = preempting_rig(reloads_preempted=True)
    small = rig.add(sequence_request(3, [7, 8, 9], max_tokens=4))
    large = rig.add(sequence_request(4, range(100, 130), max_tokens=4))
    rig.run()
    rig.assert_answered(small)
    assert large.seq_id not in rig.admissions
    rig.engine.returned(rig.returns[0].key)
    rig.run()
    rig.assert_answered(second, large)
    rig.assert_clean()


class TieredWorld(World):
    """A world with a tier that keeps some blocks of preempted sequences, and reloads some of these later."""

    def __init__(self, seed: int) -> None:
        rng, windows = Random(seed), WINDOWS[seed % len(WINDOWS)]
        super().__init__(
            seed,
            num_blocks=6 + sum(6 if window else rng.randint(11, 14) for window in windows),
            max_num_seqs=rng.randint(3, 6),
            max_num_batched_tokens=rng.randint(8, 24),
            max_model_len=45,
            reloads_preempted=True,
        )
        self.stored: set[bytes] = set()
        self.reloading: dict[int, tuple[list[int], list[int], list[bytes]]] = {}

    def new_request(self) -> SequenceRequest:
        """Return mostly a request with a short prompt and a long answer, so that blocks run out."""
        rng = self.rng
        if rng.random() < 0.3:
            return super().new_request()
        return sequence_request(
            len(self.requests) + 1,
            [rng.randrange(50) for _ in range(rng.randint(1, 10))],
            max_tokens=rng.randint(10, 35),
            sampling={"ignore_eos": True, "seed": rng.randrange(3)},
            priority=rng.choice([0, 0, 1]),
        )

    def after_admissions(self) -> None:
        super().after_admissions()
        for preempted in self.rig.preemptions:
            needed = hashes_of_prefix(preempted.hashes, self.rig.pool.windows)
            self.stored.update(each for each in needed if self.rng.random() < 0.9)
        for returning in self.rig.returns:
            self.begin(returning)
        self.rig.preemptions.clear()
        self.rig.returns.clear()

    def begin(self, returning: ReturningSequence) -> None:
        """Begin a reload into free blocks, as `Reloads` does, or refuse it."""
        pool, windows, size = self.rig.pool, self.rig.pool.windows, self.rig.config.block_size_tokens
        num_blocks = longest_prefix(
            returning.hashes, windows, lambda each: pool.find(each) is not None or each in self.stored
        )
        needed = hashes_of_prefix(returning.hashes[:num_blocks], windows)
        entries = entries_from(windows.first_blocks(num_blocks * size), num_blocks)
        held = [found for each in needed if (found := pool.find(each)) is not None]
        missing = [(entry, each) for entry, each in zip(entries, needed, strict=True) if pool.find(each) is None]
        if not missing or self.rng.random() < 0.1:
            self.rig.engine.returned(returning.key)
            return
        pool.ref(held)
        receiving = pool.allocate_receiving(len(missing), [entry for entry, _ in missing])
        if receiving is None:
            pool.unref(held)
            self.rig.engine.returned(returning.key)
            return
        self.reloading[returning.key] = held, receiving, [each for _, each in missing]

    def end_reload(self) -> None:
        """End one reload, with all of its blocks, or with the first of them."""
        if not self.reloading:
            return
        key = self.rng.choice(list(self.reloading))
        held, receiving, hashes = self.reloading.pop(key)
        pool = self.rig.pool
        count = self.rng.choice([len(hashes), self.rng.randint(0, len(hashes))])
        for block_id, block_hash in zip(receiving[:count], hashes, strict=False):
            self.rig.executor.memory[block_id] = self.contents_of_hash[block_hash][:]
            pool.mark_received(block_id, block_hash)
        pool.drop_receiving(receiving[count:])
        pool.unref(held + receiving)
        self.happened["reloaded blocks"] += count
        self.happened["ended while reloading"] += key not in self.rig.engine._sequences.queue
        self.rig.engine.returned(key)

    def cancel_reloading(self) -> None:
        """Cancel a sequence that waits for its reload."""
        seq = self.rig.engine._sequences.queue.get(self.rng.choice([*self.reloading, 0]))
        if seq is not None:
            self.cancelled |= {(seq.seq_id, i) for i in seq.sample_indices}
            self.rig.engine.cancel(seq.seq_id, seq.sample_indices)

    def step(self) -> bool:
        sequences = self.rig.engine._sequences
        assert not any(key in sequences.running or key in sequences.receiving for key in self.reloading)
        has_run = super().step()
        if self.rng.random() < 0.1:
            self.cancel_reloading()
        if self.rng.random() < 0.2:
            self.end_reload()
        return has_run

    def come_to_an_end(self, max_steps: int) -> None:
        super().come_to_an_end(max_steps)
        while self.reloading:
            self.end_reload()


HAPPENED: dict[int, Counter[str]] = {}
"""What has happened in each world before it came to an end, by seed."""


def lived_world(seed: int) -> TieredWorld:
    world = TieredWorld(seed)
    world.live_through(120)
    HAPPENED[seed] = world.happened + Counter(preemptions=world.rig.engine.counters.preemptions)
    return world


@pytest.mark.parametrize("seed", range(sized(10, 400)))
def test_every_token_is_correct_with_reloads_of_preempted_sequences(seed: int) -> None:
    world = lived_world(seed)
    world.come_to_an_end(max_steps=3000)
    world.audit()
    world.assert_right()
    world.rig.assert_clean()


def test_random_worlds_reload_blocks_of_preempted_sequences() -> None:
    """Without these events the test above would check too little. Worlds that it has run are not repeated."""
    happened: Counter[str] = Counter()
    for seed in range(20):
        if seed not in HAPPENED:
            lived_world(seed)
        happened += HAPPENED[seed]
    assert happened["preemptions"] >= 20, happened
    assert happened["reloaded blocks"] >= 20, happened
    assert happened["ended while reloading"] >= 2, happened
