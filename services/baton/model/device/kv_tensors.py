"""Exposes the KV memory of a worker as tensors, over memory that the caller provides.

`KvLayout` decides where everything lies. This module only makes views from its strides.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton.core.errors import LayoutMismatch
from baton.core.kv.kv_layout import ComponentStrides, KvLayout, kv_components, kv_fingerprint, layer_groups
from baton.model.device.kv_quantization import dequantize, quantize

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes of models, by name."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_STORED_DTYPES = {**DTYPES, "int8": torch.int8}
_KEYS_AND_VALUES = ["k", "v"]
_QUANTIZED = ["k", "k_scale", "v", "v_scale"]


def uniform_layout(
    *,
    model_fingerprint: str,
    tokenizer_fingerprint: str,
    block_size_tokens: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: str = "auto",
    windows: tuple[int | None, ...] = (),
) -> KvLayout:
    """Return the KV layout of a model whose layers all cache keys and values of one shape.

    dtype: of the model. kv_dtype: see `kv_components`.
    windows: number of tokens that each layer sees, None for all; empty if every layer sees all.
    """
    components = kv_components(
        num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=DTYPE_NAMES[dtype], kv_dtype=kv_dtype
    )
    return KvLayout(
        model_fingerprint=kv_fingerprint(model_fingerprint, kv_dtype),
        tokenizer_fingerprint=tokenizer_fingerprint,
        block_size_tokens=block_size_tokens,
        groups=layer_groups([(components, window or 0) for window in windows or (None,) * num_layers]),
    )


class TokenSlots(NamedTuple):
    """The slots of a step's tokens, int64 [num_tokens] each: block id, and offset in the block."""

    block_ids: torch.Tensor
    offsets: torch.Tensor


class BlockRows:
    """Blocks that attention gathers, [num_seqs, max_blocks], with the memory rows of their heads.

    Layers of one shape and block table have the same rows, which are therefore computed once per step.
    """

    def __init__(self, block_ids: torch.Tensor) -> None:
        self.num_seqs = block_ids.shape[0]
        self._block_ids = block_ids
        self._rows: dict[tuple[int, int, int], torch.Tensor] = {}

    def rows_of(self, strides: ComponentStrides) -> torch.Tensor:
        """Return the element at which each head begins, counted from the component's first, in the order
        (sequence, head, block)."""
        key = (strides.block, strides.head, strides.component.num_kv_heads)
        rows = self._rows.get(key)
        if rows is None:
            heads = torch.arange(strides.component.num_kv_heads, device=self._block_ids.device)[None, :, None]
            rows = (self._block_ids[:, None, :] * strides.block + heads * strides.head).reshape(-1)
            self._rows[key] = rows
        return rows


class _Component:
    """The views of one component of one layer.

    blocks: [num_blocks, num_kv_heads, block_size_tokens, head_dim].
    """

    def __init__(self, memory: torch.Tensor, layout: KvLayout, layer: int, name: str) -> None:
        self._strides = strides = layout.strides_of(layer, name)
        c = strides.component
        typed = memory.view(-1).view(_STORED_DTYPES[c.dtype])
        self._block_size_tokens = layout.block_size_tokens
        self.blocks = typed.as_strided(
            (memory.shape[0], c.num_kv_heads, layout.block_size_tokens, c.head_dim),
            (strides.block, strides.head, strides.token, 1),
            typed.storage_offset() + strides.offset,
        )
        head_size = layout.block_size_tokens * strides.token
        # Row r begins at element r, so that a row can be selected at any offset. Rows overlap; they are only read.
        self._head_rows = typed.as_strided(
            (typed.numel() - strides.offset - head_size + 1, head_size),
            (1, 1),
            typed.storage_offset() + strides.offset,
        )

    def gather(self, blocks: BlockRows, scratch: torch.Tensor) -> torch.Tensor:
        """Return [num_seqs, num_kv_heads, tokens, head_dim], copied into `scratch`."""
        rows = blocks.rows_of(self._strides)
        out = scratch[: rows.numel() * self._head_rows.shape[1]].view(rows.numel(), -1)
        torch.index_select(self._head_rows, 0, rows, out=out)
        return out.view(blocks.num_seqs, self._strides.component.num_kv_heads, -1, self._strides.component.head_dim)

    def num_gathered(self, blocks: BlockRows) -> int:
        """Return the number of elements that `gather` copies."""
        return blocks.rows_of(self._strides).numel() * self._head_rows.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKv:
    """Strided views of one layer's KV, for kernels.

    keys, values: [num_blocks, num_kv_heads, block_size_tokens, head_dim].
    key_scales, value_scales: [num_blocks, num_kv_heads, block_size_tokens], or None if KV is not quantised.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]


class KvCache:
    """Tensor views of one KV memory, which its owner keeps alive. Only one thread may read and write it.

    memory: uint8 [num_blocks, block_bytes].
    layers: the views of each layer.
    table_of: index of each layer's block table, see `KvLayout.tables`.
    dtype: in which attention computes: that of the model.
    """

    def __init__(self, memory: torch.Tensor, layout: KvLayout, dtype: torch.dtype | None = None) -> None:
        """`memory`: uint8 [num_blocks * block_bytes], on any device.

        `dtype`: of the model; None: the dtype in which KV is stored. Raises LayoutMismatch if the size is not
        a multiple of a block, if the layout does not number its layers from 0, or if a layer does not cache
        keys and values of one shape, in `dtype` or quantised.
        """
        if memory.dtype != torch.uint8 or memory.dim() != 1 or memory.numel() % layout.block_bytes:
            raise LayoutMismatch(
                f"KV memory has {memory.numel()} bytes; "
                f"must be a multiple of the block size, {layout.block_bytes} bytes"
            )
        self.layout = layout
        self.memory = memory.view(-1, layout.block_bytes)
        self.num_blocks = self.memory.shape[0]
        self.num_layers = layout.num_layers
        self.num_tables = layout.windows.num_tables
        self.block_size_tokens = layout.block_size_tokens
        self.dtype = dtype if dtype is not None else DTYPES.get(layout.kv_dtype, torch.float32)
        self.table_of = tuple(layout.table_of(layer) for layer in _numbered_layers(layout))
        self._components = [
            [_Component(self.memory, layout, layer, c.name) for c in layout.components_of(layer)]
            for layer in _numbered_layers(layout)
        ]
        self.layers = tuple(
            _layer_kv(layout, layer, components, self.dtype) for layer, components in enumerate(self._components)
        )
        self._scratch: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    @classmethod
    def over(cls, buffer: memoryview, layout: KvLayout, dtype: torch.dtype | None = None) -> "KvCache":
        """Return a cache over a writable, contiguous host buffer, such as shared or registered memory.
        Nothing is copied.

        The buffer's length determines the number of blocks. Raises LayoutMismatch as `KvCache` does.
        """
        return cls(torch.frombuffer(buffer, dtype=torch.uint8), layout, dtype)

    @classmethod
    def zeros(
        cls,
        layout: KvLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> "KvCache":
        """Return a cache over newly allocated, zeroed memory."""
        return cls(torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8, device=device), layout, dtype)

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def uniform_shape(self) -> tuple[int, int]:
        """(number of KV heads, head size) of every layer. Raises LayoutMismatch if layers differ."""
        shapes = {(layer.num_kv_heads, layer.head_dim) for layer in self.layers}
        if len(shapes) != 1:
            raise LayoutMismatch(f"all layers must cache one number of heads and one head size; they have {shapes}")
        return next(iter(shapes))

    def write(self, layer: int, slots: TokenSlots, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value, each [num_kv_heads, num_tokens, head_dim], at the tokens' slots of a layer."""
        kv = self.layers[layer]
        for blocks, scales, numbers in ((kv.keys, kv.key_scales, key), (kv.values, kv.value_scales, value)):
            stored = numbers.transpose(0, 1)
            if scales is not None:
                stored, token_scales = quantize(stored)
                scales[slots.block_ids, :, slots.offsets] = token_scales
            blocks[slots.block_ids, :, slots.offsets] = stored

    def gather(self, layer: int, blocks: BlockRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return contiguous copies of keys and values of blocks in `dtype`, valid until the next gather.

        The shape of each is [num_seqs, num_kv_heads, tokens, head_dim].
        """
        parts = [
            component.gather(blocks, self._scratch_for(part, component, component.num_gathered(blocks)))
            for part, component in enumerate(self._components[layer])
        ]
        if self.layers[layer].key_scales is None:
            keys, values = parts
        else:
            keys, values = (dequantize(parts[at], parts[at + 1][..., 0], self.dtype) for at in (0, 2))
        return keys, values

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks in all layers, as (source, destination) pairs, in order."""
        for source, destination in pairs:
            self.memory[destination].copy_(self.memory[source])

    def fill_with_nan(self) -> None:
        """Make every slot read as NaN, so that reading one that was not written shows."""
        for components in self._components:
            for component in components:
                is_float = component.blocks.is_floating_point()
                component.blocks.fill_(float("nan") if is_float else 1)

    def _scratch_for(self, part: int, component: _Component, count: int) -> torch.Tensor:
        """Return at least `count` elements. Reused: page faults cost more than the copy itself."""
        dtype = component.blocks.dtype
        scratch = self._scratch.get((part, dtype))
        if scratch is None or scratch.numel() < count:
            self._scratch[part, dtype] = scratch = component.blocks.new_empty(count)
        return scratch


def _numbered_layers(layout: KvLayout) -> range:
    """Return the layers. Raises LayoutMismatch if the groups do not number them from 0 without a gap."""
    begin = 0
    for group in layout.groups:
        if group.layer_begin != begin:
            raise LayoutMismatch(f"a group begins at layer {group.layer_begin}; must be {begin}, in {layout.groups}")
        begin += group.num_layers
    return range(begin)


def _layer_kv(layout: KvLayout, layer: int, components: list[_Component], dtype: torch.dtype) -> LayerKv:
    named = layout.components_of(layer)
    names = [c.name for c in named]
    if names == _KEYS_AND_VALUES:
        kv = LayerKv(keys=components[0].blocks, values=components[1].blocks)
    elif names == _QUANTIZED and all(scales.head_dim == 1 for scales in named[1::2]):
        keys, key_scales, values, value_scales = (component.blocks for component in components)
        kv = LayerKv(
            keys=keys,
            values=values,
            key_scales=key_scales.squeeze(-1),
            value_scales=value_scales.squeeze(-1),
        )
    else:
        raise LayoutMismatch(f"layer {layer} caches {named}; must be {_KEYS_AND_VALUES} or {_QUANTIZED}")
    wanted = dtype if kv.key_scales is None else torch.int8
    if kv.keys.shape != kv.values.shape or {kv.keys.dtype, kv.values.dtype} != {wanted}:
        raise LayoutMismatch(f"keys and values of layer {layer} must have one shape and the dtype {wanted}: {named}")
    return kv
