"""The format of a file of KV blocks: a superblock, a header for each slot, then the payloads of the slots.

All headers lie in one region, which is read at start. A slot is written in this order: a header that says
that the slot is being filled, a sync, the payload, a sync, the header that makes the slot valid. A header has
a checksum of its own, which begins with the file's random id, and one of the payload. Pure functions of
bytes.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from baton.core.kv.block_hash import HASH_BYTES, BlockHash
from baton.core.kv.kv_layout import KvLayout

FORMAT_VERSION = 1
PAGE_BYTES = 4096
"""Alignment of the parts of the file and of the slots: the sectors and pages of common disks."""
HEADER_BYTES = 128
_SUPER = struct.Struct("<8sIIQQ16s16sQ")
_SUPER_MAGIC = b"batonkv\n"
_HEADER = struct.Struct("<8sQ16s16s16s16sQII24s")
_HEADER_MAGIC = b"kvslot\r\n"
_CHECKSUM = struct.Struct("<Q")
MAX_SLOTS = 2**32 - 1


class DiskDefect(Enum):
    """Reason why content of a file was not used, or could not be written.

    FOREIGN_FILE: the file has another format, size, layout or model. DAMAGED_FILE: its superblock is invalid.
    TRUNCATED: bytes are missing at the end. UNFINISHED: a write was interrupted. FOREIGN_HEADER: a header has
    another layout or model. MISPLACED_HEADER: it belongs to another slot. DAMAGED_HEADER: its checksum is
    wrong. DUPLICATE: a later header has the same block hash. DAMAGED_PAYLOAD: the checksum of a payload is
    wrong. READ_ERROR, WRITE_ERROR, NO_SPACE: errors of the operating system.
    """

    FOREIGN_FILE = "foreign_file"
    DAMAGED_FILE = "damaged_file"
    TRUNCATED = "truncated"
    UNFINISHED = "unfinished"
    FOREIGN_HEADER = "foreign_header"
    MISPLACED_HEADER = "misplaced_header"
    DAMAGED_HEADER = "damaged_header"
    DUPLICATE = "duplicate"
    DAMAGED_PAYLOAD = "damaged_payload"
    READ_ERROR = "read_error"
    WRITE_ERROR = "write_error"
    NO_SPACE = "no_space"


class SlotState(Enum):
    """State of a slot in its header. A header of zeros is an empty slot.

    FILLING: a write has begun. DISCARDED: the content may be wrong.
    """

    FILLING = 1
    VALID = 2
    DISCARDED = 3


_STATE_MASK, _ANNOUNCED, _REUSED = 3, 4, 8
_STATES = {state.value: state for state in SlotState}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileShape:
    """The model, layout and size that a file was written for. Its content can be used for no other.

    layout, model: fingerprints of 16 bytes
    """

    num_slots: int
    block_bytes: int
    layout: bytes
    model: bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes from one payload to the next."""
        return _aligned(self.block_bytes)

    @property
    def headers_bytes(self) -> int:
        """Bytes of the header region, which follows the superblock."""
        return _aligned(self.num_slots * HEADER_BYTES)

    @property
    def payloads_begin(self) -> int:
        """Offset of the first payload."""
        return PAGE_BYTES + self.headers_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.payload_offset(self.num_slots)

    def header_offset(self, slot: int) -> int:
        """Return where the header of a slot begins."""
        return PAGE_BYTES + slot * HEADER_BYTES

    def payload_offset(self, slot: int) -> int:
        """Return where the payload of a slot begins."""
        return self.payloads_begin + slot * self.slot_bytes


class SlotHeader(NamedTuple):
    """The header of one slot. A named tuple, because a start builds one for each slot of a file.

    sequence: larger for later writes of the same file
    payload_checksum: see `payload_checksum`; 0 unless the slot is valid
    """

    slot: int
    state: SlotState
    sequence: int
    block_hash: BlockHash
    tenant_root: BlockHash
    payload_checksum: int = 0
    is_announced: bool = False
    is_reused: bool = False


def file_shape(layout: KvLayout, size_bytes: int) -> FileShape:
    """Return the shape of a file of at most `size_bytes` for blocks of this layout. It may have no slot."""
    spare = size_bytes - 2 * PAGE_BYTES
    num_slots = max(0, spare // (HEADER_BYTES + _aligned(layout.block_bytes)))
    return FileShape(
        num_slots=min(num_slots, MAX_SLOTS),
        block_bytes=layout.block_bytes,
        layout=_fingerprint(*(repr(getattr(layout, f.name)) for f in fields(layout) if f.name in _LAYOUT_FIELDS)),
        model=_fingerprint(layout.model_fingerprint),
    )


_LAYOUT_FIELDS = ("block_size_tokens", "groups", "layout_version", "hash_scheme", "tables")
"""Fields on which the meaning of a block's bytes depends, beside the model."""


def payload_checksum(payload: npt.NDArray[np.uint8], block_hash: BlockHash) -> int:
    """Return the checksum of a payload. It differs for equal bytes under another hash."""
    return xxh3_64_intdigest(payload.data, seed=int.from_bytes(block_hash[:8], "little"))


def encode_superblock(shape: FileShape, file_id: int) -> bytes:
    """Return the first page of a file. file_id: random, 64 bits."""
    content = _SUPER.pack(
        _SUPER_MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        shape.num_slots,
        shape.block_bytes,
        shape.layout,
        shape.model,
        file_id,
    ).ljust(PAGE_BYTES - _CHECKSUM.size, b"\0")
    return content + _CHECKSUM.pack(xxh3_64_intdigest(content))


def read_superblock(page: bytes, shape: FileShape) -> tuple[int, DiskDefect | None]:
    """Return (file id, None) for a file of this shape, (0, why it is of no use) for another."""
    if len(page) < PAGE_BYTES:
        return 0, DiskDefect.TRUNCATED
    content, (checksum,) = page[: -_CHECKSUM.size], _CHECKSUM.unpack(page[-_CHECKSUM.size :])
    if xxh3_64_intdigest(content) != checksum:
        return 0, DiskDefect.DAMAGED_FILE
    magic, version, header_bytes, num_slots, block_bytes, layout, model, file_id = _SUPER.unpack_from(content)
    found = FileShape(num_slots=num_slots, block_bytes=block_bytes, layout=layout, model=model)
    if (magic, version, header_bytes) != (_SUPER_MAGIC, FORMAT_VERSION, HEADER_BYTES) or found != shape:
        return 0, DiskDefect.FOREIGN_FILE
    return file_id, None


def encode_header(header: SlotHeader, shape: FileShape, file_id: int) -> bytes:
    """Return the bytes of a header."""
    flags = header.state.value | _ANNOUNCED * header.is_announced | _REUSED * header.is_reused
    content = _HEADER.pack(
        _HEADER_MAGIC,
        header.sequence,
        header.block_hash,
        header.tenant_root,
        shape.layout,
        shape.model,
        header.payload_checksum,
        header.slot,
        flags,
        b"",
    )
    return content + _CHECKSUM.pack(xxh3_64_intdigest(content, seed=file_id))


def decode_headers(
    region: bytes, shape: FileShape, file_id: int, first_slot: int = 0
) -> Iterator[SlotHeader | tuple[int, DiskDefect]]:
    """Yield the header of each slot that is not empty, or (slot, why it is not valid).

    region: consecutive headers, the first that of `first_slot`
    """
    words = np.frombuffer(region, dtype=np.uint64).reshape(-1, HEADER_BYTES // 8)
    view, num_content = memoryview(region), HEADER_BYTES - _CHECKSUM.size
    for index in np.flatnonzero(words.any(axis=1)).tolist():
        begin = index * HEADER_BYTES
        content = view[begin : begin + num_content]
        (checksum,) = _CHECKSUM.unpack_from(view, begin + num_content)
        if xxh3_64_intdigest(content, seed=file_id) != checksum:
            yield first_slot + index, DiskDefect.DAMAGED_HEADER
        else:
            yield _decoded(content, shape, first_slot + index)


def latest_headers(headers: list[SlotHeader]) -> tuple[list[SlotHeader], "Counter[DiskDefect]"]:
    """Return the valid headers in the order of their sequence, without those that a later one replaces."""
    defects: Counter[DiskDefect] = Counter()
    by_hash: dict[BlockHash, SlotHeader] = {}
    for header in sorted(headers, key=lambda each: each.sequence):
        if header.state is SlotState.FILLING:
            defects[DiskDefect.UNFINISHED] += 1
        if header.state is SlotState.VALID:
            defects[DiskDefect.DUPLICATE] += by_hash.pop(header.block_hash, None) is not None
            by_hash[header.block_hash] = header
    return list(by_hash.values()), +defects


def _decoded(content: memoryview, shape: FileShape, slot: int) -> SlotHeader | tuple[int, DiskDefect]:
    magic, sequence, block_hash, tenant_root, layout, model, checksum, own_slot, flags, _ = _HEADER.unpack(content)
    if layout != shape.layout or model != shape.model:
        return slot, DiskDefect.FOREIGN_HEADER
    if own_slot != slot:
        return slot, DiskDefect.MISPLACED_HEADER
    state = _STATES.get(flags & _STATE_MASK)
    if magic != _HEADER_MAGIC or state is None:
        return slot, DiskDefect.DAMAGED_HEADER
    is_announced, is_reused = bool(flags & _ANNOUNCED), bool(flags & _REUSED)
    return SlotHeader(slot, state, sequence, block_hash, tenant_root, checksum, is_announced, is_reused)


def _fingerprint(*parts: str) -> bytes:
    digest = blake2b(digest_size=HASH_BYTES, person=b"baton-kv-file")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.digest()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
