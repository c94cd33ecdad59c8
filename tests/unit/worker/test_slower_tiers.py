"""`SlowerTiers` and `StagingRows`: where content is loaded from, how long it takes, and in which memory."""

import asyncio
from collections.abc import Sequence

import pytest

from baton.core.kv.kv_events import Tier
from baton.worker.tiers.slower_tiers import SlowerTiers
from baton.worker.tiers.staging_rows import StagingRows

A, B, C, D, E = (bytes([n]) * 16 for n in range(1, 6))


class FixedTier:
    """A tier that holds some hashes, and loads `num_good` of those that it is asked for."""

    answers = True

    def __init__(self, tier: Tier, held: Sequence[bytes], block_s: float | None = 1.0, num_good: int = 99) -> None:
        self.tier, self._held, self._block_s, self._num_good = tier, held, block_s, num_good
        self.asked: list[tuple[bytes, int]] = []

    def holds(self, block_hash: bytes) -> bool:
        return block_hash in self._held

    def load_s(self, num_blocks: int) -> float | None:
        return None if self._block_s is None else num_blocks * self._block_s

    async def load(self, hashes: Sequence[bytes], block_ids: Sequence[int], *, within_s: float | None) -> int:
        self.asked += zip(hashes, block_ids, strict=True)
        return min(self._num_good, len(hashes))


def both(host_good: int = 99, disk_good: int = 99) -> tuple[FixedTier, FixedTier]:
    return FixedTier(Tier.HOST, (A, C), 1.0, host_good), FixedTier(Tier.DISK, (A, B, C, D), 5.0, disk_good)


def test_content_comes_from_the_fastest_tier_that_has_it() -> None:
    tiers = SlowerTiers(both())
    assert tiers.positions([A, B, C, D, E]) == {Tier.HOST: [0, 2], Tier.DISK: [1, 3]}
    assert [tiers.holds(each) for each in (A, B, E)] == [True, True, False]
    assert [[tier.tier for tier in some.tiers] for some in tiers.fastest()] == [[Tier.HOST], [Tier.HOST, Tier.DISK]]


@pytest.mark.parametrize(
    ("hashes", "seconds"), [([A, C], 2.0), ([A, C, D], 5.0), ([B, D, C], 10.0), ([], None), ([E], None)]
)
def test_tiers_load_at_the_same_time(hashes: list[bytes], seconds: float | None) -> None:
    assert SlowerTiers(both()).load_s(hashes, {}) == seconds


def test_the_time_is_unknown_if_one_tier_was_not_measured() -> None:
    host, _ = both()
    assert SlowerTiers([host, FixedTier(Tier.DISK, (B,), None)]).load_s([A, B], {}) is None


@pytest.mark.parametrize(
    ("hashes", "loading", "seconds"),
    [([A], {Tier.HOST: 3}, 4.0), ([A], {Tier.DISK: 3}, 1.0), ([A, B], {Tier.HOST: 7, Tier.DISK: 1}, 10.0)],
)
def test_loads_under_way_of_the_same_tier_come_first(
    hashes: list[bytes], loading: dict[Tier, int], seconds: float
) -> None:
    assert SlowerTiers(both()).load_s(hashes, loading) == seconds


@pytest.mark.parametrize(("host_good", "disk_good", "count"), [(9, 9, 4), (1, 9, 2), (9, 1, 3), (0, 9, 0), (9, 0, 1)])
async def test_a_load_counts_leading_blocks_over_all_tiers(host_good: int, disk_good: int, count: int) -> None:
    host, disk = both(host_good, disk_good)
    assert await SlowerTiers([host, disk]).load([A, B, C, D], [10, 11, 12, 13]) == count
    assert (host.asked, disk.asked) == ([(A, 10), (C, 12)], [(B, 11), (D, 13)])


async def test_rows_are_granted_in_the_order_of_the_calls() -> None:
    rows, order = StagingRows(range(3, 7)), list[str]()

    async def use(name: str, count: int, gate: asyncio.Event) -> None:
        taken = await rows.take(count)
        assert taken is not None
        assert len(set(taken)) == count
        order.append(name)
        await gate.wait()
        rows.give_back(taken)

    gates = [asyncio.Event() for _ in range(3)]
    tasks = [
        asyncio.ensure_future(use(name, count, gate))
        for name, count, gate in zip(("a", "b", "c"), (3, 4, 1), gates, strict=True)
    ]
    await asyncio.sleep(0.001)
    assert order == ["a"]  # one row is free, but b comes before c
    gates[0].set()
    await asyncio.sleep(0.001)
    assert order == ["a", "b"]
    gates[1].set()
    gates[2].set()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]


async def test_a_wait_that_is_cancelled_or_too_long_leaves_the_rows_to_the_next() -> None:
    rows = StagingRows(range(2))
    taken = await rows.take(2)
    assert taken is not None
    waiting = asyncio.ensure_future(rows.take(2))
    next_one = asyncio.ensure_future(rows.take(1))
    assert await rows.take(2, asyncio.get_running_loop().time() + 0.001) is None
    waiting.cancel()
    await asyncio.wait((waiting,))
    rows.give_back(taken)
    async with asyncio.timeout(1):
        assert len(await next_one or ()) == len(await rows.take(1) or ()) == 1
