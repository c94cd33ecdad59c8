"""The slots of a tier compared with naive slots that recompute everything, under random operations."""

import random
from dataclasses import dataclass

import pytest

from baton.core.kv.block_hash import NO_HASH
from baton.core.kv.kv_events import KvEventKind
from baton.engine.tiers.kv_tier import BlockToStore
from baton.engine.tiers.slots import FIRST_USE_SHARE, TierSlots
from tests.fake_executor import FakeGenerationTable
from tests.scale import sized


@dataclass
class NaiveSlot:
    """state: `free`, `filling`, or `held`; a slot that is pinned and has no hash is lost."""

    state: str = "free"
    block_hash: bytes = NO_HASH
    is_announced: bool = False
    is_reused: bool = False
    is_void: bool = False
    pins: int = 0
    generation: int = 0
    released_at: int = 0

    @property
    def is_idle(self) -> bool:
        return self.state != "filling" and not self.pins


class Slots:
    """Applies the same random operations to both."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.num_slots = self.rng.randint(1, 10)
        self.table = FakeGenerationTable(self.num_slots)
        self.slots = TierSlots(self.num_slots, self.table)
        self.naive = [NaiveSlot(released_at=i) for i in range(self.num_slots)]
        self.now = self.num_slots
        self.here: set[bytes] = set()

    def some(self, slots: list[int]) -> list[int]:
        return self.rng.sample(slots, self.rng.randint(0, len(slots)))

    def any_hash(self) -> bytes:
        return bytes([self.rng.randint(1, 14)]) * 16

    def released(self, slot: int) -> None:
        if self.naive[slot].is_idle:
            self.now += 1
            self.naive[slot].released_at = self.now

    def known(self) -> set[bytes]:
        """Hashes of all content and of what is being filled, unless it was discarded."""
        return {s.block_hash for s in self.naive if s.block_hash != NO_HASH and not s.is_void}

    def next_idle(self) -> int | None:
        idle = sorted((i for i, s in enumerate(self.naive) if s.is_idle), key=lambda i: self.naive[i].released_at)
        free = [i for i in idle if self.naive[i].state == "free"]
        once = [i for i in idle if self.naive[i].state == "held" and not self.naive[i].is_reused]
        reused = [i for i in idle if self.naive[i].state == "held" and self.naive[i].is_reused]
        first = once if len(once) > FIRST_USE_SHARE * self.num_slots or not reused else reused
        return (free or first or [None])[0]

    def fill(self) -> None:
        blocks = [
            BlockToStore(
                block_id=n,
                block_hash=self.any_hash(),
                is_announced=self.rng.random() < 0.5,
                is_reused=self.rng.random() < 0.5,
            )
            for n in range(self.rng.randint(0, 4))
        ]
        expected: dict[int, BlockToStore] = {}
        for block in blocks:
            if block.block_hash in self.known():
                continue
            slot = self.next_idle()
            if slot is None:
                break
            expected[slot] = block
            self.naive[slot] = NaiveSlot(
                state="filling",
                block_hash=block.block_hash,
                is_announced=block.is_announced,
                is_reused=block.is_reused,
                generation=self.naive[slot].generation + 1,
            )
        assert self.slots.begin_fill(blocks) == expected

    def end_fill(self) -> None:
        chosen = self.some([i for i, s in enumerate(self.naive) if s.state == "filling"])
        is_complete = self.rng.random() < 0.8
        num_filled = 0
        for i in chosen:
            slot = self.naive[i]
            if is_complete and not slot.is_void:
                slot.state = "held"
                num_filled += 1
            else:
                self.naive[i] = NaiveSlot(generation=slot.generation)
            self.released(i)
        assert self.slots.end_fill(chosen, is_complete=is_complete) == num_filled

    def discard(self) -> None:
        block_hash = self.any_hash()
        for i, slot in enumerate(self.naive):
            if slot.block_hash != block_hash or slot.is_void:
                continue
            if slot.state == "filling":
                slot.is_void = True
            else:
                slot.state, slot.block_hash, slot.is_reused = "free", NO_HASH, False
                slot.generation += 1
                self.released(i)
        self.slots.discard(block_hash)

    def announce(self) -> None:
        block_hash, expected = self.any_hash(), None
        for i, slot in enumerate(self.naive):
            if slot.block_hash == block_hash and not slot.is_void:
                expected = i if slot.state == "held" and not slot.is_announced else None
                slot.is_announced = True
        assert self.slots.announce(block_hash) == expected

    def act(self) -> None:
        action = self.rng.choice("fill fill end end discard pin pin unpin unpin use announce".split())
        if action == "fill":
            self.fill()
        elif action == "end":
            self.end_fill()
        elif action == "discard":
            self.discard()
        elif action == "announce":
            self.announce()
        elif action == "pin":
            chosen = self.some([i for i, s in enumerate(self.naive) if s.state == "held"])
            self.slots.pin(chosen)
            for i in chosen:
                self.naive[i].pins += 1
        elif action == "unpin":
            chosen = self.some([i for i, s in enumerate(self.naive) if s.pins])
            self.slots.unpin(chosen)
            for i in reversed(chosen):
                self.naive[i].pins -= 1
                self.released(i)
        elif action == "use":
            chosen = self.some([i for i, s in enumerate(self.naive) if s.state == "held"])
            self.slots.count_use(chosen)
            for i in chosen:
                if not self.naive[i].is_reused:
                    self.naive[i].is_reused = True
                    self.released(i)

    def assert_equal(self) -> None:
        self.slots.check()
        held = [s for s in self.naive if s.state == "held"]
        counts = self.slots.counts()
        assert (counts.free, counts.held) == (sum(s.state == "free" and not s.pins for s in self.naive), len(held))
        assert counts.free + counts.held + counts.busy == counts.total == self.num_slots
        assert self.table.generations == [s.generation for s in self.naive]
        is_published = [s.block_hash if s.state == "held" else NO_HASH for s in self.naive]
        assert [self.slots.hash_of(i) for i in range(self.num_slots)] == self.table.hashes == is_published
        for slot, block_hash in enumerate(is_published):
            if block_hash != NO_HASH:
                assert self.slots.lookup([block_hash, bytes(15) + b"x"]) == [slot]
        here = {s.block_hash for s in held if s.is_announced}
        assert set(self.slots.announced_hashes()) == here
        if self.rng.random() < 0.3:
            for kind, block_hash in self.slots.take_events():
                assert (block_hash in self.here) is (kind is KvEventKind.EVICTED)
                self.here ^= {block_hash}
            assert self.here == here


@pytest.mark.parametrize("seed", range(sized(10, 1000)))
def test_slots_equal_naive_slots(seed: int) -> None:
    slots = Slots(seed)
    for _ in range(300):
        slots.act()
        slots.assert_equal()


def filled(slots: TierSlots, *hashes: bytes, is_reused: bool = False) -> list[int]:
    """Fill slots, and return them in the order of `hashes`."""
    blocks = [BlockToStore(block_id=0, block_hash=each, is_reused=is_reused) for each in hashes]
    slots.end_fill(slots.begin_fill(blocks), is_complete=True)
    return [slots.slot_of(each) or 0 for each in hashes]


def test_content_that_is_used_again_stays_while_other_content_passes_through() -> None:
    slots = TierSlots(8, FakeGenerationTable(8))
    kept = [bytes([n]) * 16 for n in range(1, 5)]
    filled(slots, *kept, is_reused=True)
    for n in range(10, 60):
        filled(slots, bytes([n]) * 16)
    assert all(slots.slot_of(each) is not None for each in kept)


def test_new_content_finds_a_place_among_content_that_was_used_again() -> None:
    slots = TierSlots(8, FakeGenerationTable(8))
    filled(slots, *(bytes([n]) * 16 for n in range(1, 9)), is_reused=True)
    filled(slots, bytes([20]) * 16, bytes([21]) * 16)
    assert slots.slot_of(bytes([20]) * 16) is not None
    assert slots.slot_of(bytes([21]) * 16) is not None


def test_the_end_of_a_chain_is_evicted_first_after_a_read() -> None:
    slots = TierSlots(3, FakeGenerationTable(3))
    chain = [bytes([n]) * 16 for n in (1, 2, 3)]
    pinned = filled(slots, *chain, is_reused=True)
    slots.pin(pinned)
    slots.unpin(pinned)
    filled(slots, bytes([9]) * 16)
    assert [slots.slot_of(each) is not None for each in chain] == [True, True, False]


@pytest.mark.parametrize("call", ["pin", "unpin", "end_fill"])
def test_wrong_use_is_refused(call: str) -> None:
    slots = TierSlots(2, FakeGenerationTable(2))
    with pytest.raises(ValueError, match=r"slots? \[?0\]? "):
        slots.end_fill([0], is_complete=True) if call == "end_fill" else getattr(slots, call)([0])
    slots.check()
