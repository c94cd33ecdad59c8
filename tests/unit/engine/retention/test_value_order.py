"""The order by value compared with one that computes every value anew, under random operations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from baton.engine.retention.content_owner import ContentOwner, ContentUse, OwnerKind
from baton.engine.retention.return_chance import NUM_BINS, bin_of
from baton.engine.retention.value_order import ValueOrder
from tests.scale import sized


@dataclass
class Rig:
    """Rates depend on the owner and the bin of its age, savings on the position and on copies."""

    seed: int
    kept_copies: int | None = None
    now_s: float = 0.0
    copies: set[int] = field(default_factory=set)
    number: int = 0

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.owners = [ContentOwner(OwnerKind.UNNAMED, "t", clock=lambda: self.now_s) for _ in range(4)]
        for owner in self.owners:
            owner.idle_since_s = 0.0
        self.rates = {id(owner): [self.rng.random() for _ in range(NUM_BINS + 1)] for owner in self.owners}
        self.rate_of_unknown = self.rng.random()
        self.saved = [self.rng.random() for _ in range(30)]
        self.order = ValueOrder(
            clock=lambda: self.now_s,
            return_rate=self.rate,
            value=self.value,
            has_copy=lambda block_id: block_id in self.copies,
            kept_copies=self.kept_copies,
        )
        self.naive: dict[int, tuple[ContentOwner | None, int, int]] = {}  # owner, position, number

    def rate(self, owner: ContentOwner | None) -> float:
        return self.rate_of_unknown if owner is None else self.rates[id(owner)][bin_of(owner.age_s)]

    def value(self, rate: float, position: int, has_copy: bool, is_running: bool) -> float:
        saved = self.saved[position]
        return rate * saved * ((0.9 if is_running else 0.01) if has_copy else 1.0)

    def value_of(self, block_id: int) -> float:
        owner, position, _ = self.naive[block_id]
        is_running = owner is not None and owner.num_running > 0
        return self.value(self.rate(owner), position, block_id in self.copies, is_running)

    def in_order(self, has_copy: Callable[[bool], bool]) -> list[int]:
        """Each time evict the last block of the owner and kind of copy where it has the lowest value."""
        left = {block_id: each for block_id, each in self.naive.items() if has_copy(block_id in self.copies)}
        found = []
        while left:
            ends = {}
            for block_id, (owner, _, _) in sorted(left.items(), key=lambda each: (each[1][1], -each[1][2])):
                ends[owner, block_id in self.copies] = block_id
            block_id = min(ends.values(), key=self.value_of)
            del left[block_id]
            found.append(block_id)
        return found

    def expected(self, count: int, excluded: set[int]) -> list[int]:
        if self.kept_copies is None:
            return [each for each in self.in_order(lambda _: True) if each not in excluded][:count]
        copied = [each for each in self.in_order(lambda is_copied: is_copied) if each not in excluded]
        alone = [each for each in self.in_order(lambda is_copied: not is_copied) if each not in excluded]
        surplus = max(0, len(self.copies & self.naive.keys()) - self.kept_copies)
        return [*copied[:surplus], *alone, *copied[surplus:]][:count]

    def expected_without_copy(self, count: int, above_rate: float) -> list[int]:
        """Whole owners in the order in which they are evicted, each from the beginning of its chain."""
        alone = self.in_order(lambda is_copied: not is_copied)
        owners = dict.fromkeys(self.naive[block_id][0] for block_id in self.in_order_of_owners(alone))
        found: list[int] = []
        for owner in owners:
            if self.rate(owner) <= above_rate:
                continue
            own = [block_id for block_id in alone if self.naive[block_id][0] is owner]
            found += reversed(own)
        return found[:count]

    def in_order_of_owners(self, alone: list[int]) -> list[int]:
        """Return the blocks that their owners lose first, the lowest value first."""
        ends: dict[ContentOwner | None, int] = {}
        for block_id in alone:
            ends.setdefault(self.naive[block_id][0], block_id)
        return sorted(ends.values(), key=self.value_of)

    def act(self) -> None:
        rng = self.rng
        match rng.choice(["put", "put", "remove", "pass", "run", "copy"]):
            case "put" if free := [block_id for block_id in range(20) if block_id not in self.naive]:
                owner, block_id = rng.choice([None, *self.owners]), rng.choice(free)
                position = rng.randrange(len(self.saved))
                self.order.put(block_id, ContentUse(owner, position))
                self.number += 1
                self.naive[block_id] = (owner, position, self.number)
            case "remove" if self.naive:
                block_id = rng.choice(list(self.naive))
                self.order.remove(block_id)
                del self.naive[block_id]
            case "pass":
                self.now_s += rng.choice([0.01, 1.0, 10.0, 500.0])
            case "run":
                owner = rng.choice(self.owners)
                owner.num_running = 1 - owner.num_running
                if not owner.num_running:
                    owner.idle_since_s = self.now_s
                self.order.changed(owner)
            case "copy":
                block_id = rng.randrange(20)
                self.copies ^= {block_id}
                self.order.copy_changed(block_id)

    def check(self) -> None:
        count, excluded = self.rng.randrange(8), set(self.rng.sample(range(20), self.rng.randrange(5)))
        assert self.order.first(count, excluded) == self.expected(count, excluded)
        above_rate = self.rng.choice([-1.0, self.rng.random()])
        assert self.order.first_without_copy(count, above_rate) == self.expected_without_copy(count, above_rate)
        for block_id in range(20):
            known = self.naive.get(block_id)
            assert self.order.rate_of(block_id) == (None if known is None else self.rate(known[0]))
        assert self.order.num_copied == len(self.copies & self.naive.keys())
        assert sorted(self.order.ids()) == sorted(self.naive)
        assert len(self.order) == len(self.naive)


@pytest.mark.parametrize("kept_copies", [None, 0, 3])
@pytest.mark.parametrize("seed", range(sized(10, 400)))
def test_order_equals_a_naive_order(seed: int, kept_copies: int | None) -> None:
    rig = Rig(seed, kept_copies)
    for _ in range(200):
        rig.act()
        rig.check()


def test_content_that_is_not_expected_again_is_not_copied() -> None:
    rig = Rig(1)
    gone, expected = rig.owners[:2]
    rig.rates[id(gone)] = [0.0] * (NUM_BINS + 1)
    for block_id in range(6):
        rig.order.put(block_id, ContentUse(gone if block_id < 3 else expected, block_id % 3))
    assert sorted(rig.order.first_without_copy(6, -1.0)) == [3, 4, 5]


def test_outdated_entries_take_bounded_memory() -> None:
    rig = Rig(1)
    for block_id in range(20):
        rig.order.put(block_id, ContentUse(rig.owners[block_id % 4], 0))
    for number in range(5000):
        rig.now_s += 0.3
        rig.order.changed(rig.owners[number % 4])
        rig.copies ^= {number % 20}
        rig.order.copy_changed(number % 20)
    assert max(map(len, rig.order._by_value.values())) < 100
    assert len(rig.order._next_bins) < 100
