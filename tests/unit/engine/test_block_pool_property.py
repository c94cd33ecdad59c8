"""The block pool compared with a naive pool that recomputes everything, under random operations."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from baton.core.kv.block_hash import NO_HASH
from baton.core.kv.kv_events import KvEventKind
from baton.engine.kv_cache.block_pool import BlockPool
from tests.fake_executor import FakeGenerationTable
from tests.scale import sized


@dataclass
class NaiveBlock:
    refs: int = 0
    pins: int = 0
    block_hash: bytes = NO_HASH
    fill: str = ""
    generation: int = 0
    released_in_step: int = 0  # 0: the step is not in flight any more
    released_at: int = 0  # time when it became idle in its present state
    is_copy: bool = False
    num_uses: int = 0
    was_reused: bool = False

    @property
    def state(self) -> str:
        if self.fill in ("receiving", "quarantined"):
            return self.fill
        if self.refs or self.pins:
            return "used"
        return "cached" if self.block_hash != NO_HASH else "free"

    @property
    def eviction_key(self) -> tuple[int, int]:
        """Sort key: the order in which idle blocks are reallocated."""
        return (0 if self.state == "free" else 1 if self.is_copy else 2, self.released_at)


class Pools:
    """Applies the same random operations to both pools. Only operations that the naive pool allows are
    chosen."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.num_blocks = self.rng.randint(1, 12)
        self.generation_table = FakeGenerationTable(self.num_blocks)
        self.pool = BlockPool(self.num_blocks, 4, self.generation_table)
        self.naive = [NaiveBlock(released_at=i) for i in range(self.num_blocks)]
        self.now = self.num_blocks
        self.in_flight: list[int] = []
        self.step = 0
        self.here: set[bytes] = set()
        self.copying: Counter[int] = Counter()
        self.reported: list[int | bytes] = []
        self.expected: list[int | bytes] = []
        self.pool.add_listener(self)

    def became_idle(self, block_id: int) -> None:
        self.reported.append(block_id)

    def withdrawn(self, block_hash: bytes) -> None:
        self.reported.append(block_hash)

    def where(self, *states: str) -> list[int]:
        return [i for i, b in enumerate(self.naive) if b.state in states]

    def some(self, block_ids: list[int]) -> list[int]:
        return self.rng.sample(block_ids, self.rng.randint(0, len(block_ids)))

    def tick(self) -> int:
        self.now += 1
        return self.now

    def released(self, block_ids: list[int]) -> None:
        for i in reversed(block_ids):
            block = self.naive[i]
            if block.state not in ("free", "cached"):
                continue
            block.fill = ""
            if any(
                other.block_hash == block.block_hash
                for j, other in enumerate(self.naive)
                if j != i and block.block_hash != NO_HASH
            ):
                block.block_hash = NO_HASH
            block.is_copy &= block.block_hash != NO_HASH
            if block.block_hash != NO_HASH:
                self.expected.append(i)
            block.released_at = self.tick()
            block.released_in_step = self.in_flight[-1] if self.in_flight else 0

    def allocate(self, receives: bool) -> None:
        count = self.rng.randint(0, self.num_blocks)
        idle = [
            i
            for i in self.where("free", "cached")
            if self.naive[i].released_in_step not in self.in_flight and i not in self.copying
        ]
        got = self.pool.allocate_receiving(count) if receives else self.pool.allocate(count)
        assert (got is None) == (count > len(idle))
        if got is None:
            return
        assert got == sorted(idle, key=lambda i: self.naive[i].eviction_key)[:count]
        for i in got:
            self.naive[i] = NaiveBlock(
                refs=1, fill="receiving" if receives else "", generation=self.naive[i].generation + 1
            )

    def act(self) -> None:
        rng, pool, naive = self.rng, self.pool, self.naive
        action = rng.choice(
            "allocate allocate receiving receiving copy copy use use forget ref unref unref pin unpin hash".split()
            + "export export exported land drop quarantine heal launch launch finish withdraw doubt".split()
        )
        if action in ("allocate", "receiving"):
            self.allocate(action == "receiving")
        elif action == "ref":
            chosen = self.some([i for i in self.where("used", "cached") if naive[i].fill == ""])
            pool.ref(chosen)
            for i in chosen:
                naive[i].refs += 1
        elif action == "unref":
            chosen = self.some([i for i, b in enumerate(naive) if b.refs])
            pool.unref(chosen)
            for i in chosen:
                naive[i].refs -= 1
            self.released(chosen)
        elif action == "pin":
            chosen = self.some([i for i in self.where("used", "cached") if naive[i].fill == ""])
            pool.pin(chosen)
            for i in chosen:
                naive[i].pins += 1
        elif action == "unpin":
            chosen = self.some([i for i, b in enumerate(naive) if b.pins])
            pool.unpin(chosen)
            for i in chosen:
                naive[i].pins -= 1
            self.released(chosen)
        elif action == "hash":
            for i in self.some(
                [i for i in self.where("used") if naive[i].block_hash == NO_HASH and naive[i].fill == ""]
            ):
                naive[i].block_hash = (
                    rng.randbytes(1) * 16 if rng.random() < 0.3 else rng.choice([b"a", b"b", b"c"]) * 16
                )
                if naive[i].block_hash != NO_HASH:
                    pool.set_hash(i, naive[i].block_hash)
        elif action == "land":
            for i in self.some(self.where("receiving")):
                naive[i].fill, naive[i].block_hash = "", rng.choice([NO_HASH, b"a" * 16, b"d" * 16, b"e" * 16])
                naive[i].is_copy &= naive[i].block_hash != NO_HASH
                pool.mark_received(i, naive[i].block_hash)
                self.released([i])
        elif action == "copy":
            chosen = self.some(self.where("receiving"))
            pool.mark_replicas(chosen)
            for i in chosen:
                naive[i].is_copy = True
        elif action == "use":
            chosen = self.some([i for i, b in enumerate(naive) if b.block_hash != NO_HASH])
            pool.count_use(chosen)
            for i in chosen:
                naive[i].num_uses += naive[i].is_copy
                if naive[i].is_copy and naive[i].num_uses == 2:
                    naive[i].is_copy, naive[i].released_at = False, self.tick()
                naive[i].was_reused |= not naive[i].is_copy
        elif action == "forget":
            count = rng.randint(0, self.num_blocks)
            cold = sorted((i for i in self.where("cached") if naive[i].is_copy), key=lambda i: naive[i].eviction_key)
            assert pool.evict_replicas(count) == len(cold[:count])
            for i in cold[:count]:
                naive[i].block_hash, naive[i].is_copy, naive[i].released_at = NO_HASH, False, self.tick()
        elif action == "drop":
            chosen = self.some(self.where("receiving"))
            pool.drop_receiving(chosen)
            for i in chosen:
                naive[i].fill = "void"
            self.released(chosen)
        elif action == "quarantine":
            chosen = self.some(self.where("receiving"))
            pool.quarantine(chosen)
            for i in chosen:
                naive[i].fill = "quarantined"
        elif action == "heal":
            chosen = self.some(self.where("quarantined"))
            pool.end_quarantine(chosen)
            for i in chosen:
                naive[i].fill = "void"
            self.released(chosen)
        elif action == "export":
            for i in self.some(list(range(self.num_blocks))):
                is_possible = naive[i].state == "cached"
                assert pool.begin_copy(i) == (naive[i].block_hash if is_possible else NO_HASH)
                self.copying += Counter([i] if is_possible else [])
        elif action == "exported":
            chosen = self.some(sorted(self.copying))
            pool.end_copy(chosen)
            self.copying -= Counter(chosen)
        elif action == "launch":
            pool.fence.step_launched()
            self.step += 1
            self.in_flight.append(self.step)
        elif action == "finish" and self.in_flight:
            pool.fence.step_finished()
            self.in_flight.pop(0)
        elif action == "withdraw" and self.in_flight:
            pool.fence.step_withdrawn()
            withdrawn = self.in_flight.pop()
            for block in naive:
                if block.released_in_step == withdrawn:  # the preceding step may still write to it
                    block.released_in_step = self.in_flight[-1] if self.in_flight else 0
        elif action == "doubt":
            chosen = self.some([i for i in self.where("used") if naive[i].fill == ""])[:1]
            pool.unpublish(chosen)
            self.expected += [naive[i].block_hash for i in chosen if naive[i].block_hash != NO_HASH]
            for i in chosen:
                naive[i].block_hash, naive[i].is_copy = NO_HASH, False
                naive[i].generation += 1

    def assert_equal(self) -> None:
        pool, counts = self.pool, self.pool.counts()
        pool.check()
        reported = (counts.free, counts.cached, counts.used, counts.receiving, counts.quarantined)
        assert reported == tuple(
            len(self.where(state)) for state in ("free", "cached", "used", "receiving", "quarantined")
        )
        assert pool.num_allocatable == len(set(self.where("free", "cached")) - self.copying.keys())
        assert self.reported == self.expected
        for block in self.naive:
            block.was_reused &= block.block_hash != NO_HASH
        assert [pool.is_reused(i) for i in range(self.num_blocks)] == [b.was_reused for b in self.naive]
        assert counts.held_for_others == sum(b.pins > 0 and not b.refs for b in self.naive)
        copies = [b for b in self.naive if b.is_copy and b.fill != "void"]
        assert (pool.num_replicas, pool.num_idle_replicas) == (len(copies), sum(b.state == "cached" for b in copies))
        assert self.generation_table.generations == [b.generation for b in self.naive]
        assert [pool.hash_of(i) for i in range(self.num_blocks)] == [b.block_hash for b in self.naive]
        here = {b.block_hash for b in self.naive} - {NO_HASH}
        assert set(pool.hashes()) == here
        for block_hash in here:
            assert self.naive[pool.lookup([block_hash])[0]].block_hash == block_hash
        if self.rng.random() < 0.3:
            for kind, block_hash in pool.take_events():
                assert (block_hash in self.here) is (kind is KvEventKind.EVICTED)
                self.here ^= {block_hash}
            assert self.here == here


@pytest.mark.parametrize("seed", range(sized(10, 1000)))
def test_pool_equals_naive_pool(seed: int) -> None:
    pools = Pools(seed)
    for _ in range(300):
        pools.act()
        pools.assert_equal()
