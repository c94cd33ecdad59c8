"""The order by value compared with one that computes every value anew, under random operations."""

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
            saved_s=self.saved_s,
            has_copy=lambda block_id: block_id in self.copies,
        )
        self.naive: dict[int, tuple[ContentOwner | None, int, int]] = {}  # owner, position, number

    def rate(self, owner: ContentOwner | None) -> float:
        return self.rate_of_unknown if owner is None else self.rates[id(owner)][bin_of(owner.age_s)]

    def saved_s(self, position: int, has_copy: bool) -> float:
        return self.saved[position] * (0.01 if has_copy else 1.0)

    def expected(self, count: int, excluded: set[int]) -> list[int]:
        """Each time evict the last block of the owner and kind of copy where it has the lowest value."""
        left, found = dict(self.naive), []
        while left and len(found) < count:
            ends = {}
            for block_id, (owner, position, _) in sorted(left.items(), key=lambda each: (each[1][1], -each[1][2])):
                ends[owner, block_id in self.copies] = (block_id, position)
            block_id, _ = min(
                ends.items(), key=lambda each: self.rate(each[0][0]) * self.saved_s(each[1][1], each[0][1])
            )[1]
            del left[block_id]
            if block_id not in excluded:
                found.append(block_id)
        return found

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
        assert sorted(self.order.ids()) == sorted(self.naive)
        assert len(self.order) == len(self.naive)


@pytest.mark.parametrize("seed", range(sized(30, 1000)))
def test_order_equals_a_naive_order(seed: int) -> None:
    rig = Rig(seed)
    for _ in range(200):
        rig.act()
        rig.check()


def test_outdated_entries_take_bounded_memory() -> None:
    rig = Rig(1)
    for block_id in range(20):
        rig.order.put(block_id, ContentUse(rig.owners[block_id % 4], 0))
    for number in range(5000):
        rig.now_s += 0.3
        rig.order.changed(rig.owners[number % 4])
        rig.copies ^= {number % 20}
        rig.order.copy_changed(number % 20)
    assert len(rig.order._by_value) < 100
    assert len(rig.order._next_bins) < 100
