"""Tests how layers are divided into block tables, and which blocks a window reaches."""

import random
from dataclasses import replace

import pytest

from baton.core.kv.block_hash import chain, root_hash, table_hash, token_ids
from baton.core.kv.kv_layout import KvLayout, kv_components, layer_groups
from baton.core.kv.kv_tables import (
    TableWindows,
    divide_layers,
    entries_from,
    hashes_of_entries,
    num_entries,
    windows_text,
)
from tests import builders


def layout_of(windows: list[int], *, head_dim: int = 256, size: int = 16) -> KvLayout:
    components = kv_components(num_kv_heads=1, head_dim=head_dim, dtype="bfloat16")
    return builders.layout(block_size_tokens=size, groups=layer_groups([(components, each) for each in windows]))


def gemma(num_layers: int) -> list[int]:
    return [0 if layer % 6 == 5 else 512 for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("windows", "text"),
    [
        ([0] * 28, "28 layers"),
        ([9] * 3, "3 layers with window 9"),
        (gemma(18), "3 layers, 5 x 3 layers with window 512"),
        ([128, 0] * 12, "12 layers, 12 layers with window 128"),
        ([4, 0, 9], "1 layers, 1 layers with window 9, 1 layers with window 4"),
    ],
)
def test_layers_of_one_window_share_tables(windows: list[int], text: str) -> None:
    layout = layout_of(windows)
    assert windows_text(layout.tables) == text
    assert layout.block_bytes == max(len(table.layers) for table in layout.tables) * 2 * 16 * 256 * 2
    assert sorted(layer for table in layout.tables for layer in table.layers) == list(range(len(windows)))


@pytest.mark.parametrize("num_layers", [18, 26, 34, 48, 62])
def test_little_memory_is_lost_to_equal_blocks(num_layers: int) -> None:
    """The table of the layers without a window, which grows with the context, wastes nothing."""
    tables = layout_of(gemma(num_layers)).tables
    size = max(table.num_bytes for table in tables)
    assert tables[0].num_bytes == size
    assert sum(table.num_bytes for table in tables) >= 0.88 * size * len(tables)
    assert len(tables) <= 7


def test_layers_of_other_sizes_and_windows_fit_into_one_block() -> None:
    rng = random.Random(1)
    for _ in range(200):
        sizes = {64 * rng.randint(1, 9) for _ in range(3)}
        layers = {layer: (rng.choice(sorted(sizes)), rng.choice((0, 4, 9, 512))) for layer in range(rng.randint(1, 40))}
        tables = divide_layers(layers)
        assert sorted(layer for table in tables for layer in table.layers) == sorted(layers)
        for table in tables:
            assert {layers[layer][1] for layer in table.layers} == {table.window}
            assert table.num_bytes == sum(layers[layer][0] for layer in table.layers)
        assert [bool(table.window) for table in tables] == sorted(bool(table.window) for table in tables)
        assert len(tables) <= 16


def test_ranges_of_a_table_partition_its_block() -> None:
    layout = layout_of(gemma(26), head_dim=8, size=4)
    for table in layout.tables:
        at = 5 * layout.block_bytes
        for layer in table.layers:
            for component in layout.components_of(layer):
                assert layout.range_of(5, layer, component.name, 0) == (at, component.size_bytes(4))
                at += component.size_bytes(4)
        assert at == 5 * layout.block_bytes + table.num_bytes


def test_layouts_with_other_windows_do_not_match() -> None:
    first, other = layout_of([0, 9]), layout_of([0, 8])
    assert "groups" in (first.mismatch(other) or "")
    assert first.mismatch(replace(first)) is None
    assert first == replace(first)


@pytest.mark.parametrize("seed", range(20))
def test_entries_equal_their_definition(seed: int) -> None:
    rng = random.Random(seed)
    windows = TableWindows(tuple(rng.choice((0, 1, 5, 9, 30)) for _ in range(rng.randint(1, 4))), 4)
    num_tokens, begin = rng.randint(0, 60), rng.randint(0, 10)
    num_blocks = -(-num_tokens // 4)
    firsts = windows.first_blocks(num_tokens)
    needed = [
        block * windows.num_tables + table
        for block in range(num_blocks)
        for table, window in enumerate(windows.windows)
        if not window or 4 * block + 3 > num_tokens - window
    ]
    assert list(entries_from(firsts, num_blocks)) == needed
    assert list(entries_from(firsts, num_blocks, begin)) == [e for e in needed if e >= begin * windows.num_tables]
    assert windows.num_held_blocks(num_tokens) == num_entries(firsts, num_blocks) == len(needed)
    hashes = list(chain(root_hash(model_fingerprint="m", block_size_tokens=4), token_ids(range(num_tokens)), 4))
    assert hashes_of_entries(hashes, needed, windows.num_tables) == [
        table_hash(hashes[entry // windows.num_tables], entry % windows.num_tables)
        for entry in needed
        if entry // windows.num_tables < len(hashes)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_sequence_that_fits_equals_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    windows = TableWindows(tuple(rng.choice((0, 1, 5, 9, 30)) for _ in range(rng.randint(1, 4))), 4)
    chunk, num_blocks, at_most = rng.randint(1, 20), rng.randint(0, 60), rng.randint(0, 90)
    longest = windows.longest_sequence_blocks(num_blocks, chunk, at_most=at_most)
    assert longest <= at_most
    assert windows.num_blocks_at_once(4 * longest, chunk) <= num_blocks
    if longest < at_most:
        assert windows.num_blocks_at_once(4 * longest + 1, chunk) > num_blocks


@pytest.mark.parametrize("seed", range(20))
def test_chunks_never_need_more_blocks_than_stated(seed: int) -> None:
    rng = random.Random(seed)
    windows = TableWindows(tuple(rng.choice((0, 1, 5, 9, 30)) for _ in range(rng.randint(1, 4))), 4)
    num_tokens, chunk = rng.randint(1, 90), rng.randint(1, 20)
    begin, most = 0, 0
    while begin < num_tokens:
        end = min(num_tokens, begin + rng.randint(1, chunk))
        firsts = windows.first_blocks(begin)
        held = num_entries(firsts, -(-end // 4))
        full = sum(-(-num_tokens // 4) - -(-end // 4) for window in windows.windows if not window)
        most, begin = max(most, held + full), end
    assert most <= windows.num_blocks_at_once(num_tokens, chunk)
    assert windows.num_held_blocks(num_tokens) <= windows.num_blocks_at_once(num_tokens, 1)


def test_tables_have_different_hashes_of_the_same_tokens() -> None:
    block_hash = bytes(range(16))
    assert table_hash(block_hash, 0) == block_hash
    assert len({table_hash(block_hash, table) for table in range(16)}) == 16
