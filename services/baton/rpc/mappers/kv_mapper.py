"""Converts the layout of a worker's KV blocks, and its KV memory, between core and protobuf.

As in `common_mapper`, `from_x` raises Refused and nothing else.
"""

from baton.core.errors import invalid
from baton.core.kv.kv_layout import DTYPE_BYTES, KvComponent, KvLayout, KvMemory, LayerGroup
from baton.core.kv.kv_tables import MAX_TABLES
from baton.core.request_limits import printable
from baton.rpc.mappers.common_mapper import from_worker_ref, name, to_worker_ref
from baton.rpc.mappers.message_mapping import MessageMapping, checked, nested, repeated
from baton.wire.v1 import common_pb2 as pb

MAX_GROUPS, MAX_COMPONENTS, MAX_LAYERS = 4096, 64, 4096
MAX_AGENT_BYTES = 2**20


_COMPONENT = MessageMapping(KvComponent, pb.KvComponent, {"name": nested(str, lambda value: name(value, "component"))})
_GROUP = MessageMapping(LayerGroup, pb.LayerGroup, {"components": repeated(_COMPONENT.to_wire, _COMPONENT.from_wire)})


def to_kv_layout(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        layout_version=layout.layout_version,
        model_fingerprint=layout.model_fingerprint,
        tokenizer_fingerprint=layout.tokenizer_fingerprint,
        block_size_tokens=layout.block_size_tokens,
        block_bytes=layout.block_bytes,
        groups=[_GROUP.to_wire(group) for group in layout.groups],
        hash_scheme=layout.hash_scheme,
        sampler_version=layout.sampler_version,
    )


def from_kv_layout(message: pb.KvLayout) -> KvLayout:
    """Convert a layout. Raises Refused for an unknown dtype, too many layers, or if `block_bytes` does not
    match the sizes."""
    if not message.block_size_tokens:
        raise invalid("layout: block_size_tokens is missing")
    if len(message.groups) > MAX_GROUPS:
        raise invalid(f"layout: {len(message.groups)} groups of layers; at most {MAX_GROUPS} are allowed")
    if (num_layers := sum(group.num_layers for group in message.groups)) > MAX_LAYERS:
        raise invalid(f"layout: {num_layers} layers; at most {MAX_LAYERS} are allowed")
    if len({group.window for group in message.groups}) > MAX_TABLES:
        raise invalid(f"layout: the layers have more than {MAX_TABLES} different windows")
    for group in message.groups:
        if len(group.components) > MAX_COMPONENTS:
            raise invalid(
                f"layout: {len(group.components)} components in one layer; at most {MAX_COMPONENTS} are allowed"
            )
        for component in group.components:
            if component.dtype not in DTYPE_BYTES:
                raise invalid(
                    f"layout: dtype {printable(component.dtype)} is unknown; known are {', '.join(DTYPE_BYTES)}"
                )
    layout = KvLayout(
        model_fingerprint=name(message.model_fingerprint, "model_fingerprint"),
        tokenizer_fingerprint=name(message.tokenizer_fingerprint, "tokenizer_fingerprint"),
        block_size_tokens=message.block_size_tokens,
        groups=tuple(_GROUP.from_wire(group) for group in message.groups),
        layout_version=message.layout_version,
        hash_scheme=name(message.hash_scheme, "hash_scheme"),
        sampler_version=message.sampler_version,
    )
    if layout.block_bytes != message.block_bytes:
        raise invalid(f"layout: block_bytes is {message.block_bytes}, but its layers give {layout.block_bytes}")
    return layout


_MEMORY = MessageMapping(
    KvMemory,
    pb.KvMemory,
    {
        "owner": nested(to_worker_ref, from_worker_ref),
        "agent_name": checked(name),
        "memory_kind": checked(name),
        "ucx_environment": checked(name),
        "transfer": checked(name),
    },
)

to_kv_memory = _MEMORY.to_wire


def from_kv_memory(message: pb.KvMemory) -> KvMemory:
    """Convert the description of a worker's KV memory. Raises Refused if the agent's metadata is too long."""
    if len(message.agent_metadata) > MAX_AGENT_BYTES:
        raise invalid(f"agent_metadata has {len(message.agent_metadata)} bytes; at most {MAX_AGENT_BYTES} are allowed")
    return _MEMORY.from_wire(message)
