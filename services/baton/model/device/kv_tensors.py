"""Exposes the KV memory of a worker as tensors, over memory that the caller provides.

The shape is [num_blocks, num_layers, 2, num_kv_heads, block_size_tokens, head_dim]; index 2 is keys, then
values.
"""

from collections.abc import Iterable

import torch

from baton.core.errors import LayoutMismatch
from baton.core.kv.kv_layout import KvComponent, KvLayout, LayerGroup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def uniform_layout(
    *,
    model_fingerprint: str,
    tokenizer_fingerprint: str,
    block_size_tokens: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> KvLayout:
    """Return the KV layout of a model whose layers all cache keys and values of one shape."""
    name = DTYPE_NAMES[dtype]
    components = tuple(
        KvComponent(name=kind, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=name) for kind in ("k", "v")
    )
    return KvLayout(
        model_fingerprint=model_fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint,
        block_size_tokens=block_size_tokens,
        groups=(LayerGroup(layer_begin=0, num_layers=num_layers, components=components),),
    )


class KvCache:
    """Tensor views of one KV memory, which its owner keeps alive. Only one thread may read and write it."""

    def __init__(self, memory: torch.Tensor, layout: KvLayout) -> None:
        """`memory`: uint8 [num_blocks * block_bytes], on any device.

        Raises LayoutMismatch if the size is not a multiple of a block, or if layers, keys and values differ
        in shape.
        """
        if len(layout.groups) != 1 or [c.name for c in layout.groups[0].components] != ["k", "v"]:
            raise LayoutMismatch(f"all layers must cache keys and values of one shape; the layout has {layout.groups}")
        k, v = layout.groups[0].components
        if (k.num_kv_heads, k.head_dim, k.dtype) != (v.num_kv_heads, v.head_dim, v.dtype):
            raise LayoutMismatch(f"keys and values differ: {k} and {v}")
        if memory.dtype != torch.uint8 or memory.dim() != 1 or memory.numel() % layout.block_bytes:
            raise LayoutMismatch(
                f"KV memory has {memory.numel()} bytes; "
                f"must be a multiple of the block size, {layout.block_bytes} bytes"
            )
        self.layout = layout
        self.num_blocks = memory.numel() // layout.block_bytes
        self.num_layers = layout.num_layers
        self.num_kv_heads = k.num_kv_heads
        self.block_size_tokens = layout.block_size_tokens
        self.head_dim = k.head_dim
        self.blocks = memory.view(DTYPES[k.dtype]).view(
            self.num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size_tokens, self.head_dim
        )
        self._head_rows = self.blocks.view(-1, self.block_size_tokens * self.head_dim)
        self._token_rows = self.blocks.view(-1, self.head_dim)
        self._scratch = self.blocks.new_empty(0)

    @classmethod
    def over(cls, buffer: memoryview, layout: KvLayout) -> "KvCache":
        """Return a cache over a writable, contiguous host buffer, such as shared or registered memory.
        Nothing is copied.

        The buffer's length determines the number of blocks. Raises LayoutMismatch as `KvCache` does.
        """
        return cls(torch.frombuffer(buffer, dtype=torch.uint8), layout)

    @classmethod
    def zeros(cls, layout: KvLayout, num_blocks: int, device: torch.device | str = "cpu") -> "KvCache":
        """Return a cache over newly allocated, zeroed memory."""
        return cls(torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8, device=device), layout)

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks.dtype

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def layer(self, layer: int) -> torch.Tensor:
        """Return one layer as a strided view, [num_blocks, 2, num_kv_heads, block_size_tokens, head_dim]."""
        return self.blocks[:, layer]

    def token_rows(self, block_ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return the rows where layer 0 stores tokens, ordered (k/v, head, token).

        `block_ids`, `offsets`: [num_tokens], each token's block and its place in the block. The result is [2
        * num_kv_heads * num_tokens].
        """
        return (self._heads_of(block_ids) * self.block_size_tokens + offsets).reshape(-1)

    def write(self, layer: int, token_rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value, each [num_kv_heads, num_tokens, head_dim], at `token_rows` of a layer."""
        rows = token_rows + layer * 2 * self.num_kv_heads * self.block_size_tokens
        self._token_rows[rows] = torch.stack((key, value)).view(-1, self.head_dim)

    def head_rows(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows that `gather` reads for block tables [num_seqs, max_blocks], in layer 0.

        The result is [num_seqs * 2 * num_kv_heads * max_blocks].
        """
        return self._heads_of(block_ids).permute(2, 0, 1, 3).reshape(-1)

    def gather(self, layer: int, head_rows: torch.Tensor, num_seqs: int) -> torch.Tensor:
        """Return a contiguous copy of blocks, valid until the next gather.

        The shape is [num_seqs, 2, num_kv_heads, tokens, head_dim].
        """
        rows = head_rows + layer * 2 * self.num_kv_heads
        needed = rows.numel() * self._head_rows.shape[1]
        if self._scratch.numel() < needed:  # reused: page faults cost more than the copy itself
            self._scratch = self._scratch.new_empty(needed)
        out = self._scratch[:needed].view(rows.numel(), -1)
        torch.index_select(self._head_rows, 0, rows, out=out)
        return out.view(num_seqs, 2, self.num_kv_heads, -1, self.head_dim)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks in all layers, as (source, destination) pairs, in order."""
        for source, destination in pairs:
            self.blocks[destination].copy_(self.blocks[source])

    def _heads_of(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Return the index of (block, layer 0, k/v, head) among all heads of the memory.

        The shape is [2, num_kv_heads, *block_ids.shape].
        """
        kind_head = torch.arange(2 * self.num_kv_heads, device=self.device).view(
            2, self.num_kv_heads, *(1,) * block_ids.dim()
        )
        return block_ids * (self.num_layers * 2 * self.num_kv_heads) + kind_head
