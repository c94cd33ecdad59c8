"""The memory layout of KV blocks. `block_bytes`, `strides_of` and `range_of` are the only arithmetic over KV
dimensions."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache

from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import HASH_SCHEME
from baton.core.kv.kv_tables import KvTable, TableWindows, divide_layers

LAYOUT_VERSION = 2
SAMPLER_VERSION = 2

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of models."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
COMPONENT_ALIGNMENT = 64
"""Each component of a layer begins at a multiple of this, in bytes: the cache line and the widest vector of
all supported processors, and a multiple of the size of every dtype."""
INT8 = "int8"
SCALE_DTYPE = "bfloat16"
"""Dtype of the scales of int8 KV. It has the range of float32, so no scale overflows or underflows. Numbers
are divided by the rounded scale, so its rounding costs nothing, see `model/device/kv_quantization.py`."""
_INT8_FINGERPRINT = "/kv-int8"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // COMPONENT_ALIGNMENT) * COMPONENT_ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class KvComponent:
    """One tensor that a layer caches, such as `k`: [num_kv_heads, block_size_tokens, head_dim] per block.

    A component with one number per token and head, such as the scales of int8 keys, has `head_dim` 1.
    """

    name: str
    num_kv_heads: int
    head_dim: int
    dtype: str

    def head_bytes(self, block_size_tokens: int) -> int:
        """Return the bytes of one head in one block."""
        return block_size_tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    def size_bytes(self, block_size_tokens: int) -> int:
        """Return the bytes of all heads of one layer in one block, with the padding that follows them."""
        return _aligned(self.num_kv_heads * self.head_bytes(block_size_tokens))


def kv_components(*, num_kv_heads: int, head_dim: int, dtype: str, kv_dtype: str = "auto") -> tuple[KvComponent, ...]:
    """Return the components of a layer that caches keys and values of one shape.

    dtype: that of the model.
    kv_dtype: `auto` stores KV in `dtype`; `int8` stores integers, with a scale for each token and head.
    """
    stored = INT8 if kv_dtype == INT8 else dtype
    scales = ("k_scale", "v_scale") if stored == INT8 else (None, None)
    components: list[KvComponent] = []
    for name, scale in zip(("k", "v"), scales, strict=True):
        components.append(KvComponent(name=name, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=stored))
        if scale is not None:
            components.append(KvComponent(name=scale, num_kv_heads=num_kv_heads, head_dim=1, dtype=SCALE_DTYPE))
    return tuple(components)


def kv_fingerprint(model_fingerprint: str, kv_dtype: str) -> str:
    """Return the fingerprint of a model's KV, from which block hashes are derived.

    KV in int8 has another fingerprint than the model, so that blocks of different dtypes never match.
    """
    return model_fingerprint + (_INT8_FINGERPRINT if kv_dtype == INT8 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Consecutive layers that cache the same components, in the order of `components`, and see as far back.

    window: number of tokens that a token sees, itself included; 0 for all.
    """

    layer_begin: int
    num_layers: int
    components: tuple[KvComponent, ...]
    window: int = 0

    def layer_bytes(self, block_size_tokens: int) -> int:
        """Return the bytes of one layer in one block."""
        return sum(c.size_bytes(block_size_tokens) for c in self.components)


def layer_groups(layers: Sequence[tuple[tuple[KvComponent, ...], int]]) -> tuple[LayerGroup, ...]:
    """Return the groups of a model whose layers have these (components, window)."""
    groups: list[LayerGroup] = []
    begin = 0
    for end in range(1, len(layers) + 1):
        if end == len(layers) or layers[end] != layers[begin]:
            components, window = layers[begin]
            groups.append(LayerGroup(layer_begin=begin, num_layers=end - begin, components=components, window=window))
            begin = end
    return tuple(groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentStrides:
    """The place of one component of one layer in the KV memory, counted in elements of its dtype.

    Element d of token t of head h in block b is at `offset + b * block + h * head + t * token + d`.
    """

    component: KvComponent
    offset: int
    block: int
    head: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The KV layout of a worker. Two workers can exchange blocks only if all fields are equal.

    A block holds the KV of `block_size_tokens` tokens in the layers of one of `tables`. All blocks have one
    size, so that any block can serve any table. Memory order inside a block: layer, component, head, token,
    head_dim. A block, a (block, layer) and a (block, layer, component, head) are therefore contiguous ranges.
    Components begin at multiples of `COMPONENT_ALIGNMENT`; the bytes in between, and those after a table's
    last layer, are never read.

    tables, windows: follow from the other fields, see `divide_layers`.
    """

    model_fingerprint: str
    tokenizer_fingerprint: str
    block_size_tokens: int
    groups: tuple[LayerGroup, ...]
    layout_version: int = LAYOUT_VERSION
    hash_scheme: str = HASH_SCHEME
    sampler_version: int = SAMPLER_VERSION
    tables: tuple[KvTable, ...] = field(init=False, repr=False, compare=False)
    windows: TableWindows = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tables = _tables_of(self.groups, self.block_size_tokens)
        windows = TableWindows(tuple(table.window for table in tables) or (0,), self.block_size_tokens)
        object.__setattr__(self, "tables", tables)
        object.__setattr__(self, "windows", windows)

    @property
    def num_layers(self) -> int:
        """Number of layers of all groups."""
        return sum(group.num_layers for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return max((table.num_bytes for table in self.tables), default=0)

    @property
    def kv_dtype(self) -> str:
        """Dtype in which KV is stored, such as `int8`; several, joined by `+`, if the groups differ."""
        return "+".join(dict.fromkeys(group.components[0].dtype for group in self.groups if group.components))

    def num_cached_blocks(self, num_blocks: int) -> int:
        """Return how many KV blocks hold a cached prefix of `num_blocks` blocks of tokens in the tables
        without a window. Whether the others are cached is not predicted."""
        return num_blocks * sum(not table.window for table in self.tables)

    def components_of(self, layer: int) -> tuple[KvComponent, ...]:
        """Return the components of a layer. Raises KeyError for an unknown layer."""
        for group in self.groups:
            if group.layer_begin <= layer < group.layer_begin + group.num_layers:
                return group.components
        raise KeyError(f"the layout has no layer {layer}")

    def table_of(self, layer: int) -> int:
        """Return the index of the layer's table. Raises KeyError for an unknown layer."""
        for index, table in enumerate(self.tables):
            if layer in table.layers:
                return index
        raise KeyError(f"the layout has no layer {layer}")

    def strides_of(self, layer: int, component: str) -> ComponentStrides:
        """Return where a component of a layer lies in memory. Raises KeyError for an unknown one."""
        offset = self._layer_offset(layer)
        for c in self.components_of(layer):
            if c.name == component:
                return self._strides(c, offset)
            offset += c.size_bytes(self.block_size_tokens)
        raise KeyError(f"layer {layer} has no component {component!r}")

    def range_of(self, block_id: int, layer: int, component: str, head: int) -> tuple[int, int]:
        """Return (offset, size) in bytes of one head in one block, from the start of the KV memory.

        Raises KeyError for an unknown layer, component or head.
        """
        strides = self.strides_of(layer, component)
        c = strides.component
        if not 0 <= head < c.num_kv_heads:
            raise KeyError(f"{component!r} of layer {layer} has no head {head}")
        element = strides.offset + block_id * strides.block + head * strides.head
        return element * DTYPE_BYTES[c.dtype], c.head_bytes(self.block_size_tokens)

    def _layer_offset(self, layer: int) -> int:
        """Return where a layer begins in a block of its table, in bytes."""
        layers = self.tables[self.table_of(layer)].layers
        before = layers[: layers.index(layer)]
        return sum(c.size_bytes(self.block_size_tokens) for each in before for c in self.components_of(each))

    def _strides(self, component: KvComponent, offset: int) -> ComponentStrides:
        item = DTYPE_BYTES[component.dtype]  # divides all of them, because components are aligned
        return ComponentStrides(
            component=component,
            offset=offset // item,
            block=self.block_bytes // item,
            head=component.head_bytes(self.block_size_tokens) // item,
            token=component.head_dim,
        )

    def mismatch(self, other: "KvLayout") -> str | None:
        """Return `field: own != other` for the first field that differs, or None if the layouts are equal."""
        for each in fields(self):
            own_value, other_value = getattr(self, each.name), getattr(other, each.name)
            if own_value != other_value:
                return f"{each.name}: {own_value!r} != {other_value!r}"
        return None


@lru_cache(maxsize=64)
def _tables_of(groups: tuple[LayerGroup, ...], block_size_tokens: int) -> tuple[KvTable, ...]:
    """Return `KvLayout.tables`. Cached, because each report of a worker carries its layout."""
    return divide_layers(
        {
            layer: (group.layer_bytes(block_size_tokens), group.window)
            for group in groups
            for layer in range(group.layer_begin, group.layer_begin + group.num_layers)
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemory:
    """Describes one shard of a worker's KV memory, so that a peer can read it. Plain integers and bytes, no
    pickle.

    agent_name: name of the transport agent, unique per worker incarnation
    agent_metadata: opaque data of the transport
    generation_table_address: address of `num_blocks` entries of `generation_entry_bytes` each
    ucx_environment: what decides which transports UCX has in the owner's process; empty if UCX is not used
    transfer: name of the transfer backend that reads it, such as `nixl`; empty if an earlier release sent it
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
    transfer: str = ""
