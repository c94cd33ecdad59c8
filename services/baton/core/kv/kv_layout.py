"""The memory layout of KV blocks. `block_bytes` and `range_of` are the only arithmetic over KV dimensions."""

from dataclasses import dataclass, fields

from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import HASH_SCHEME

LAYOUT_VERSION = 1
SAMPLER_VERSION = 2

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvComponent:
    """One tensor that a layer caches, such as `k`: [num_kv_heads, block_size_tokens, head_dim] per block."""

    name: str
    num_kv_heads: int
    head_dim: int
    dtype: str

    def head_bytes(self, block_size_tokens: int) -> int:
        """Return the bytes of one head in one block."""
        return block_size_tokens * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Consecutive layers that cache the same components, in the order of `components`."""

    layer_begin: int
    num_layers: int
    components: tuple[KvComponent, ...]

    def layer_bytes(self, block_size_tokens: int) -> int:
        """Return the bytes of one layer in one block."""
        return sum(c.num_kv_heads * c.head_bytes(block_size_tokens) for c in self.components)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The KV layout of a worker. Two workers can exchange blocks only if all fields are equal.

    Memory order inside a block: group, layer, component, head, token, head_dim. A block, a (block, layer) and
    a (block, layer, component, head) are therefore contiguous ranges.
    """

    model_fingerprint: str
    tokenizer_fingerprint: str
    block_size_tokens: int
    groups: tuple[LayerGroup, ...]
    layout_version: int = LAYOUT_VERSION
    hash_scheme: str = HASH_SCHEME
    sampler_version: int = SAMPLER_VERSION

    @property
    def num_layers(self) -> int:
        """Number of layers of all groups."""
        return sum(group.num_layers for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(group.num_layers * group.layer_bytes(self.block_size_tokens) for group in self.groups)

    def range_of(self, block_id: int, layer: int, component: str, head: int) -> tuple[int, int]:
        """Return (offset, size) in bytes of one head in one block, from the start of the KV memory.

        Raises KeyError for an unknown layer, component or head.
        """
        offset = block_id * self.block_bytes
        for group in self.groups:
            layer_bytes = group.layer_bytes(self.block_size_tokens)
            if not group.layer_begin <= layer < group.layer_begin + group.num_layers:
                offset += group.num_layers * layer_bytes
                continue
            offset += (layer - group.layer_begin) * layer_bytes
            for c in group.components:
                if c.name == component and 0 <= head < c.num_kv_heads:
                    return offset + head * c.head_bytes(self.block_size_tokens), c.head_bytes(self.block_size_tokens)
                offset += c.num_kv_heads * c.head_bytes(self.block_size_tokens)
        raise KeyError(f"layout has no layer {layer}, component {component!r}, head {head}")

    def mismatch(self, other: "KvLayout") -> str | None:
        """Return `field: own != other` for the first field that differs, or None if the layouts are equal."""
        for field in fields(self):
            own_value, other_value = getattr(self, field.name), getattr(other, field.name)
            if own_value != other_value:
                return f"{field.name}: {own_value!r} != {other_value!r}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemory:
    """Describes one shard of a worker's KV memory, so that a peer can read it. Plain integers and bytes, no
    pickle.

    agent_name: name of the transport agent, unique per worker incarnation
    agent_metadata: opaque data of the transport
    generation_table_address: address of `num_blocks` entries of `generation_entry_bytes` each
    ucx_environment: what decides which transports UCX has in the owner's process; empty if UCX is not used
    """

    owner: WorkerRef
    agent_name: str
    agent_metadata: bytes
    memory_kind: str
    device_id: int
    base_address: int
    block_stride_bytes: int
    num_blocks: int
    generation_table_address: int
    generation_entry_bytes: int
    shard: int = 0
    layer_begin: int = 0
    num_layers: int = 0
    head_begin: int = 0
    num_heads: int = 0
    ucx_environment: str = ""
