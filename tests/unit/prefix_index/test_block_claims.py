"""Claims: in any order of changes, a chain's masks equal those of its blocks, and extents stay small."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.prefix_index.block_claims import MAX_EXTENT_BLOCKS, Claims
from tests.builders import hashes_of
from tests.scale import sized

CHAIN = hashes_of(range(4 * 3 * MAX_EXTENT_BLOCKS))
A, B = 1, 2


def extents(claims: Claims) -> set[object]:
    return {extent for table in claims._tables for extent in table.values()}


def test_blocks_claimed_together_are_looked_up_by_extent() -> None:
    claims = Claims()
    claims.toggle(CHAIN, A)
    assert list(claims.spans(CHAIN)) == [((i + 1) * MAX_EXTENT_BLOCKS, A) for i in range(3)]
    claims.toggle(CHAIN[:10], B)
    assert list(claims.spans(CHAIN))[:2] == [(10, A | B), (MAX_EXTENT_BLOCKS, A)]
    assert list(claims.spans(CHAIN[:7])) == [(7, A | B)]
    other = (*CHAIN[:5], *hashes_of(range(9_000, 9_040)))
    assert list(claims.spans(other)) == [(5, A | B)]
    assert list(claims.spans(CHAIN[5:12])) == [(5, A | B), (7, A)], "from the middle of an extent"
    claims.toggle(CHAIN[20:21], A)
    assert list(claims.spans(CHAIN))[-1] == (20, A), "a block without claims ends the spans"


def test_blocks_without_claims_are_removed() -> None:
    claims = Claims()
    for bit in (A, B):
        claims.toggle(CHAIN, bit)
    for first in range(0, len(CHAIN), 5):
        claims.toggle(CHAIN[first : first + 5], A)
    assert (len(claims), claims.mask_of(CHAIN[3])) == (len(CHAIN), B)
    claims.toggle(reversed(CHAIN), B)
    assert (len(claims), extents(claims), claims.mask_of(CHAIN[3])) == (0, set(), 0)


@settings(max_examples=sized(50, 1_000), deadline=None)
@given(st.integers(0, 1_000_000))
def test_masks_of_spans_equal_masks_of_blocks(seed: int) -> None:
    random, claims, naive = Random(seed), Claims(), dict.fromkeys(CHAIN, 0)
    for _ in range(random.randrange(1, 30)):
        first = random.randrange(len(CHAIN))
        some = list(CHAIN[first : first + random.choice([1, 5, 64, 150])])
        if random.random() < 0.3:
            some = random.sample(some, random.randrange(1, len(some) + 1))
        bit = random.choice([A, B, 4])
        claims.toggle(some, bit)
        for block_hash in some:
            naive[block_hash] ^= bit
        start = random.choice([0, random.randrange(len(CHAIN))])
        masks: list[int] = []
        for end, mask in claims.spans(CHAIN[start:]):
            masks += [mask] * (end - len(masks))
        until = next((i for i, block_hash in enumerate(CHAIN[start:]) if not naive[block_hash]), len(CHAIN) - start)
        assert masks == [naive[block_hash] for block_hash in CHAIN[start : start + until]]
    assert all(claims.mask_of(block_hash) == mask for block_hash, mask in naive.items())
    assert len(claims) == sum(map(bool, naive.values()))
    assert all(1 <= len(extent.hashes) <= MAX_EXTENT_BLOCKS for extent in extents(claims))
