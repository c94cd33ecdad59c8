"""Tests the memory layout of KV blocks, with several groups of layers and several components."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.kv.block_hash import root_hash
from baton.core.kv.kv_layout import (
    COMPONENT_ALIGNMENT,
    DTYPE_BYTES,
    KvComponent,
    KvLayout,
    LayerGroup,
    kv_components,
    kv_fingerprint,
    layer_groups,
)
from tests import builders

COMPONENTS = st.builds(
    lambda heads, dim, dtype: {"num_kv_heads": heads, "head_dim": dim, "dtype": dtype},
    st.integers(1, 5),
    st.integers(1, 80),
    st.sampled_from(sorted(DTYPE_BYTES)),
).map(lambda fields: KvComponent(name="?", **fields))
GROUPS = st.lists(st.tuples(st.integers(1, 3), st.lists(COMPONENTS, min_size=1, max_size=4)), min_size=1, max_size=4)


def layout_of(groups: list[tuple[int, list[KvComponent]]], size: int) -> KvLayout:
    """Return a layout with groups of (number of layers, components), whose components get distinct names."""
    found: list[LayerGroup] = []
    for num_layers, components in groups:
        found.append(
            LayerGroup(
                layer_begin=sum(group.num_layers for group in found),
                num_layers=num_layers,
                components=tuple(replace(c, name=f"c{index}") for index, c in enumerate(components)),
            )
        )
    return builders.layout(block_size_tokens=size, groups=tuple(found))


@given(GROUPS, st.integers(1, 20), st.integers(0, 3))
def test_ranges_partition_the_block(groups: list[tuple[int, list[KvComponent]]], size: int, block_id: int) -> None:
    """In memory order each range begins where the one before ends, or at the next aligned byte."""
    layout = layout_of(groups, size)
    at = block_id * layout.block_bytes
    for layer in range(layout.num_layers):
        for component in layout.components_of(layer):
            at = -(-at // COMPONENT_ALIGNMENT) * COMPONENT_ALIGNMENT
            for head in range(component.num_kv_heads):
                begin, num_bytes = layout.range_of(block_id, layer, component.name, head)
                assert (begin, num_bytes) == (at, size * component.head_dim * DTYPE_BYTES[component.dtype])
                at += num_bytes
    end = (block_id + 1) * layout.block_bytes
    assert 0 <= end - at < COMPONENT_ALIGNMENT
    assert layout.block_bytes % COMPONENT_ALIGNMENT == 0


@given(GROUPS, st.integers(1, 20))
def test_strides_lead_to_the_ranges(groups: list[tuple[int, list[KvComponent]]], size: int) -> None:
    layout = layout_of(groups, size)
    for layer in range(layout.num_layers):
        for component in layout.components_of(layer):
            strides, item = layout.strides_of(layer, component.name), DTYPE_BYTES[component.dtype]
            assert strides.component == component
            for block_id, head in ((0, 0), (2, component.num_kv_heads - 1)):
                begin, num_bytes = layout.range_of(block_id, layer, component.name, head)
                element = strides.offset + block_id * strides.block + head * strides.head
                assert element * item == begin
                assert (strides.token * size, strides.head) == (num_bytes // item,) * 2


def test_blocks_of_one_dtype_and_a_usual_shape_have_no_padding() -> None:
    """They have the size that earlier releases gave them."""
    layout = builders.layout(
        block_size_tokens=16,
        groups=layer_groups([(kv_components(num_kv_heads=8, head_dim=128, dtype="bfloat16"), 0)] * 28),
    )
    assert layout.block_bytes == 28 * 2 * 8 * 16 * 128 * 2


@pytest.mark.parametrize(("head_dim", "share"), [(64, 33 / 64), (128, 65 / 128), (256, 129 / 256)])
def test_int8_halves_a_block(head_dim: int, share: float) -> None:
    sizes = [
        builders.layout(
            block_size_tokens=16,
            groups=layer_groups(
                [(kv_components(num_kv_heads=4, head_dim=head_dim, dtype="bfloat16", kv_dtype=kv_dtype), 0)]
            ),
        ).block_bytes
        for kv_dtype in ("auto", "int8")
    ]
    assert sizes[1] == sizes[0] * share


@pytest.mark.parametrize(("layer", "component", "head"), [(2, "k", 0), (-1, "k", 0), (0, "q", 0), (0, "k", 2)])
def test_unknown_ranges_are_refused(layer: int, component: str, head: int) -> None:
    with pytest.raises(KeyError):
        builders.layout().range_of(0, layer, component, head)


def test_layers_with_the_same_components_and_window_are_one_group() -> None:
    keys, wide = (kv_components(num_kv_heads=1, head_dim=dim, dtype="float32") for dim in (8, 16))
    groups = layer_groups([(keys, 5), (keys, 5), (keys, 0), (wide, 0), (keys, 5)])
    assert [(g.layer_begin, g.num_layers, g.components, g.window) for g in groups] == [
        (0, 2, keys, 5),
        (2, 1, keys, 0),
        (3, 1, wide, 0),
        (4, 1, keys, 5),
    ]


def test_kv_of_other_dtypes_never_matches() -> None:
    """Neither layouts nor block hashes do."""
    fingerprints = [kv_fingerprint("model", kv_dtype) for kv_dtype in ("auto", "int8")]
    roots = {root_hash(model_fingerprint=each, block_size_tokens=16) for each in fingerprints}
    assert len(roots) == 2
    plain, int8 = (
        builders.layout(
            groups=layer_groups([(kv_components(num_kv_heads=2, head_dim=8, dtype="float32", kv_dtype=kv_dtype), 0)])
        )
        for kv_dtype in ("auto", "int8")
    )
    assert (plain.kv_dtype, int8.kv_dtype) == ("float32", "int8")
    assert "groups" in (plain.mismatch(int8) or "")
