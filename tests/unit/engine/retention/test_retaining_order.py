"""Retention within budgets, on the order alone, on a block pool and on the slots of a tier."""

from collections.abc import Sequence
from random import Random

import pytest

from baton.core.kv.block_hash import NO_HASH
from baton.core.request import SessionHints
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.retention.content_owner import ContentOwner, ContentUse
from baton.engine.retention.content_owners import ContentOwners, OwnedRequest
from baton.engine.retention.eviction_order import EvictionOrder, LruOrder
from baton.engine.retention.retaining_order import MAX_RETAINED_SHARE, RetainingOrder
from baton.engine.retention.value_order import ValueOrder
from baton.engine.tiers.kv_tier import BlockToStore
from baton.engine.tiers.slots import TierSlots
from tests.fake_executor import FakeGenerationTable
from tests.scale import sized


class Rig:
    """An order over `size` blocks, where each tenant can retain `budget` of them."""

    def __init__(self, size: int = 20, budget: int = 4, *, by_value: bool = False) -> None:
        self.now_s, self.size, self.budget = 0.0, size, budget
        self.owners = ContentOwners(lambda: self.now_s)
        inner: EvictionOrder = LruOrder()
        if by_value:
            inner = ValueOrder(
                clock=lambda: self.now_s,
                return_rate=self.owners.return_rate,
                value=lambda rate, position, *_: rate * (1.0 + position),
                has_copy=lambda _: False,
            )
        self.order = RetainingOrder(inner, clock=lambda: self.now_s, size=size, tenant_blocks=budget)
        self.owners.on_change(self.order.changed)

    def begin(self, session: str, retain_s: float | None = None, tenant: str = "t") -> OwnedRequest:
        return self.owners.arrived(SessionHints(tenant=tenant, session=session, retain_s=retain_s), None)

    def turn(
        self, block_ids: Sequence[int], session: str = "s", retain_s: float | None = None, tenant: str = "t"
    ) -> ContentOwner:
        """Leave a chain of blocks, the last of which becomes idle first."""
        request = self.begin(session, retain_s, tenant)
        for position, block_id in reversed(list(enumerate(block_ids))):
            self.order.put(block_id, ContentUse(request.owner, position))
        self.owners.ended(request)
        return request.owner


def retained_now(order: RetainingOrder) -> set[int]:
    """Return the idle blocks that are retained. It ends the retention that is due, as an allocation does."""
    assert order.num_retained == len(order._retained)
    return set(order._retained)


@pytest.mark.parametrize("by_value", [False, True])
def test_retained_prefix_survives_what_comes_later(by_value: bool) -> None:
    rig = Rig(by_value=by_value)
    rig.turn([0, 1, 2], "kept", retain_s=60.0)
    for block_id in range(3, 20):
        rig.turn([block_id], f"s{block_id}")
    assert not {0, 1, 2} & set(rig.order.first(17))
    assert rig.order.first(20)[17:] == [2, 1, 0], "it is no pin"
    rig.now_s += 61.0
    assert rig.order.num_retained == 0
    if not by_value:
        assert rig.order.first(2) == [3, 4]


def test_beginning_of_a_chain_is_retained_if_the_budget_is_short() -> None:
    rig = Rig()
    rig.turn(range(10), retain_s=60.0)
    assert rig.order.first(20) == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert (rig.order.num_retained, rig.order.num_of_tenant("t")) == (4, 4)
    rig.turn([10], "other")
    assert rig.order.first(20)[-4:] == [3, 2, 1, 0]


def test_each_tenant_has_a_budget_and_all_together_have_one() -> None:
    rig = Rig(size=20, budget=8)
    rig.turn(range(8), "a", retain_s=60.0, tenant="a")
    rig.turn([8, 9], "b", retain_s=60.0, tenant="a")
    assert (rig.order.num_retained, rig.order.num_of_tenant("a")) == (8, 8)
    rig.turn(range(10, 18), "c", retain_s=60.0, tenant="c")
    assert (rig.order.num_retained, rig.order.num_of_tenant("c")) == (10, 2), "half of the tier"


def test_flood_loses_at_most_the_budget() -> None:
    """One-off prompts that all ask for retention get no more of the tier than the budget."""
    rig = Rig(size=100, budget=10)
    for number in range(90):
        rig.turn([number], f"s{number}", retain_s=1e6)
    assert rig.order.num_retained == 10
    assert len(set(rig.order.first(80))) == 80


def test_zero_ends_retention() -> None:
    rig = Rig()
    rig.turn([0, 1], retain_s=60.0)
    rig.owners.ended(rig.begin("s", retain_s=0.0))
    assert rig.order.num_retained == 0
    assert rig.order.first(2) == [1, 0]


def test_longer_retention_counts() -> None:
    rig = Rig()
    rig.turn([0], retain_s=10.0)
    rig.now_s = 5.0
    rig.owners.ended(rig.begin("s", retain_s=10.0))
    rig.now_s = 14.0
    assert rig.order.num_retained == 1
    rig.now_s = 15.0
    assert rig.order.num_retained == 0


def test_ends_of_retention_take_bounded_memory() -> None:
    rig = Rig()
    rig.turn([0], retain_s=1e6)
    for _ in range(2000):
        rig.owners.ended(rig.begin("s", retain_s=1e6))
    assert len(rig.order._ends) < 100


@pytest.mark.parametrize("seed", range(sized(10, 500)))
@pytest.mark.parametrize("by_value", [False, True])
def test_pool_loses_no_block_and_keeps_budgets(seed: int, by_value: bool) -> None:
    """Random turns of sessions of two tenants on a pool, with prefixes that they share."""
    rng = Random(seed)
    rig = Rig(size=rng.randint(4, 24), budget=rng.randint(0, 6), by_value=by_value)
    pool = BlockPool(rig.size, 4, FakeGenerationTable(rig.size))
    pool.order_by(rig.order)
    running: list[tuple[OwnedRequest, list[int]]] = []
    contents: dict[bytes, int] = {}
    for _ in range(200):
        rig.now_s += rng.choice([0.0, 0.3, 5.0])
        if rng.random() < 0.5:
            session, tenant = rng.choice(["", "a", "b", "c"]), rng.choice(["t", "u"])
            chain = [bytes([len(session), n // 3, n]) * 4 + b"...." for n in range(rng.randint(1, 6))]
            found = pool.match(chain, len(chain))
            retained = retained_now(rig.order)
            idle = pool.num_allocatable
            new = pool.allocate(len(chain) - len(found))
            assert (new is None) == (idle < len(chain) - len(found))
            if new is None:
                pool.unref(found)
                continue
            if retained & set(new):  # only if nothing else was idle
                assert len(retained - set(new)) == pool.num_allocatable
            for block_id, block_hash in zip(new, chain[len(found) :], strict=True):
                contents = {each: b for each, b in contents.items() if b != block_id}
                pool.set_hash(block_id, block_hash)
                contents.setdefault(block_hash, block_id)
            hints = SessionHints(tenant=tenant, session=session, retain_s=rng.choice([None, None, 0.0, 3.0, 50.0]))
            running.append((rig.owners.arrived(hints, chain[0]), found + new))
        elif running:
            request, block_ids = running.pop(rng.randrange(len(running)))
            pool.unref(block_ids, request.owner)
            rig.owners.ended(request)
        pool.check()
        assert sorted(rig.order.ids()) == [b for b in range(rig.size) if _is_cached(pool, b)]
        for tenant in ("t", "u"):
            retained_of = [u for u in rig.order._retained.values() if u.owner is not None and u.owner.tenant == tenant]
            assert rig.order.num_of_tenant(tenant) == len(retained_of) <= rig.budget
        assert rig.order.num_retained <= MAX_RETAINED_SHARE * rig.size
        assert all(pool.find(block_hash) is not None for block_hash in contents if _find(pool, block_hash, contents))


def _is_cached(pool: BlockPool, block_id: int) -> bool:
    return not pool.num_refs(block_id) and pool.hash_of(block_id) != NO_HASH


def _find(pool: BlockPool, block_hash: bytes, contents: dict[bytes, int]) -> bool:
    return pool.hash_of(contents[block_hash]) == block_hash


@pytest.mark.parametrize("seed", range(sized(10, 500)))
def test_slots_lose_no_slot_and_keep_budgets(seed: int) -> None:
    rng = Random(seed)
    rig = Rig(size=rng.randint(1, 12), budget=rng.randint(0, 4), by_value=True)
    slots = TierSlots(rig.size, FakeGenerationTable(rig.size))
    slots.order_by(rig.order)
    requests = {name: rig.begin(name, rng.choice([None, 30.0])) for name in "abc"}
    pinned: list[int] = []
    for _ in range(150):
        rig.now_s += rng.choice([0.0, 0.3, 5.0])
        match rng.choice(["fill", "fill", "pin", "unpin", "discard", "use", "turn"]):
            case "fill":
                owner = requests[rng.choice("abc")].owner
                blocks = [
                    BlockToStore(block_id=0, block_hash=bytes([rng.randint(1, 20)]) * 16, use=ContentUse(owner, n))
                    for n in range(rng.randint(1, 4))
                ]
                slots.end_fill(slots.begin_fill(blocks), is_complete=rng.random() < 0.9)
            case "pin":
                chosen = [slot for slot in range(rig.size) if slots.hash_of(slot) != NO_HASH and rng.random() < 0.3]
                slots.pin(chosen)
                pinned += chosen
            case "unpin":
                slots.unpin(pinned)
                pinned = []
            case "discard":
                slots.discard(bytes([rng.randint(1, 20)]) * 16)
            case "use":
                slots.count_use(range(rig.size))
            case "turn":
                name = rng.choice("abc")
                rig.owners.ended(requests[name])
                rig.now_s += rng.choice([0.5, 40.0])
                requests[name] = rig.begin(name, rng.choice([None, 0.0, 30.0]))
        slots.check()
        counts = slots.counts()
        assert counts.free + counts.held + counts.busy == rig.size
        assert rig.order.num_of_tenant("t") <= rig.budget


def test_order_of_a_filled_pool_or_tier_cannot_change() -> None:
    rig = Rig()
    pool = BlockPool(2, 4, FakeGenerationTable(2))
    (block_id,) = pool.allocate(1) or ()
    pool.set_hash(block_id, b"h" * 16)
    pool.unref([block_id])
    with pytest.raises(ValueError, match="cannot change"):
        pool.order_by(rig.order)
    slots = TierSlots(2, FakeGenerationTable(2))
    slots.end_fill(slots.begin_fill([BlockToStore(block_id=0, block_hash=b"h" * 16)]), is_complete=True)
    with pytest.raises(ValueError, match="cannot change"):
        slots.order_by(rig.order)
