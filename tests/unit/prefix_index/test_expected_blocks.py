"""The tree of expected chains keeps only expectations that have not ended, and is bounded."""

import random

from baton.prefix_index.expected_blocks import ExpectedBlocks, _TrieNode
from tests.builders import hashes_of
from tests.scale import sized

A, B = 1, 2
CHAIN = hashes_of(range(40))


def nodes(node: _TrieNode) -> list[_TrieNode]:
    return [node, *(below for child in node.children.values() for below in nodes(child))]


def test_divergence_of_chains_is_found_at_any_position() -> None:
    for diverge_at in range(len(CHAIN) + 1):
        expected = ExpectedBlocks()
        other = hashes_of([*range(4 * diverge_at), *([99] * 8)])
        expected.add(A, CHAIN, 9.0)
        expected.add(B, other, 9.0)
        shared = [(diverge_at, A | B)] if diverge_at else []
        assert expected.levels(CHAIN, 0.0) == [*shared, *([(10, A)] if diverge_at < 10 else [])]
        assert expected.levels(other, 0.0) == [*shared, (len(other), B)]


def test_repeated_expectation_extends_its_time_and_is_counted_once() -> None:
    expected = ExpectedBlocks()
    for until_s in (1.0, 3.0, 2.0):
        expected.add(A, CHAIN, until_s)
    assert expected.num_blocks == len(CHAIN)
    assert expected.levels(CHAIN, 2.9) == [(10, A)]
    assert expected.levels(CHAIN, 3.0) == []
    assert (expected.num_blocks, expected.num_of(A)) == (0, 0)


def test_expectations_that_expire_first_are_dropped_beyond_the_bound() -> None:
    expected = ExpectedBlocks(max_blocks=25)
    for first, until_s in ((100, 5.0), (200, 3.0), (300, 4.0)):
        expected.add(A, hashes_of(range(first, first + 40)), until_s)
    assert expected.num_blocks == 20
    assert [bool(expected.levels(hashes_of(range(f, f + 40)), 0.0)) for f in (100, 200, 300)] == [True, False, True]


def test_tree_has_only_nodes_of_present_expectations() -> None:
    rng = random.Random(7)
    expected = ExpectedBlocks()
    for step in range(sized(2_000, 50_000)):
        tokens = [token for _ in range(rng.randint(1, 12)) for token in [rng.randint(0, 2)] * 4]
        expected.add(rng.choice([A, B, 4]), hashes_of(tokens), step + rng.randint(1, 50))
        if rng.random() < 0.3:
            expected.stored(rng.choice([A, B, 4]), hashes_of(tokens))
        expected.levels(CHAIN, step)
        if step % 50 == 0:
            inner = [node for node in nodes(expected._root) if node.parent is not None]
            assert all(len(node.children) != 1 or node.num_ends for node in inner)
            assert all(node.passing and node.mask == sum(node.passing) for node in inner)
            assert all(node.parent.end == node.start < node.end <= len(node.hashes) for node in inner if node.parent)
            assert all(node.hashes[-1] in expected._by_last for node in inner), "ended chains are not referenced"
            assert sum(node.num_ends for node in inner) == sum(expected.num_of(bit) for bit in (A, B, 4))
    expected.levels(CHAIN, 1e9)
    assert (len(nodes(expected._root)), expected.num_blocks, expected._by_last, expected._ends) == (1, 0, {}, [])
