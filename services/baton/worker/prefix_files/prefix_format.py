"""The format of a file of a cached prefix: a header, then each KV block with its hash and checksum.

All numbers are little-endian. The header names model, layout and tenant, and has the block hashes of the
prefix and a checksum. The KV blocks follow in the order of their entries in a flat block table
(`core.kv.kv_tables`): with sliding windows those that a continuation sees, else all. Pure functions of bytes.
"""

import struct
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from baton.core.errors import Refused, invalid
from baton.core.kv.block_hash import HASH_BYTES, BlockHash
from baton.core.kv.kv_layout import KvLayout
from baton.core.kv.kv_tables import hashes_of_prefix
from baton.core.messages.prefix_messages import MAX_PREFIX_BLOCKS
from baton.worker.disk.disk_format import file_shape, payload_checksum

FORMAT_VERSION = 1
_MAGIC = b"batonkvx"
_BEGIN = struct.Struct("<8sI")
_FIXED = struct.Struct("<8sIIIIQ16s16s16s")
_CHECKSUM = struct.Struct("<Q")
_RECORD = struct.Struct("<16sQ")
FIXED_BYTES = _FIXED.size
"""Bytes of the header before the block hashes."""
RECORD_BYTES = _RECORD.size
"""Bytes of hash and checksum before each KV block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHeader:
    """The header of a file of a prefix.

    layout, model: fingerprints of 16 bytes, as in a file of the disk tier
    tenant_root: of the tenant whose content it is
    chain: hashes of the prefix's blocks of tokens, from the first one
    """

    block_size_tokens: int
    block_bytes: int
    layout: bytes
    model: bytes
    tenant_root: BlockHash
    chain: tuple[BlockHash, ...] = ()

    @classmethod
    def of(cls, layout: KvLayout, tenant_root: BlockHash, chain: tuple[BlockHash, ...] = ()) -> "PrefixHeader":
        """Return the header of a prefix of a worker with this layout."""
        shape = file_shape(layout, 0)
        return cls(
            block_size_tokens=layout.block_size_tokens,
            block_bytes=layout.block_bytes,
            layout=shape.layout,
            model=shape.model,
            tenant_root=tenant_root,
            chain=chain,
        )

    def encoded(self) -> bytes:
        """Return the bytes of the header."""
        fixed = _FIXED.pack(
            _MAGIC,
            FORMAT_VERSION,
            self.block_size_tokens,
            len(self.chain),
            0,
            self.block_bytes,
            self.layout,
            self.model,
            self.tenant_root,
        )
        content = fixed + b"".join(self.chain)
        return content + _CHECKSUM.pack(xxh3_64_intdigest(content))


def file_bytes(layout: KvLayout, chain: tuple[BlockHash, ...]) -> int:
    """Return the size of the file of a prefix."""
    num_kv_blocks = len(hashes_of_prefix(chain, layout.windows))
    header_bytes = FIXED_BYTES + len(chain) * HASH_BYTES + _CHECKSUM.size
    return header_bytes + num_kv_blocks * (RECORD_BYTES + layout.block_bytes)


def rest_bytes(fixed: bytes) -> int:
    """Return how many bytes of the header follow its first `FIXED_BYTES`.

    Raises Refused if this is no file of a prefix, or one of another format or size.
    """
    magic, version = _BEGIN.unpack_from(fixed)
    if magic != _MAGIC:
        raise invalid("this is not a file of `baton cache export`: it begins with other bytes")
    if version != FORMAT_VERSION:
        raise invalid(
            f"the file has format version {version}; this worker reads version {FORMAT_VERSION}. Export it again with "
            "the release of this cluster"
        )
    num_blocks = _FIXED.unpack(fixed)[3]
    if not 0 < num_blocks <= MAX_PREFIX_BLOCKS:
        raise invalid(f"the file's header names {num_blocks} blocks; must be 1 to {MAX_PREFIX_BLOCKS}")
    return int(num_blocks) * HASH_BYTES + _CHECKSUM.size


def decode_header(fixed: bytes, rest: bytes, own: PrefixHeader) -> PrefixHeader:
    """Return a header that fits a worker. Raises Refused if it is damaged, or of another model or tenant.

    own: a header of the worker, for the tenant that the import is for
    """
    content, (checksum,) = fixed + rest[: -_CHECKSUM.size], _CHECKSUM.unpack(rest[-_CHECKSUM.size :])
    if xxh3_64_intdigest(content) != checksum:
        raise damaged("the checksum of its header is wrong")
    _, _, block_size_tokens, _, _, block_bytes, layout, model, tenant_root = _FIXED.unpack(fixed)
    hashes = content[FIXED_BYTES:]
    if model != own.model:
        raise invalid("the file has KV of another model; import it into a cluster with the model that it was made with")
    if block_size_tokens != own.block_size_tokens:
        raise invalid(
            f"the file has blocks of {block_size_tokens} tokens, and this worker of {own.block_size_tokens}; start the "
            f"cluster with --block-size-tokens {block_size_tokens}, or export it again here"
        )
    if (layout, block_bytes) != (own.layout, own.block_bytes):
        raise invalid(
            "the file has another KV layout than this worker; use the --dtype, --kv-dtype and release of the cluster "
            "that it was exported from"
        )
    if tenant_root != own.tenant_root:
        raise invalid(
            "the file was exported for another tenant, or by a cluster with another salt in its key file; name its "
            "tenant with --tenant"
        )
    return PrefixHeader(
        block_size_tokens=block_size_tokens,
        block_bytes=block_bytes,
        layout=layout,
        model=model,
        tenant_root=tenant_root,
        chain=tuple(hashes[begin : begin + HASH_BYTES] for begin in range(0, len(hashes), HASH_BYTES)),
    )


def encode_record(block_hash: BlockHash, payload: bytes) -> bytes:
    """Return the bytes of a KV block in a file."""
    return _RECORD.pack(block_hash, payload_checksum(np.frombuffer(payload, dtype=np.uint8), block_hash)) + payload


def is_intact(record: bytes, block_hash: BlockHash) -> bool:
    """Return True if these bytes are the KV block of this hash, and its checksum is right."""
    found, checksum = _RECORD.unpack_from(record)
    payload = np.frombuffer(record, dtype=np.uint8, offset=RECORD_BYTES)
    return bool(found == block_hash and payload_checksum(payload, block_hash) == checksum)


def damaged(what: str) -> Refused:
    """Return the error for a file that is not as it was exported."""
    return invalid(f"the file is damaged: {what}. Nothing was imported; copy or export it again")
