"""The KV memory of one worker as tensors, over memory given from outside:
[num_blocks, num_layers, 2, num_kv_heads, block_size_tokens, head_dim]."""

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
    """The layout of a model whose layers all cache keys and values of one shape."""
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
    """Views of one KV memory. Written and read by one thread; whoever gave the memory keeps it alive."""

    def __init__(self, memory: torch.Tensor, layout: KvLayout) -> None:
        """`memory`: uint8 [num_blocks * block_bytes], on any device. Raises LayoutMismatch if that is no
        whole number, or layers differ."""
        if len(layout.groups) != 1 or [c.name for c in layout.groups[0].components] != ["k", "v"]:
            raise LayoutMismatch(f"this executor pages keys and values of one shape on all layers, not {layout.groups}")
        k, v = layout.groups[0].components
        if (k.num_kv_heads, k.head_dim, k.dtype) != (v.num_kv_heads, v.head_dim, v.dtype):
            raise LayoutMismatch(f"keys and values differ: {k} and {v}")
        if memory.dtype != torch.uint8 or memory.dim() != 1 or memory.numel() % layout.block_bytes:
            raise LayoutMismatch(
                f"KV memory of {memory.numel()} bytes is no whole number of blocks of {layout.block_bytes} bytes"
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
        """Over a writable, contiguous host buffer, such as shared memory or memory registered with the
        transport; nothing is copied.

        The buffer's length says how many blocks there are. Raises LayoutMismatch as `KvCache`.
        """
        return cls(torch.frombuffer(buffer, dtype=torch.uint8), layout)

    @classmethod
    def zeros(cls, layout: KvLayout, num_blocks: int, device: torch.device | str = "cpu") -> "KvCache":
        """In memory of its own."""
        return cls(torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8, device=device), layout)

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks.dtype

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def layer(self, layer: int) -> torch.Tensor:
        """[num_blocks, 2, num_kv_heads, block_size_tokens, head_dim], a strided view."""
        return self.blocks[:, layer]

    def token_rows(self, block_ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Where layer 0 keeps tokens: for each of [num_tokens] its rows, [2 * num_kv_heads * num_tokens],
        ordered (k/v, head, token)."""
        return (self._heads_of(block_ids) * self.block_size_tokens + offsets).reshape(-1)

    def write(self, layer: int, token_rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value [num_kv_heads, num_tokens, head_dim] at `token_rows`."""
        rows = token_rows + layer * 2 * self.num_kv_heads * self.block_size_tokens
        self._token_rows[rows] = torch.stack((key, value)).view(-1, self.head_dim)

    def head_rows(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Rows to `gather` for block tables [num_seqs, max_blocks], in layer 0: [num_seqs * 2 * num_kv_heads
        * max_blocks]."""
        return self._heads_of(block_ids).permute(2, 0, 1, 3).reshape(-1)

    def gather(self, layer: int, head_rows: torch.Tensor, num_seqs: int) -> torch.Tensor:
        """Contiguous copy [num_seqs, 2, num_kv_heads, tokens, head_dim] of those blocks, valid until the next
        gather."""
        rows = head_rows + layer * 2 * self.num_kv_heads
        needed = rows.numel() * self._head_rows.shape[1]
        if self._scratch.numel() < needed:  # fresh pages cost more than the copy itself, so they are kept
            self._scratch = self._scratch.new_empty(needed)
        out = self._scratch[:needed].view(rows.numel(), -1)
        torch.index_select(self._head_rows, 0, rows, out=out)
        return out.view(num_seqs, 2, self.num_kv_heads, -1, self.head_dim)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in order."""
        for source, destination in pairs:
            self.blocks[destination].copy_(self.blocks[source])

    def _heads_of(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Index of (block, layer 0, k/v, head) among all heads: [2, num_kv_heads, *block_ids.shape]."""
        kind_head = torch.arange(2 * self.num_kv_heads, device=self.device).view(
            2, self.num_kv_heads, *(1,) * block_ids.dim()
        )
        return block_ids * (self.num_layers * 2 * self.num_kv_heads) + kind_head
